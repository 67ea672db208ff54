"""A custom loop, `def train(run)` in a file, as a training that reports the same events as the contract's loop.

The user's function runs in the thread that calls `train`, and its calls of `run` report. Once the training is over,
they raise `Ended`, so that the function's `finally` and `with` blocks are left in order.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from trainables import garbage, own_checks, precision
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs, Scalar
from trainables.live_bytes import LiveBytes
from trainables.own_count import OwnResident, OwnState, seed_everything
from trainables.own_run import Run
from trainables.plan import Plan, evenly
from trainables.reports import READY, Ended, Event, Hear, Report, reporting, unheard
from trainables.state import counted
from trainables.stopwatch import Window
from trainables.workload import Config, LoopError, WorkloadError, table_of
from trainables.workload_files import load_own_loop

LEAVING_S = 60.0
"""The most that the user's `finally` blocks may take once a run is over."""

_SEEN_OF_DATA = ("pass_samples", "drops_last", "own_size", "pass_batches", "ends_passes")
"""What a training learns of the data, and the next one begins with."""
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
)
"""Settings of torch that a training is not to leave to the next: how each is read, and set."""


def prepare(resident: OwnResident, config: Config, plan: Plan) -> OwnState:
    """Returns a training that has not begun: the user's function runs in `train`."""
    state = OwnState(config=config, plan=plan, resident=resident)
    for name in _SEEN_OF_DATA:
        setattr(state, name, getattr(resident, name))
    return state


def train(state: OwnState, hear: Hear = unheard) -> None:
    """Runs the user's function until the horizon is reached; reports a Window whenever one closes and an Evaluation at
    each report that was due.

    The first window is the first optimiser step alone. The function is started a second time if it trains to the end of
    its plan and read a wrong `run.steps` before its data were known. Raises Diverged, what the function raises, and
    WorkloadError if it ends too soon or never steps.
    """
    is_whole = state.plan.samples in state.plan.milestones
    if _is_misled(state, hear, may_be=is_whole):
        state.forget()
        garbage.collect()
        _is_misled(state, hear, may_be=False)


def _is_misled(state: OwnState, hear: Hear, *, may_be: bool) -> bool:
    """Trains; returns whether the function was ended before its first batch since it had read a wrong `run.steps`."""
    resident, rates, is_misled = state.resident, tuple[tuple[float, float], ...](), False
    if state.device.type == "cuda" and state.config.knobs.empty_cache:
        torch.cuda.empty_cache()
    precision.forget_graphs()
    counted(state, resident.meter)

    def heard(event: Event) -> bool | None:
        nonlocal rates, is_misled
        if event == READY:
            for name in _SEEN_OF_DATA:
                setattr(resident, name, getattr(state, name))
            is_misled = may_be and state.is_misled
            is_over = is_misled or hear(event)
            if not is_over:
                stack.enter_context(state.ranks.training(state))
            return is_over
        if isinstance(event, Window):
            rates = rates or rates_of(state)
            _correct_batch_size(state, event)
        elif state.has_ended or state.samples >= state.plan.samples:
            state.remark = _remark_equal_rates(state, rates) or state.remark or own_checks.growth(state.levels)
        return hear(event)

    with reporting(heard) as report, ExitStack() as stack:
        _call(state, report)
    return is_misled


def _call(state: OwnState, report: Report) -> None:
    """Calls the user's function; raises Ended if the training was ended from outside, whatever the function made of it.

    A function that does not end `LEAVING_S` later ends the process.
    """
    run, limit = Run(state, report), threading.Timer(LEAVING_S, _give_up)
    before = [read() for read, _ in _SETTINGS]
    limit.daemon, report.at_end = True, limit.start
    try:
        try:
            seed_everything(state.config.seed)
            state.resident.first_values.restore()
            with run.kernels(), torch.enable_grad():  # an end may come where their code has turned gradients off
                state.workload.train(run)
            run.finished()
        finally:
            limit.cancel()
            run.let_go()
            for (read, write), value in zip(_SETTINGS, before, strict=True):
                if read() != value:
                    write(value)
            state.resident.earlier_models.add(state.prepared)
    except Ended as ended:
        state.remark = str(ended) or state.remark
    except torch.OutOfMemoryError as error:
        if not report.is_over:
            why = state.resident.earlier_models.held(state.prepared) or (own_checks.EVALUATES if run.evaluates else "")
            if why:
                raise LoopError(f"{why} ({error})").with_traceback(error.__traceback__) from None
            raise
    except Exception:
        if not report.is_over:
            raise
    except SystemExit as error:
        if not report.is_over:
            raise WorkloadError(f"train(run) raised SystemExit: {error}") from error
    if report.is_over:
        raise Ended


