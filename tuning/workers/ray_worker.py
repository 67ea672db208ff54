"""What runs inside Ray's processes: the Trainable that runs search trials."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray import tune

from trainables.knobs import Scalar
from tuning.workers.lending import Borrowed, BorrowedTrial, Door, LostError
from tuning.workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from tuning.workers.session import Session, Trial

REPORT = "report"

_WARM: dict[str, Session | Borrowed] = {}
"""The session of this process, by setting: a Tune actor is reset for every trial, its process keeps what it loaded."""


def session(setting: WorkerConfig, knobs: Mapping[str, Scalar], door: Door | None) -> Session | Borrowed:
    """Returns this process's session for the setting; the first call borrows what is lent, or loads its own."""
    key = repr(setting)
    if key not in _WARM:
        _WARM.clear()
        borrowed = door.borrow() if door is not None else None
        _WARM[key] = _loaded(setting, knobs) if borrowed is None else borrowed
    return _WARM[key]


def _loaded(setting: WorkerConfig, knobs: Mapping[str, Scalar]) -> Session:
    from tuning.workers.session import Session  # brings torch, for which the study that defines this class has no use

    own = Session(setting)
    own.warm(knobs)
    return own


@contextmanager
def _bound_to_it() -> Iterator[None]:
    """Ends this process where the one that trains for it is lost: Tune then does what it does for any lost process."""
    try:
        yield
    except LostError:
        os._exit(1)


class Retired(RuntimeError):
    """This process runs no further trial, for the reason given; the one it was asked to run goes to a new process."""


class TrialRunner(tune.Trainable):
    """One search trial at a time; every `step` goes to the next rung. An actor lives through all trials of its slot.

    The config holds `trial`, `knobs`, `seed`, the `plan` with the cap of its share, `threads`, `shrink` ("", "loader",
    "all": what it may change to begin again), `beat_s`, after which a step pauses, what the study fixed, `setting`, and
    `door`, behind which a warm process is to be had, or None.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Keeps what the first trial is; loading is left to its first step, where a failure is a result."""
        self._trial: Trial | BorrowedTrial | None = None
        self._asked = config
        self._retire = ""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ends what is left of the last trial and keeps the next; raises Retired where this process should not."""
        self._end()
        if self._retire:
            raise Retired(self._retire)
        self._asked = new_config
        return True

    def step(self) -> dict[str, Any]:
        """Returns the result at the next rung, or a paused one. Tune sees `done` and `samples`, never an exception.

        An OOM is an outcome. The rest travels in a list of one: Tune flattens dictionaries, and mixes keys with ours.
        """
        config = self._asked
        if self._trial is None:
            try:
                self._trial = self._begun()
            except LostError:  # nothing has begun: this process loads for itself, and no attempt is used up
                _WARM.clear()
                self._trial = self._begun()
        with _bound_to_it():
            found = self._trial.advance(config["beat_s"])
        self._retire = str(found.get("retire") or "")
        if found["done"]:
            self._trial = None
        return {"done": found["done"], "samples": found["samples"], REPORT: [found]}

    def _begun(self) -> Trial | BorrowedTrial:
        config = self._asked
        own = session(config["setting"], config["knobs"], config["door"])
        own.use_threads(config["threads"])
        return own.trial(config["knobs"], config["plan"], config["seed"], shrink=config["shrink"])

    def cleanup(self) -> None:
        """Lets go of the trial when Tune ends the actor."""
        self._end()

    def _end(self) -> None:
        if self._trial is not None:  # it was stopped between two rungs
            with _bound_to_it():
                self._retire = str(self._trial.end()["retire"])
            self._trial = None
