"""A custom loop's description of itself, by a few steps: its data, its model, what it asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from trainables import garbage, own_checks, own_loop
from trainables.evaluation import Evaluation
from trainables.knobs import Scalar
from trainables.loader_check import Moving
from trainables.own_count import FirstReport, OwnResident, OwnState
from trainables.plan import Plan
from trainables.reports import READY, Event
from trainables.source import source_hash
from trainables.state import LOSS, Diverged
from trainables.workload import NotIndependent, WorkloadError
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.workers import fingerprint
from tuning.workers.device_facts import device_facts
from tuning.workers.worker_config import Description

if TYPE_CHECKING:
    from tuning.search.protocols import TrialState
    from tuning.workers.session import Session

LOADED_AT = time.time()
"""When this process began, in Unix seconds."""
DRY_S = 5.0
"""So long a report is waited for: a loop that reports at the end of a pass is not tried to that end."""
AGAIN_S, AGAIN_FRAC = 5.0, 0.1
"""What a training that learns nothing may take to be tried again, or that share of a training if it is more."""
NO_RATE = 1e-12
"""The learning rate of the steps that are tried: what is reported after them is what the model knows untrained."""
STILL = 1e-8
"""No rate that trains anything, and more than what a loop makes of `NO_RATE` for some of its layers."""
DRY_SEED = 20_011
"""No seed that a script would set by itself: one that does is told."""
DRY_WINDOW_S = 0.2
DRY_PLAN = Plan(samples=1_000_000_000, milestones=(1,), window_s=DRY_WINDOW_S)


def described(session: Session, resident: OwnResident, knobs: Mapping[str, Scalar]) -> Description:
    """Returns what `Session.describe` does.

    `untrained` is what it reports, where it asks for a rate and no optimiser that is known has another, so that the
    steps so far changed nothing. Raises what their function raises; out of memory, it is tried with half the
    micro-batch: what it raises at a smaller one, as batch norm at one sample, is then no mistake of theirs, and the
    lack of memory is raised.
    """
    tried, lacked = {**knobs, **({} if resident.workload.is_outside else {"learning_rate": NO_RATE})}, None
    while True:
        began = time.perf_counter()
        try:
            state, reported = _tried(session, resident, tried)
            break
        except Exception as error:  # whatever a user's code raises
            micro = oom.halve(session.config(tried).knobs.micro_batch_size)
            is_lack = oom.classify(error) in (Outcome.OOM, Outcome.HOST_OOM) and not resident.workload.is_outside
            if not is_lack or micro is None:  # a command has no micro-batch
                if lacked is None or isinstance(error, WorkloadError):  # the latter is a mistake at any size
                    raise
                raise lacked from None
            session.recover(error)
            tried["micro_batch_size"], lacked = micro, error
    trains = (  # of a command no optimiser is known
        resident.workload.is_outside
        or "learning_rate" not in state.asked
        or any(max(pair) > STILL for pair in own_loop.rates_of(state))
    )
    parameters = [] if state.model is None else list(state.model.parameters())
    found = Description(
        outcome=Outcome.OK,
        parameters=parameters_of(parameters),
        device=device_facts(session.setting.device),
        objectives=dict(resident.workload.objectives),
        train_samples=state.pass_samples,
        baselines={name: dict(values) for name, values in resident.workload.plain_rules.items()},
        workload_sha256=source_hash(resident.workload),
        data_sha256=fingerprint.of_data([state.dataset]),
        asked=tuple(sorted(state.asked)),
        reseeds=state.active["seed"] != DRY_SEED,
        averages=state.averages,
        silent_passes=0 if state.last_report else state.epoch,
        program=tuple(getattr(resident.workload.train, "typed", ())),
        seen={name: state.active[name] for name in ("batch_size", "micro_batch_size")},
        untrained={} if trains or not all(map(math.isfinite, reported.values())) else reported,
    )
    if found.untrained:
        resident.first_report = FirstReport(tried, found.untrained, time.perf_counter() - began)
    del state, parameters
    garbage.collect()
    resident.kept_bytes = session.memory.held_bytes()
    resident.rates = {}  # of no trial, whose learning_rate is never so small
    return found


def require_own_report(session: Session, resident: OwnResident, trained: TrialState) -> None:
    """Raises NotIndependent if a training that learns nothing reports more, now that another has trained, than before.

    So it does if the best report of all trainings is kept. It is tried once in a process, unless that takes long.
    """
    first, resident.first_report = resident.first_report, None
    if first is None or first.seconds > max(AGAIN_S, AGAIN_FRAC * trained.train_s):
        return

    def report(name: str) -> float:
        return _tried(session, resident, first.knobs)[1].get(name, first.values[name])

    for name in resident.workload.objectives:
        before, after = first.values[name], trained.values[name]
        if after is None or after == before or not _is_learned(again := report(name), before, after):
            continue
        with _FilesRead() as files:  # once more, since an evaluation may draw numbers
            again = report(name)
        if _is_learned(again, before, after):
            raise NotIndependent(
                f"a training that learned nothing reports {name} {again:.3g}, and {before:.3g} before another had "
                f"trained: train(run) keeps what it reports {files.latest or 'in the module, or on the disk'}; report "
                "each training's own"
            )


def _is_learned(value: float, before: float, after: float) -> bool:
    return abs(value - before) >= abs(value - after)


class _FilesRead:
    """Names the last file that was opened for reading inside the block and was written by this process's trainings."""

    def __init__(self) -> None:
        self.latest, self._is_on = "", True

    def __enter__(self) -> _FilesRead:
        sys.addaudithook(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _heard(self, event: str, found: tuple[object, ...]) -> None:
        if not self._is_on or event != "open" or not isinstance(found[0], str) or str(found[1] or "r")[0] not in "r":
            return
        with contextlib.suppress(OSError):
            if Path(found[0]).stat().st_mtime > LOADED_AT:
                self.latest = f"in {found[0]}"


def parameters_of(parameters: Sequence[nn.Parameter]) -> dict[str, int]:
    """Returns how many numbers a model has in `total`, and how many are `trainable`; nothing of a model not known."""
    if not parameters:
        return {}
    return {
        "total": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _tried(
    session: Session, resident: OwnResident, knobs: Mapping[str, Scalar]
) -> tuple[OwnState, Mapping[str, float]]:
    """Returns the state of a training that went a few steps, and its report; nothing where that is not in time.

    Nor where it reports what is not finite, as a metric of an untrained model may be, or its loss overflows in half
    precision: a trial tells. Raises what their function raises.
    """
    plan = dataclasses.replace(DRY_PLAN, cap_bytes=session.setting.cap_bytes)
    state = own_loop.prepare(resident, session.config(knobs, DRY_SEED), plan)
    until, reported, moving = math.inf, dict[str, float](), cast(Moving | None, None)

    def heard(event: Event) -> bool:
        nonlocal until, reported, moving
        if event == READY:
            until = time.monotonic() + DRY_S
            has_data = "num_workers" in state.asked and not state.workload.is_outside
            moving = Moving(state.dataset, state.collate) if has_data else None
        if isinstance(event, Evaluation):
            reported = reported or {name: event.values[name] for name in state.workload.objectives}
        return time.monotonic() > until or bool(reported and state.steps > 1)  # at a second step more is seen

    try:
        with own_checks.Calls(own_checks.require_gradients, state), torch.compiler.set_stance("force_eager"):
            own_loop.train(state, heard)
    except Diverged as diverged:
        if not state.steps or (LOSS in str(diverged) and state.config.knobs.amp_dtype == "fp32"):
            raise
    if moving is not None:
        share = state.samples / plan.samples
        resident.moves = moving.matters(state.samples, state.pass_samples, share)
    return state, reported
