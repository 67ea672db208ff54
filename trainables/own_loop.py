"""A loop of one's own, `def train(run)` in a file, as a training that yields the same events as the contract's loop.

    state = prepare(resident, config, plan)      # their function runs until it asks for its first batch
    for event in train(state):                   # Window | Evaluation, as `loop.train`
        ...

Their function runs in a thread of its own, and of the two threads one runs at a time: each event hands over to whoever
drives the training, who hands back to go on. Closing the generator raises `Ended` out of the call of `run` in which
their function waits, so that its `finally` and `with` blocks are left in order.
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
from trainables.own_count import READY, Ended, Event, OwnState
from trainables.own_run import Run
from trainables.plan import Plan, evenly
from trainables.state import counted
from trainables.stopwatch import Window
from trainables.workload import Config, OwnLoop, WorkloadError, table_of
from trainables.workload_files import load_own_loop

LEAVING_S = 60.0
"""What their `finally` blocks may take once a run is over."""


class OwnResident:
    """A file with a loop of its own, imported; its module is all that stays loaded between trainings."""

    def __init__(self, workload: OwnLoop) -> None:
        self.workload = workload
        self.meter = LiveBytes()
        self.kept_bytes: int | None = None
        """What their module holds on the device for itself: what was left when its first training was over."""
        self.asked: set[str] = set()
        """The knobs that their function has asked for in any training so far."""
        self.pass_samples, self.drops_last, self.own_size = 0, False, 0
        """What the last training's data were, as `OwnState` has it."""
        self.rates: dict[tuple[Any, ...], float] | None = {}
        """By batch size and rates of its optimisers, the learning_rate of a training to the end; None once two of
        equal rates had different ones, which is said once."""

    def held_bytes(self) -> int:
        """Returns the bytes that belong to the process and not to a training."""
        return self.kept_bytes or 0


class _Baton:
    """What two threads pass each other, so that one of them runs at a time."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._go = threading.Semaphore(0)
        self._is_over = False

    def give(self, event: Event) -> None:
        """Hands an event over and waits to go on; raises Ended where there is nothing to go on with."""
        if not self._is_over:
            self._said.put(event)
            self._go.acquire()
        if self._is_over:
            raise Ended

    def leave(self, failure: BaseException | None) -> None:
        """Hands over for good."""
        self._said.put(failure)

    def take(self) -> Event | BaseException | None:
        """Returns what is handed over: an event, what their function raised, or None where it has returned."""
        return self._said.get()

    def go_on(self, *, is_over: bool = False) -> None:
        """Hands back; the threads that OpenMP keeps for the driver would slow theirs."""
        release_threads()
        self._is_over = self._is_over or is_over
        self._go.release()


@dataclass(kw_only=True)
class ThreadedState(OwnState):
    """An own training and the thread that it runs in."""

    resident: OwnResident = field(repr=False)
    baton: _Baton = field(default_factory=_Baton, repr=False)
    thread: threading.Thread | None = field(default=None, repr=False)
    within: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False)
    makes_on: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False)
    """Where tensors are made: what their file has set by torch.set_default_device holds for its own thread alone."""


def prepare(
    resident: OwnResident, config: Config, plan: Plan, within: AbstractContextManager[object] | None = None
) -> ThreadedState:
    """Returns a training whose function waits for its first batch; raises what it raised before.

    `within` is a context that its thread is in, as a mode of torch is its thread's own. A function that is to train to
    the end of its plan, and asked how many steps that is before its data were known, is ended and begun again where
    they are others.
    """
    state = _begun(resident, config, plan, within)
    if state.is_misled and plan.samples in plan.milestones:
        end(state)
        del state
        garbage.collect()
        state = _begun(resident, config, plan, within)
    return state


def _begun(
    resident: OwnResident, config: Config, plan: Plan, within: AbstractContextManager[object] | None
) -> ThreadedState:
    state = ThreadedState(config=config, plan=plan, workload=resident.workload, asked=resident.asked, resident=resident)
    state.pass_samples, state.drops_last, state.own_size = resident.pass_samples, resident.drops_last, resident.own_size
    state.within = within or state.within
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
        _raised(state.baton.take())
    except Exception:
        end(state)
        raise
    except BaseException:  # Ctrl-C: not to be waited for, as it may be loading; it ends where it waits next
        state.baton.go_on(is_over=True)
        raise
    resident.pass_samples, resident.drops_last, resident.own_size = state.pass_samples, state.drops_last, state.own_size
    return state


def train(state: ThreadedState) -> Generator[Window | Evaluation]:
    """Yields a Window whenever one closes and an Evaluation at each report that was due, until the horizon is reached.

    The first window is the first optimiser step alone. Closing the generator ends their function. Raises Diverged, what
    their function raises, and WorkloadError where it ends too soon or never steps.
    """
    rates: tuple[tuple[float, float], ...] = ()
    try:
        with state.ranks.training(state):
            try:
                while True:
                    state.baton.go_on()
                    event = state.baton.take()
                    _raised(event)
                    if not isinstance(event, Window | Evaluation):
                        return
                    if isinstance(event, Window):
                        rates = rates or rates_of(state)
                        _see_whole(state, event)
                    elif state.has_ended or state.samples >= state.plan.samples:
                        state.remark = _same_rates(state, rates) or state.remark
                    yield event
            finally:
                event = None
                end(state)
    finally:
        end(state)  # where the other processes never came


def _see_whole(state: ThreadedState, window: Window) -> None:
    """Takes the largest batch of a window as what was seen, where the first step had a smaller one than was asked for.

    A sampler that makes batches of its own may begin with what was left over.
    """
    asked = state.config.knobs.batch_size
    if "batch_size" not in state.asked or not 0 < state.active.get("batch_size", 0) < asked:
        return
    counts = list(itertools.islice(reversed(state.micro_steps), window.micro_steps))
    size = largest = 0
    for count, steps in counts:
        size = count if steps else size + count
        largest = max(largest, size)
    if largest > state.active["batch_size"]:
        state.active |= {"batch_size": largest, "micro_batch_size": max(count for count, _ in counts)}


def rates_of(state: OwnState) -> tuple[tuple[float, float], ...]:
    """Returns of each group of its optimisers the rate that it was made with, before any schedule, and the one now."""
    groups = [
        group for one in state.optimizers for group in getattr(one, "param_groups", ()) if group.get("lr") is not None
    ]
    return tuple((float(group.get("initial_lr", group["lr"])), float(group["lr"])) for group in groups)


def _same_rates(state: ThreadedState, first: tuple[tuple[float, float], ...]) -> str:
    """Returns a remark where a training with another learning_rate had the same rates, at first and at last.

    A batch size may scale a rate, and a schedule may make it whole (of rates of 0 nothing is known).
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


