"""A custom loop, `def train(run)` in a file, as a training that yields the same events as the contract's loop.

    state = prepare(resident, config, plan)      # the user's function runs until it asks for its first batch
    for event in train(state):                   # Window | Evaluation, as `loop.train`
        ...

The user's function runs in its own thread. Only one of the two threads runs at a time: each event hands control to the
driver of the training, which hands it back to continue. Closing the generator raises `Ended` out of the call of `run`
in which the function waits, so that its `finally` and `with` blocks are left in order.
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
import random
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainables import garbage, precision
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs, Scalar
from trainables.live_bytes import LiveBytes
from trainables.openmp import release_threads
from trainables.own_checks import FirstWeights
from trainables.own_count import READY, Ended, Event, OwnState
from trainables.own_run import Run
from trainables.plan import Plan, evenly
from trainables.state import counted
from trainables.stopwatch import Window
from trainables.workload import Config, OwnLoop, WorkloadError, table_of
from trainables.workload_files import load_own_loop

LEAVING_S = 60.0
"""The most that the user's `finally` blocks may take once a run is over."""


class OwnResident:
    """An imported file with a custom loop; only its module stays loaded between trainings."""

    def __init__(self, workload: OwnLoop) -> None:
        self.workload = workload
        self.meter = LiveBytes()
        self.first_weights = FirstWeights()
        self.dtype = torch.get_default_dtype()
        """The default dtype after the import of the file: what a training sets is not left to the next."""
        self.kept_bytes: int | None = None
        """Bytes that the module itself holds on the device: those left after its first training."""
        self.asked: set[str] = set()
        """The knobs that the function has read in any training so far."""
        self.pass_samples, self.drops_last, self.own_size = 0, False, 0
        """The data of the last training, as in `OwnState`."""
        self.rates: dict[tuple[Any, ...], float] | None = {}
        """For each batch size and rates of the optimisers: learning_rate of a complete training. None once equal rates
        came with two values of learning_rate; this is remarked once."""

    def held_bytes(self) -> int:
        """Returns the bytes that belong to the process and not to a training."""
        return self.kept_bytes or 0


class _Baton:
    """Passes control between the driver's thread and the user's. Invariant: only one of them runs at a time."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._go = threading.Semaphore(0)
        self._is_over = False

    def give(self, event: Event) -> None:
        """Hands an event to the driver and waits until it continues; raises Ended if the run is over."""
        if not self._is_over:
            self._events.put(event)
            self._go.acquire()
        if self._is_over:
            raise Ended

    def leave(self, failure: BaseException | None) -> None:
        """Hands control to the driver for good."""
        self._events.put(failure)

    def take(self) -> Event | BaseException | None:
        """Waits for the user's thread; returns an event, the exception of its function, or None if that returned."""
        return self._events.get()

    def go_on(self, *, is_over: bool = False) -> None:
        """Hands control to the user's thread, without OpenMP's threads of the driver, which would slow it."""
        release_threads()
        self._is_over = self._is_over or is_over
        self._go.release()


@dataclass(kw_only=True)
class ThreadedState(OwnState):
    """A training by a custom loop, and its thread."""

    resident: OwnResident = field(repr=False)
    baton: _Baton = field(default_factory=_Baton, repr=False)
    thread: threading.Thread | None = field(default=None, repr=False)
    within: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False)
    makes_on: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False)
    """The default device for new tensors: torch.set_default_device in the user's file is valid for one thread only."""


def prepare(
    resident: OwnResident, config: Config, plan: Plan, within: AbstractContextManager[object] | None = None
) -> ThreadedState:
    """Returns a training whose function waits for its first batch; raises what the function raises before that.

    `within` is a context for the function's thread: modes of torch hold for one thread. The function is started a
    second time if it trains to the end of its plan and read a wrong `run.steps` before its data were known.
    """
    state = _begin(resident, config, plan, within)
    if state.is_misled and plan.samples in plan.milestones:
        end(state)
        del state
        garbage.collect()
        state = _begin(resident, config, plan, within)
    return state