def _give_up() -> None:
    """Ends the process: nothing else ends a function that goes on."""
    why = "does it catch BaseException, or wait in finally?"
    print(f"train(run) did not end in {LEAVING_S:g} s: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _correct_batch_size(state: OwnState, window: Window) -> None:
    """Replaces the observed batch size by the largest of the window, if the first step's was smaller than requested.

    A batch sampler may begin with a smaller batch of leftovers.
    """
    requested = state.config.knobs.batch_size
    if "batch_size" not in state.asked or not 0 < state.active.get("batch_size", 0) < requested:
        return
    counts = list(itertools.islice(reversed(state.micro_steps), window.micro_steps))
    size = largest = 0
    for count, has_stepped in counts:
        size = count if has_stepped else size + count
        largest = max(largest, size)
    if largest > state.active["batch_size"]:
        state.active |= {"batch_size": largest, "micro_batch_size": max(count for count, _ in counts)}


def rates_of(state: OwnState) -> tuple[tuple[float, float], ...]:
    """Returns, for each parameter group, its initial learning rate before any schedule, and its current one."""
    groups = [g for optimizer in state.optimizers for g in getattr(optimizer, "param_groups", ())]
    return tuple((float(g.get("initial_lr", g["lr"])), float(g["lr"])) for g in groups if g.get("lr") is not None)


def _remark_equal_rates(state: OwnState, first: tuple[tuple[float, float], ...]) -> str:
    """Returns a remark if a training with another learning_rate had the same rates in its first and last step.

    Only trainings with the same batch size are compared, since it may scale the rate. Rates of 0 tell nothing: a
    schedule may set the rate by itself.
    """
    seen, last, knobs = state.resident.rates, rates_of(state), state.config.knobs
    if seen is None or not any(now for _, now in (*first, *last)):
        return ""
    rate = knobs.learning_rate
    if (other := seen.setdefault((knobs.batch_size, first, last), rate)) == rate:
        return ""
    state.resident.rates = None
    made = ", ".join(f"{made:g}" for made in dict.fromkeys(made for made, _ in last))
    return (
        f"learning_rate was {other:g} and {rate:g} in two trainings, and the rate of the "
        f"{type(state.optimizers[0]).__name__} was {made} in both: unless that is meant, hand it "
        'run["learning_rate"] (for Trainer: leave `optimizers=` out, or use run["learning_rate"] in it)'
    )


_ALONE: list[Run] = []
"""The latest run made by `alone`; its kernels stay set until the next."""


def alone(samples: int, *, pass_samples: int = 0, seed: int = 0, device: str = "", **knobs: Scalar) -> Run:
    """Returns a `run` for a script without a study (python script.py), which trains on `samples` samples.

    Knobs that are not given have the value of BEFORE, or their default. Reports are printed; ten are due.
    `pass_samples` is the size of an epoch; `run.steps` depends on it if an epoch ends in a smaller batch. If the loader
    has a fixed batch size, give it as `batch_size`, for the same reason.
    """
    module = sys.modules["__main__"]
    if not hasattr(module, "SPACE"):
        where = getattr(module, "__file__", "the session")
        raise WorkloadError(f"alone(...) is for the file of train(run), run as a script: {where} has no SPACE")
    workload = load_own_loop(str(getattr(module, "__file__", "this script")), module)
    given = {name: _only(value) for name, value in workload.default_space.items()}
    fixed = {name: value for name, value in given.items() if not isinstance(value, Mapping | list | tuple)}
    typed = {**getattr(module, "BEFORE", {}), **knobs}
    given, micro = {**fixed, **typed}, "micro_batch_size"
    if micro not in typed and (micro not in fixed or micro not in module.SPACE):
        given[micro] = given.get("batch_size", Knobs().batch_size)  # a batch in one piece, as `before` in a study
    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(Knobs.of(given, table_of(workload)), dict(workload.options), seed, on)
    tenths = tuple(math.ceil(samples * tenth / 10) for tenth in range(1, 11))
    state = OwnState(config=config, plan=Plan(samples, tenths), resident=OwnResident(workload))
    state.pass_samples = pass_samples
    counted(state, LiveBytes())
    seed_everything(seed)
    while _ALONE:  # the earlier run had other knobs
        _ALONE.pop().let_go()
    run = Run(state, functools.partial(_print_event, state))
    run.keep(run.kernels())
    _ALONE.append(run)
    return run


def _only(value: Any) -> Any:
    """Returns the value of a list with one value, which fixes a knob in a space; any other value unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _print_event(state: OwnState, event: Event) -> None:
    if event == READY and state.is_misled:
        what = f"run.steps said {state.steps_told} before the data were known, and there are others"
        knobs, size = state.config.knobs, state.own_size
        micro = size or evenly(knobs.batch_size, knobs.micro_batch_size)[1]
        seen = state.pass_samples // micro * micro if state.drops_last else state.pass_samples
        given = f"alone(..., pass_samples={seen}{f', batch_size={size}' if size else ''})"
        print(f"{what}: read it after run.loader(), and give {given}")
    if isinstance(event, Evaluation):
        values = ", ".join(f"{name} {value:.5g}" for name, value in event.values.items())
        print(f"{event.samples} samples: {values}")
