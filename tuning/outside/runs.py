"""Runs a command with settings changed from outside, until its training has told how fast it is; then ends it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel

from trainables import hook
from tuning.config.errors import ConfigError
from tuning.workers import leftovers, machine

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher around us, which a script would take for its own; those that begin with SLURM_ likewise."""
LOOK_S = 0.02
LEAST_STEPS = 8
Setting = Mapping[str, int | bool]
"""What is changed: parameters of the training's DataLoader, and the names that `trainables.hook` knows."""


class SeenLoader(BaseModel):
    """A DataLoader that the program made, where, and with which parameters; `asked` are those that it was given."""

    file: str
    line: int
    is_stream: bool
    is_batched: bool
    batch_size: int | None
    num_workers: int
    persistent_workers: bool
    pin_memory: bool
    asked: dict[str, int | bool]


class SeenOptimizer(BaseModel):
    """An optimiser that the program made, and where; `able`: whether it has a fused form."""

    name: str
    file: str
    line: int
    fused: bool | None
    able: bool


class SeenModel(BaseModel):
    """The module that is called first: its class, how many parameters it has, and whether some are of images."""

    name: str = ""
    parameters: int = 0
    has_images: bool = False


class Look(BaseModel):
    """The figures of one run. `counted` steps took `measured_s`, with `samples` of the loaders `training`, if known.

    `parts` are seconds of waiting for data, backward and optimiser within `split_s`; `memory` is (step, bytes held).
    `reread` are files of an earlier run that it opened before its first step.
    """

    loaders: list[SeenLoader] = []
    optimizers: list[SeenOptimizer] = []
    model: SeenModel = SeenModel()
    training: list[int] = []
    steps: int = 0
    counted: int = 0
    samples: int = 0
    measured_s: float = 0.0
    first_step_s: float = 0.0
    parts: dict[str, float] = {}
    split_s: float = 0.0
    step_s: list[float] = []
    memory: list[tuple[int, int]] = []
    reread: list[str] = []
    torch: str = ""
    threads: int = 1
    device: str = ""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    wall_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Returns samples a second, steps a second if no loader tells the samples; 0 if nothing was counted."""
        return (self.samples or self.counted) / self.measured_s if self.measured_s else 0.0

    @property
    def loader(self) -> SeenLoader | None:
        """Returns the loader that trains, None if there is none."""
        known = [n for n in self.training if n < len(self.loaders)]
        return self.loaders[min(known)] if known else None

    def share(self, part: str) -> float:
        """Returns the share of a part of the step's time."""
        return self.parts.get(part, 0.0) / self.split_s if self.split_s else 0.0


class Command:
    """A command, and where what it prints is kept. `env` is that of the person, less what launchers have set."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.command, self._folder = list(command), folder
        self.dropped = sorted(n for n in env if n in LAUNCHERS or n.startswith("SLURM_"))
        self._env = {name: value for name, value in env.items() if name not in self.dropped}
        self._before, self._cpu = _files(), _processor_s()
        self._ended_s = 0.0
        """Processor seconds of what the runs have started, which nobody waits for once it is killed."""
        self.output = folder / "output.txt"
        """What the last run printed."""

    @property
    def wrote(self) -> list[str]:
        """Returns the files of the working folder that are new or changed since the first run."""
        return sorted(path for path, changed in _files().items() if self._before.get(path) != changed)

    @property
    def others_frac(self) -> float:
        """Returns the share of the cores that other programs have taken since the first run."""
        busy_s, whole_s, own_s = (now - then for now, then in zip(_processor_s(), self._cpu, strict=True))
        return max(0.0, busy_s - own_s - self._ended_s) / whole_s if whole_s > 0 else 0.0

    def look(self, settings: Setting, loader: int | None, window_s: float, limit_s: float) -> Look:
        """Returns what a run with these settings of the loader of that number showed.

        Raises ConfigError if it failed, or if no optimiser has stepped before it ended or `limit_s` was over.
        """
        with tempfile.TemporaryDirectory(prefix="ct-outside-") as folder:
            out, begun = Path(folder) / "seen.json", time.monotonic()
            order: dict[str, object] = {"out": str(out), "settings": dict(settings), "loader": loader}
            order |= {"window_s": window_s, "longest_s": 4 * window_s, "steps": LEAST_STEPS}
            order["wrote"] = [str(Path(path).resolve()) for path in self.wrote]
            env = {**hook.environment(self._env, Path(folder)), "CARDTUNE_OUTSIDE": json.dumps(order)}
            code = self._run(env, out, begun + limit_s)
            found = Look.model_validate_json(out.read_text("utf-8")) if out.exists() else None
        if found is None or not found.counted:
            raise self._no_figures(code, time.monotonic() - begun, 0 if found is None else found.steps)
        return found.model_copy(update={"wall_s": time.monotonic() - begun})

    def _run(self, env: Mapping[str, str], out: Path, until: float) -> int | None:
        """Runs the command until `out` is there, and ends it with all that it started; returns its own exit code."""
        token = secrets.token_hex(8)
        with self.output.open("wb") as said:
            try:
                process = subprocess.Popen(
                    self.command,
                    env=leftovers.marked(token, env),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            except OSError as error:
                what = f"{self.command[0]} cannot be started: {error.strerror}"
                raise ConfigError(what, remedy="the command as you type it, behind --") from None
            try:
                while not out.exists() and process.poll() is None and time.monotonic() < until:
                    time.sleep(LOOK_S)
            finally:
                code = process.poll()
                self._ended_s += _of_children_s(process.pid)
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                leftovers.end(token)
        return code

    def _no_figures(self, code: int | None, after_s: float, steps: int) -> ConfigError:
        lines = [line for line in self.output.read_text("utf-8", "replace").splitlines() if line.strip()]
        last = f"; it printed last: {lines[-1].strip()[:300]}" if lines else ""
        if code not in (None, 0):
            places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
            theirs = [place for place in places if "site-packages" not in place and "/lib/python" not in place]
            at = f" at {theirs[-1]}" if theirs else ""
            return ConfigError(f"the command failed with exit code {code}{at}{last}", remedy=f"see {self.output}")
        if steps:
            what = f"the training made {steps} steps, too few to be timed{last}"
            return ConfigError(what, allowed=f"some {2 * LEAST_STEPS} and more", remedy="more data, or more epochs")
        ended = "ended" if code == 0 else f"had not done so after {after_s:.0f} s"
        what = f"no step of a training with torch was seen in the command, which {ended}{last}"
        return ConfigError(what, remedy="a command that trains with torch; --max-time 3m for one that starts slowly")


def _processor_s() -> tuple[float, float, float]:
    """Returns the seconds that the cores have been busy, all that they had, and those of our own that have ended."""
    (busy_s, whole_s, steal_s), own = machine.processor(), os.times()
    return busy_s - steal_s, whole_s, own.user + own.system + own.children_user + own.children_system


def _of_children_s(pid: int) -> float:
    """Returns the processor seconds of the processes that a process has started, and they in turn."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                seconds += sum(child.cpu_times()[:4])
    return seconds


def _files() -> dict[str, float]:
    """Returns the files below the working folder with when they were changed; hidden folders and caches left out."""
    found: dict[str, float] = {}
    for folder, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("__pycache__", "runs")]
        for name in names:
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                found[str(path)] = path.stat().st_mtime
        if len(found) > 100_000:
            break
    return found