def _begin(
    resident: OwnResident, config: Config, plan: Plan, within: AbstractContextManager[object] | None
) -> ThreadedState:
    state = ThreadedState(config=config, plan=plan, workload=resident.workload, asked=resident.asked, resident=resident)
    state.pass_samples, state.drops_last, state.own_size = resident.pass_samples, resident.drops_last, resident.own_size
    state.within, state.first_weights = within or state.within, resident.first_weights
    torch.set_default_dtype(resident.dtype)
    if (usual := torch.get_default_device()).type != "cpu":
        state.makes_on = usual
    if state.device.type == "cuda" and config.knobs.empty_cache:
        torch.cuda.empty_cache()
    precision.forget_graphs()
    counted(state, resident.meter)
    state.thread = threading.Thread(target=_work, args=(state,), name="train(run)", daemon=True)
    release_threads()
    state.thread.start()
    try:
        _raise_failure(state.baton.take())
    except Exception:
        end(state)
        raise
    except BaseException:  # Ctrl-C: the thread may be loading data; it is not waited for, and ends at its next wait
        state.baton.go_on(is_over=True)
        raise
    resident.pass_samples, resident.drops_last, resident.own_size = state.pass_samples, state.drops_last, state.own_size
    return state


def train(state: ThreadedState) -> Generator[Window | Evaluation]:
    """Yields a Window whenever one closes and an Evaluation at each report that was due, until the horizon is reached.

    The first window is the first optimiser step alone. Closing the generator ends the user's function. Raises Diverged,
    what the function raises, and WorkloadError if it ends too soon or never steps.
    """
    rates: tuple[tuple[float, float], ...] = ()
    try:
        with state.ranks.training(state):
            try:
                while True:
                    state.baton.go_on()
                    event = state.baton.take()
                    _raise_failure(event)
                    if not isinstance(event, Window | Evaluation):
                        return
                    if isinstance(event, Window):
                        rates = rates or rates_of(state)
                        _correct_batch_size(state, event)
                    elif state.has_ended or state.samples >= state.plan.samples:
                        state.remark = _remark_equal_rates(state, rates) or state.remark
                    yield event
            finally:
                event = None
                end(state)
    finally:
        end(state)  # if the other processes never came


def _correct_batch_size(state: ThreadedState, window: Window) -> None:
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


def _remark_equal_rates(state: ThreadedState, first: tuple[tuple[float, float], ...]) -> str:
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


def _raise_failure(event: Event | BaseException | None) -> None:
    if isinstance(event, BaseException):
        try:
            raise event
        finally:
            del event  # otherwise the frame and its exception would keep each other alive


def end(state: ThreadedState) -> None:
    """Ends the user's function where it waits; raises RuntimeError if its thread does not end in `LEAVING_S`."""
    thread, state.thread = state.thread, None
    if thread is None:
        return
    state.baton.go_on(is_over=True)
    thread.join(LEAVING_S)
    if thread.is_alive():
        why = "does it catch BaseException, or wait in finally?"
        raise RuntimeError(f"train(run) did not end in {LEAVING_S:g} s: {why}")


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch; loaders and their workers draw their seeds from these."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _work(state: ThreadedState) -> None:
    """Runs the user's function; the target of its thread."""
    run, failure = Run(state, state.baton.give), None
    try:
        seed_everything(state.config.seed)
        with run.kernels(), state.makes_on, state.within:
            state.workload.train(run)
        run.finished()
    except Ended as ended:
        state.remark = str(ended) or state.remark
    except Exception as error:
        failure = error
    except BaseException as error:  # sys.exit
        failure = WorkloadError(f"train(run) raised {type(error).__name__}: {error}")
        failure.__cause__ = error
    try:
        run.let_go()
    except Exception as error:
        failure = failure or error
    del run
    state.baton.leave(failure)


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
    state = OwnState(config=config, plan=Plan(samples, tenths), workload=workload, pass_samples=pass_samples)
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