def _raised(event: Event | BaseException | None) -> None:
    if isinstance(event, BaseException):
        try:
            raise event
        finally:
            del event  # or the frame and its own exception would hold each other


def end(state: ThreadedState) -> None:
    """Ends their function where it waits; raises RuntimeError where it does not let itself be ended."""
    thread, state.thread = state.thread, None
    if thread is None:
        return
    state.baton.go_on(is_over=True)
    thread.join(LEAVING_S)
    if thread.is_alive():
        said = "does it catch BaseException, or wait in finally?"
        raise RuntimeError(f"train(run) did not end in {LEAVING_S:g} s: {said}")


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, from which loaders and their workers draw theirs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _work(state: ThreadedState) -> None:
    """Runs their function; the thread's own."""
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
"""The latest run of a script on its own, whose kernels are set until there is another."""


def alone(samples: int, *, pass_samples: int = 0, seed: int = 0, device: str = "", **knobs: Scalar) -> Run:
    """Returns a `run` for the script at hand on its own: python script.py, without a study, up to so many samples.

    Knobs not given are those of its BEFORE, else at their defaults. What is reported is printed; ten reports are due.
    `pass_samples` are those of one pass over the data: where a pass ends in a smaller batch, `run.steps` depends on it.
    It depends on `batch_size`, too, where the loader has a size of its own.
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
        given[micro] = given.get("batch_size", Knobs().batch_size)  # in one pass, as `before` in a study
    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(Knobs.of(given, table_of(workload)), dict(workload.options), seed, on)
    tenths = tuple(math.ceil(samples * tenth / 10) for tenth in range(1, 11))
    state = OwnState(config=config, plan=Plan(samples, tenths), workload=workload, pass_samples=pass_samples)
    counted(state, LiveBytes())
    seed_everything(seed)
    while _ALONE:  # its knobs are not those of the one before
        _ALONE.pop().let_go()
    run = Run(state, functools.partial(_shown, state))
    run.keep(run.kernels())
    _ALONE.append(run)
    return run


def _only(value: Any) -> Any:
    """Returns the one value of a list of one, as a space takes it; any other as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _shown(state: OwnState, event: Event) -> None:
    if event == READY and state.is_misled:
        said = f"run.steps said {state.steps_told} before the data were known, and there are others"
        knobs, size = state.config.knobs, state.own_size
        micro = size or evenly(knobs.batch_size, knobs.micro_batch_size)[1]
        seen = state.pass_samples // micro * micro if state.drops_last else state.pass_samples
        given = f"alone(..., pass_samples={seen}{f', batch_size={size}' if size else ''})"
        print(f"{said}: read it behind run.loader(), and give {given}")
    if isinstance(event, Evaluation):
        values = ", ".join(f"{name} {value:.5g}" for name, value in event.values.items())
        print(f"{event.samples} samples: {values}")
