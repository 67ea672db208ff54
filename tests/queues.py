"""Desks with a list of trials of the greedy workload, for whoever runs trials; they decide nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.data.greedy import WHERE
from tuning.search.protocols import TrialRequest, TrialState

GREEDY = Path(__file__).parent / "data" / "greedy.py"
KNOBS = {"learning_rate": 0.01, "batch_size": 16, "micro_batch_size": 8}
NOWHERE = {**KNOBS, "augmentation": WHERE["nowhere"]}


class Queue:
    """A scheduler with a list of trials, given as where they fail and what they are predicted to need."""

    def __init__(self, trials: list[tuple[str, int | None]]) -> None:
        self._left = list(enumerate(trials))
        self.found: dict[str, TrialState] = {}
        self.decisions: list[tuple[str, str, str]] = []

    def next_trial(self) -> TrialRequest | None:
        """Returns the next one."""
        if not self._left:
            return None
        number, (where, need) = self._left.pop(0)
        knobs = {**KNOBS, "augmentation": WHERE[where], "num_workers": int(where.startswith("loader"))}
        return TrialRequest(f"t{number}", knobs, 0, need)

    def at_rung(self, trial: str, state: TrialState) -> bool:
        """Lets everyone go on."""
        return True

    def goes_on(self, trial: str, state: TrialState | None = None) -> bool:
        """Lets everyone go on."""
        return True

    def widened(self, trial: str, state: TrialState) -> None:
        """Keeps that it was."""
        self.decisions.append(("widened", trial, state.outcome))

    def ended(self, trial: str, state: TrialState) -> None:
        """Keeps what came."""
        self.found[trial] = state

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Keeps what the executor did."""
        self.decisions.append((event, trial, reason))


class Killing(Queue):
    """A scheduler that kills the process of its second trial, once."""

    def ended(self, trial: str, state: TrialState) -> None:
        """Kills the process that has just brought a result, which waits for the next trial."""
        super().ended(trial, state)
        if trial == "t0":
            os.kill(state.pid, signal.SIGKILL)


class Choosy(Queue):
    """A scheduler that wants no t1, which has not begun, and no t2 once it runs."""

    def goes_on(self, trial: str, state: TrialState | None = None) -> bool:
        """Says so."""
        return not (trial == "t1" or (trial == "t2" and state is not None))
