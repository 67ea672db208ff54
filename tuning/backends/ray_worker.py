"""What runs inside Ray's processes: the Trainable that runs search trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import tune

from trainables.knobs import Scalar
from tuning.backends.session import Session, Setting, Trial

REPORT = "report"

_WARM: dict[str, Session] = {}
"""The session of this process, by setting: a Tune actor is reset for every trial, its process keeps what it loaded."""


def session(setting: Setting, knobs: Mapping[str, Scalar]) -> Session:
    """Returns this process's session for the setting, loading it at the first call."""
    key = repr(setting)
    if key not in _WARM:
        _WARM.clear()
        _WARM[key] = Session(setting)
        _WARM[key].warm(knobs)
    return _WARM[key]


class TrialRunner(tune.Trainable):
    """One search trial at a time; every `step` goes to the next rung. An actor lives through all trials of its slot.

    The config holds `trial`, `knobs`, `seed`, and what the study fixed: `setting`, `plan`, `shrink`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Keeps what the first trial is; loading is left to its first step, where a failure is a result."""
        self._trial: Trial | None = None
        self._asked = config
        self._poisoned = False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ends what is left of the last trial and keeps the next."""
        self._end()
        if self._poisoned:
            raise RuntimeError("the device context of this process is lost")  # Tune starts the trial in a new one
        self._asked = new_config
        return True

    def step(self) -> dict[str, Any]:
        """Returns the result at the next rung. Tune sees `done` and `samples`, never an OOM as an exception.

        The rest travels in a list of one: Tune flattens dictionaries, and mixes its own keys with ours.
        """
        config = self._asked
        if self._trial is None:
            own = session(config["setting"], config["knobs"])
            self._trial = own.trial(config["knobs"], config["plan"], config["seed"], shrink=config["shrink"])
        found = self._trial.advance()
        self._poisoned = bool(found.get("poisoned"))
        return {"done": found["done"], "samples": found["samples"], REPORT: [found]}

    def cleanup(self) -> None:
        """Lets go of the trial when Tune ends the actor."""
        self._end()

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None
