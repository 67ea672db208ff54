"""What a run says: progress to stderr, the result to stdout. Values are text and never markup, whatever is in them.

A terminal gets one live line; a pipe, a CI log or TERM=dumb gets a short line for each event, without any escape code.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import rich.progress
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from tuning.config.errors import PreflightError, StoppedEarly, reader_has_gone
from tuning.config.schema import StudyConfig
from tuning.journal.records import Record
from tuning.report import lines, wording
from tuning.report.summary import Summary
from tuning.report.trial_views import SAMPLES_PER_S

MIN_WIDTH, MAX_WIDTH = 40, 1000
REFRESH_PER_S = 4
MIN_TRIALS_FOR_ETA = 3
PLAIN_LINE_S = 5.0
"""Where there is no terminal to draw a training's bar on, a line this often."""


class Finding(Protocol):
    """A preflight check, as `tuning.doctor` makes them."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def remedy(self) -> str: ...


class Terminal:
    """Says how a run is going. `verbosity` -1: warnings and the result; 0: also stages and events; 1: everything."""

    def __init__(
        self,
        verbosity: int = 0,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        env = os.environ if env is None else env
        self._verbosity, self._clock = verbosity, clock
        self._out, self._err = _console(out or sys.stdout, env), _console(err or sys.stderr, env)
        self._out_width, self._err_width = (_columns(console, env) for console in (self._out, self._err))
        self._drawn = self._err.is_terminal and "CI" not in env and verbosity >= 0
        self._live: Live | None = None
        self._warned: set[str] = set()
        self._progress = Progress({})
        self._resume = ""

    # -- before and during ------------------------------------------------------------------------------------------

    def checks(self, findings: Sequence[Finding]) -> None:
        """Says what preflight found: what is not right, or everything when verbose. A FAIL is raised by its check."""
        for found in findings:
            text = f"{found.name}: {found.detail}" + (f"; {found.remedy}" if found.remedy else "")
            if found.state == "WARN":
                self.warning(text)
            elif self._verbosity > 0:
                self._say(f"{found.state.lower():<{lines.LABEL}}{text}")

    def plan(self, config: StudyConfig, facts: Record | Mapping[str, Any], folder: Path) -> None:
        """Says what will be done, before it is: what, where, how much, on what, and how to go on if interrupted."""
        self._resume = wording.resume_command(folder)
        self._progress = Progress(facts, config.search.trials)
        width = self._err_width
        for line in (*lines.plan(config, facts, folder, width), *lines.banner(config, facts, width)):
            self._say(line)
        self._say(f"{'resume':<{lines.LABEL}}{self._resume}")

    def dashboard(self, url: str, token_path: Path) -> None:
        """Says where Ray's dashboard is and how to log in; it answers 401 without the token."""
        self._say(f"{'ray':<{lines.LABEL}}{url}  log in with the token: cat {shlex.quote(str(token_path))}")

    def stage(self, name: str, detail: str = "") -> None:
        """Says that a stage begins."""
        self._progress.enter(name, self._clock())
        if self._drawn:
            self._start_live()
        else:
            self._say(
                f"{'stage':<{lines.LABEL}}{wording.plain(name)}" + (f"  {wording.plain(detail)}" if detail else "")
            )

    def record(self, record: Record) -> None:
        """Takes a probe, trial, refusal, rung, window, confirmation or note as it is written."""
        if record.event == "note":
            self.note(record["text"])
        line = lines.event(record, self._progress.reference, self._progress.objective)
        self._progress.take(record)
        told = record.event not in ("rung", "window") and not self._drawn
        if line and (told or self._verbosity > 0):
            self._say(lines.fit(line, self._err_width - 1))

    def note(self, text: str) -> None:
        """Says something a person should know."""
        for line in lines.wrapped("note", wording.plain(text).split(" "), self._err_width, " "):
            self._say(line)

    def warning(self, text: str) -> None:
        """Says what may be wrong, once for the same text, also when quiet."""
        if text not in self._warned:
            self._warned.add(text)
            for line in lines.wrapped("warning", wording.plain(text).split(" "), self._err_width, " "):
                self._print(self._err, line, "yellow" if line.startswith("warning") else "")

    # -- at the end -------------------------------------------------------------------------------------------------

    def summary(self, summary: Summary, folder: Path, paths: Sequence[Path] = ()) -> None:
        """Prints the result to stdout, in at most 80 columns, or in as many as the environment's COLUMNS says."""
        self._stop_live()
        for line in lines.summary(summary, folder, self._out_width):
            self._print(self._out, line, "bold" if line.startswith("best ") else "")
        if paths:
            written = f"{', '.join(p.name for p in paths)}, report.html in".split(" ")
            for line in lines.wrapped("wrote", [*written, wording.plain(str(folder))], self._err_width, " "):
                self._say(line)

    def error(self, error: BaseException) -> None:
        """Prints an error as it describes itself, and how to go on with a run that can be resumed."""
        self._stop_live()
        for line in str(error).splitlines():
            self._print(self._err, wording.plain(line), "red" if line.startswith("error") else "")
        if self._resume and isinstance(error, PreflightError | StoppedEarly):
            self.resume_hint(self._resume)

    def traceback(self, error: BaseException) -> None:
        """Prints where an error came from, for -v and TUNING_DEBUG=1."""
        self._stop_live()
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._print(self._err, wording.plain(line))

    def interrupted(self, signum: int) -> None:
        """Says that the run was interrupted and how to go on; nothing where it had not begun."""
        self._stop_live()
        name = signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"
        self._print(self._err, f"interrupted by {name}; every trial that ended is saved")
        if self._resume:
            self.resume_hint(self._resume)

    def resume_hint(self, command: str) -> None:
        """Says how to go on, on a line of its own to be copied."""
        self._print(self._err, f"resume with: {wording.plain(command)}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self._verbosity >= 0:
            self._print(self._err, line)

    @staticmethod
    def _print(console: Console, line: str, style: str = "") -> None:
        # A Text is never parsed for markup, so "[/foo]" is seven characters.
        console.print(Text(wording.plain(line), style=style), soft_wrap=True)

    def _start_live(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=lambda: Text(lines.fit(self._progress.line(self._clock()), self._err.width - 1)),
                console=self._err,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class Progress:
    """What the live line shows: stage, how many are done, the best so far, and when the search will be over."""

    def __init__(self, facts: Record | Mapping[str, Any], trials: int = 0) -> None:
        objectives = facts.get("objectives") or {}
        self.objective = next((n for n in objectives if n != SAMPLES_PER_S), "")
        self._lower = objectives.get(self.objective) == "min"
        self._trials, self._slots = trials, int(facts.get("concurrency") or 1)
        self._stage, self._entered = "", 0.0
        self._done = {"probe": 0, "search": 0, "confirm": 0}
        self._took_s: list[float] = []
        self._best_value: float | None = None
        self._best_speed: float | None = None
        self.reference: Mapping[str, Any] | None = None

    def enter(self, stage: str, now_s: float) -> None:
        """A stage begins at `now_s` of the caller's clock."""
        self._stage, self._entered = stage, now_s
        if stage == "search":
            self.reference = None

    def take(self, record: Record) -> None:
        """Something was written; `reference` is the configuration that event lines are told against."""
        speed = record.get(SAMPLES_PER_S)
        if record.event == "probe":
            self._done["probe"] += 1
            if speed and (self._best_speed is None or speed > self._best_speed):
                self._best_speed, self.reference = speed, record.get("config")
        elif record.event == "trial" or (record.event == "refused" and self._stage == "search"):
            self._done["search"] += 1
            self.reference = self.reference or record.get("config")
            took = [record.get(k) for k in ("setup_s", "train_s", "evaluate_s")]
            if record.event == "trial":
                self._took_s.append(sum(float(s) for s in took if s))
            value = (record.get("values") or {}).get(self.objective)
            if value is not None and (self._best_value is None or (value < self._best_value) == self._lower):
                self._best_value = value
        elif record.event in ("window", "confirmed"):
            self._done["confirm"] += 1

    def eta_s(self) -> float | None:
        """Returns the median trial's seconds times the trials left over the slots; None before three have ended."""
        left = self._trials - self._done["search"]
        if self._stage != "search" or len(self._took_s) < MIN_TRIALS_FOR_ETA or left <= 0:
            return None
        return statistics.median(self._took_s) * left / self._slots

    def line(self, now_s: float) -> str:
        """Returns the live line at `now_s` of the caller's clock."""
        total = f"/{self._trials}" if self._stage == "search" and self._trials else ""
        done = f"{self._done[self._stage]}{total} done" if self._stage in self._done else ""
        best = ""
        if self._stage == "probe" and self._best_speed:
            best = f"best {wording.rate(self._best_speed)} samples/s"
        elif self._best_value is not None:
            best = f"best {self.objective} {self._best_value:.3f}"
        eta = self.eta_s()
        left = f"~{wording.duration(eta)} left" if eta is not None else ""
        parts = [self._stage, done, best, wording.duration(max(0.0, now_s - self._entered)), left]
        return "  ".join(part for part in parts if part)


def _console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """A console without any escape code, colour and weight included, unless a person looks at a capable terminal."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a log in ASCII takes "±" as \\xb1
    shown = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    return _Console(
        file=stream,
        force_terminal=shown,
        color_system="auto" if shown else None,
        width=_asked_columns(env) or (None if stream.isatty() else lines.WIDTH),
        markup=False,
        highlight=False,
        emoji=False,
    )


def _asked_columns(env: Mapping[str, str]) -> int:
    """Returns what COLUMNS asks for, 0 where it asks for nothing: a shell sets it without passing it on."""
    text = env.get("COLUMNS", "")
    return max(MIN_WIDTH, min(int(text), MAX_WIDTH)) if re.fullmatch("[0-9]{1,6}", text) else 0


def _columns(console: Console, env: Mapping[str, str]) -> int:
    return _asked_columns(env) or max(MIN_WIDTH, min(lines.WIDTH, console.width))


class _Console(Console):
    """Ends quietly when the reader of a pipe has gone, as `head` does; 141 is the shell's code for it."""

    def on_broken_pipe(self) -> None:
        """Raises SystemExit."""
        self.quiet = True
        raise SystemExit(reader_has_gone())


class TrainingBar:
    """A training on a person's terminal as a bar with speed, loss and time left; elsewhere a line every few seconds."""

    def __init__(self, messages: Console, total: int, begun_at: int) -> None:
        self._messages, self._total = messages, total
        self._drawn = messages.is_terminal and os.environ.get("TERM") != "dumb"
        self._said = time.monotonic()
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[rate]}  {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = rich.progress.Progress(
            *columns, console=messages, transient=True, refresh_per_second=REFRESH_PER_S, disable=not self._drawn
        )
        self._task = self._bar.add_task("", total=total, completed=begun_at, rate="", loss="")

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def moved(self, samples: int, samples_per_s: float, loss: float) -> None:
        """Shows how far it is."""
        rate, said = f"{samples_per_s:.1f} samples/s", f"loss {loss:.3f}"
        self._bar.update(self._task, completed=samples, rate=rate, loss=said)
        if not self._drawn and time.monotonic() - self._said >= PLAIN_LINE_S:
            self._said = time.monotonic()
            self._messages.print(f"{samples}/{self._total} samples  {rate}  {said}", markup=False)
