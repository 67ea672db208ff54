"""Frameworks' loops as custom loops: the framework trains; `run` configures, counts, times and ends the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainables.own_run import Run
from trainables.workload import LoopError, WorkloadError

SECOND = "a second Trainer began after the end of the run: only the first is tuned"


def refuse_twice(call: str, own: Mapping[str, object], set_by_run: Collection[str]) -> None:
    """Raises WorkloadError if the user's own arguments of a call include one that `run` sets."""
    if twice := sorted(own.keys() & set(set_by_run)):
        raise WorkloadError(
            f"{call}(run, {twice[0]}={own[twice[0]]!r}): run sets it; leave it out, and put a knob into SPACE or BEFORE"
        )


def refuse_resumed(steps: int, argument: str) -> None:
    """Raises LoopError if a training resumes from a checkpoint after `steps` steps."""
    if steps:
        raise LoopError(
            f"the Trainer resumes from a checkpoint, after its step {steps}: a training of a search begins with the "
            f"model that train(run) makes; leave out {argument}"
        )


def expect_callback(run: Run, without: str, before: str) -> None:
    """Makes an optimiser's step raise LoopError if no batch was reported to `run`: the loop might never end.

    `without` is what the user has forgotten. Other trainings are allowed only before the call `before`.
    """

    def stepped(*_: Any) -> None:
        if not run.progress:
            what = f"an optimiser stepped, and run was told of no batch: {without}"
            raise LoopError(f"{what}; what is trained beforehand belongs before {before}")

    run.keep(register_optimizer_step_pre_hook(stepped))
