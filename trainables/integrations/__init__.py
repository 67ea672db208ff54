"""Loops of frameworks as loops of one's own: theirs runs, and `run` sets, counts, times and ends it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainables.own_run import Run
from trainables.workload import LoopError, WorkloadError

SECOND = "a second Trainer began after the end of the run: only the first is tuned"


def refuse_twice(call: str, own: Mapping[str, Any], told: Collection[str]) -> None:
    """Raises WorkloadError for an own argument of a call that is among those `told` to the framework by `run`."""
    if twice := sorted(own.keys() & set(told)):
        raise WorkloadError(
            f"{call}(run, {twice[0]}={own[twice[0]]!r}): run sets it; leave it out, and put a knob into SPACE or BEFORE"
        )


def refuse_resumed(steps: int, argument: str) -> None:
    """Raises LoopError for a training that begins behind so many steps of another."""
    if steps:
        raise LoopError(
            f"the Trainer goes on from a checkpoint, behind its step {steps}: a training of a study begins with the "
            f"model that train(run) makes; leave out {argument}"
        )


def expect_callback(run: Run, without: str, before: str) -> None:
    """Has a step of an optimiser raise LoopError where `run` was told of no batch: the framework's loop may never end.

    `without` says what was forgotten, and `before` behind which call no other training may be.
    """

    def stepped(*_: Any) -> None:
        if not run.progress:
            said = f"an optimiser stepped, and run was told of no batch: {without}"
            raise LoopError(f"{said}; what is trained beforehand belongs before {before}")

    run.keep(register_optimizer_step_pre_hook(stepped))
