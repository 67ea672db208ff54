"""The common interface of both loops: the contract's (`loop`) and a custom loop (`own_loop`).

state = prepare(resident, config, plan)
train(state, hear)                   # hear(Window | Evaluation); state.samples, .peak_allocated_bytes, .active, ...
"""

from __future__ import annotations

from trainables import loop, own_loop
from trainables.host_memory import MOST_FAULTS_PER_S, keep_freed, page_faults
from trainables.own_count import OwnResident, OwnState
from trainables.plan import Plan
from trainables.reports import Event, Hear, unheard
from trainables.resident import Resident
from trainables.state import State
from trainables.stopwatch import Window
from trainables.workload import Config, OwnLoop, Workload

AnyResident = Resident | OwnResident
AnyState = State | OwnState


def resident_of(workload: Workload | OwnLoop) -> AnyResident:
    """Returns the resident, which keeps the workload loaded between the trainings of a process."""
    return OwnResident(workload) if isinstance(workload, OwnLoop) else Resident(workload)


def prepare(resident: AnyResident, config: Config, plan: Plan) -> AnyState:
    """Returns a training that has not begun."""
    if isinstance(resident, OwnResident):
        return own_loop.prepare(resident, config, plan)
    return loop.prepare(resident, config, plan)


def train(state: AnyState, hear: Hear = unheard) -> None:
    """Trains until the horizon is reached; reports READY, each Window that closes, and each Evaluation that was due.

    `hear` ends it by returning True; what it raises is raised once the training is left.
    """
    heard = _on_host(hear) if state.device.type == "cpu" else hear
    if isinstance(state, OwnState):
        own_loop.train(state, heard)
    else:
        loop.train(state, heard)


def _on_host(hear: Hear) -> Hear:
    """Returns what passes events on; keeps freed memory once a window has many page faults, as its steps take memory
    anew.
    """
    before, is_first = page_faults(), True  # the first window is ignored: its step takes memory in any case

    def heard(event: Event) -> bool | None:
        nonlocal before, is_first
        if isinstance(event, Window):
            if not is_first and page_faults() - before > MOST_FAULTS_PER_S * event.wall_s:
                keep_freed()
            is_first = False
        is_over = hear(event)
        before = page_faults()
        return is_over

    return heard
