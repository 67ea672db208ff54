"""A task: a folder with a plain `script.py`, and with a `loop.py`, the same training as cardtune drives it.

    python -m benchmarks.unseen.task benchmarks/unseen/text '{"batch_size": 64, "seed": 1}'

trains the plain script once and prints samples/s and accuracy. Settings not given are the person's first guess. Names
that the script does not know are left out, and so is the rest of `SPACE` of its loop from what the peers search. A
script whose `train` names its arguments may have its own words for some settings (`ALSO`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tuning.config.space import Choice, Parameter, Range

ALSO = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "num_workers": "workers",
    "amp_dtype": "amp",
    "fused_optimizer": "fused",
}
KNOBS_OF_A_COMMAND = ("learning_rate", "batch_size", "width")
"""What is searched where a script is run as a command: by cardtune (`contest.command`) and by `loop_peer`."""
TOLERANCE = 0.01
"""How far below the best accuracy a peer's pick may be; `pick.tolerance` of a study has the same default."""
Report = Callable[..., object]


class Task:
    """A folder's script and space; its modules are imported by their bare names, so a process has one task."""

    def __init__(self, folder: str) -> None:
        sys.path.insert(0, str(Path(folder).resolve()))
        self._script, loop = importlib.import_module("script"), importlib.import_module("loop")
        self._takes = getattr(self._script, "GUESS", None) or inspect.signature(self._script.train).parameters
        self.space = {name: parameter(given) for name, given in loop.SPACE.items() if self._word(name)}

    def _word(self, name: str) -> str:
        """Returns what the script calls a setting, "" where it has none such."""
        return next((word for word in (name, ALSO.get(name, "")) if word in self._takes), "")

    def train(self, settings: Mapping[str, Any], seed: int, report: Report | None = None) -> tuple[float, float]:
        """Returns samples/s and accuracy of the plain script; it calls `report` a few times on its way."""
        given = {}
        for name, value in settings.items():
            word = self._word(name)
            if word and word != name and isinstance(value, bool | str):
                value = int(value not in (False, "fp32"))  # a script with words of its own has its types as numbers
            if word:
                given[word] = value
        speed, accuracy = self._script.train(**given, seed=seed, report=report)
        return float(speed), float(accuracy)


@functools.cache
def task(folder: str) -> Task:
    """Returns the task of a folder, whose data stay loaded."""
    return Task(folder)


def parameter(given: Any) -> Parameter:
    """Returns what a `SPACE` says of a setting: a range where it has ends, else a choice."""
    if isinstance(given, Mapping) and "low" in given:
        whole = isinstance(given["low"], int) and isinstance(given["high"], int)
        return Range(given["low"], given["high"], given.get("log", False), given.get("integer", whole))
    return Choice(tuple(given["values"] if isinstance(given, Mapping) else given))


def left_s(seconds: float) -> float:
    """Returns what is left of so many seconds since this process was started."""
    return seconds - (time.time() - psutil.Process().create_time())


def fastest(ended: Iterable[tuple[float, float, Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Returns the settings of the fastest of (samples/s, accuracy, settings) within TOLERANCE of the best accuracy."""
    found = list(ended)
    best = max((accuracy for _, accuracy, _ in found), default=0.0)
    return next((dict(s) for _, a, s in sorted(found, key=lambda row: -row[0]) if a >= best - TOLERANCE), None)


if __name__ == "__main__":
    asked = json.loads(sys.argv[2] if sys.argv[2:] else "{}")
    seed = asked.pop("seed", 0)
    print(*Task(sys.argv[1]).train(asked, seed))
