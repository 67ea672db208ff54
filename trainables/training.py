"""The common interface of both loops: the contract's (`loop`) and a custom loop (`own_loop`).

state = prepare(resident, config, plan)
for event in train(state):           # Window | Evaluation
    ...                              # state.samples, .peak_allocated_bytes, .active, ...
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from trainables import loop, own_loop
from trainables.evaluation import Evaluation
from trainables.host_memory import MOST_FAULTS_PER_S, keep_freed, page_faults
from trainables.own_loop import OwnResident, ThreadedState
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.state import State
from trainables.stopwatch import Window
from trainables.workload import Config, OwnLoop, Workload

AnyResident = Resident | OwnResident
AnyState = State | ThreadedState


def resident_of(workload: Workload | OwnLoop) -> AnyResident:
    """Returns the resident, which keeps the workload loaded between the trainings of a process."""
    return OwnResident(workload) if isinstance(workload, OwnLoop) else Resident(workload)


def prepare(resident: AnyResident, config: Config, plan: Plan) -> AnyState:
    """Returns a training that has not begun."""
    if isinstance(resident, OwnResident):
        return own_loop.prepare(resident, config, plan)
    return loop.prepare(resident, config, plan)


def train(state: AnyState) -> Generator[Window | Evaluation]:
    """Yields a Window whenever one closes and an Evaluation at each milestone, until the horizon is reached."""
    events = own_loop.train(state) if isinstance(state, ThreadedState) else loop.train(state)
    return _on_host(events) if state.device.type == "cpu" else events


def _on_host(events: Generator[Window | Evaluation]) -> Generator[Window | Evaluation]:
    """Yields the events; keeps freed memory once a window has many page faults, as its steps take memory anew."""
    with closing(events):
        before, is_first = page_faults(), True  # the first window is ignored: its step takes memory in any case
        for event in events:
            if isinstance(event, Window):
                if not is_first and page_faults() - before > MOST_FAULTS_PER_S * event.wall_s:
                    keep_freed()
                is_first = False
            yield event
            before = page_faults()


def let_go(state: AnyState) -> None:
    """Ends a training that was never begun."""
    if isinstance(state, ThreadedState):
        own_loop.end(state)
