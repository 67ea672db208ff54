"""What a run says: progress to stderr, the result to stdout. Values are text and never markup, whatever is in them.

A terminal gets one live line; a pipe, a CI log or TERM=dumb gets a short line for each event, without any escape code.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tuning.cli.progress import REFRESH_PER_S, Status
from tuning.config.errors import PreflightError, StoppedEarly, reader_has_gone
from tuning.config.schema import StudyConfig
from tuning.journal.records import Record
from tuning.report import sentences, text
from tuning.report.format import LABEL_WIDTH, fit, labelled, plain
from tuning.report.summary import Summary
from tuning.workers.doctor import Check

PIPE_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 40, 1000


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
        self._out, self._err = console(out or sys.stdout, env), console(err or sys.stderr, env)
        self._drawn = self._err.is_terminal and "CI" not in env and verbosity >= 0
        self._live: Live | None = None
        self._warned: set[str] = set()
        self._status = Status({})
        self._resume = ""

    # -- before and during ------------------------------------------------------------------------------------------

    def checks(self, findings: Sequence[Check]) -> None:
        """Says what preflight found: what is not right, or everything when verbose. A FAIL is raised by its check."""
        for found in findings:
            told = f"{found.name}: {found.detail}" + (f"; {found.remedy}" if found.remedy else "")
            if found.state == "WARN":
                self.warning(told)
            elif self._verbosity > 0:
                self._say(labelled([(found.state.lower(), told)]))

    def plan(self, config: StudyConfig, facts: Record | Mapping[str, Any], folder: Path) -> None:
        """Says what will be done, before it is: what, where, how much, on what, and how to go on if interrupted."""
        self._resume = sentences.resume_command(folder)
        self._status = Status(facts, config.search.trials)
        self._say(labelled([*text.planned(config, facts, folder), ("resume", self._resume)]))

    def dashboard(self, url: str, token_path: Path) -> None:
        """Says where Ray's dashboard is and how to log in; it answers 401 without the token."""
        self._say(f"{'ray':<{LABEL_WIDTH}}{url}  log in with the token: cat {shlex.quote(str(token_path))}")

    def stage(self, name: str) -> None:
        """Says that a stage begins."""
        self._status.enter(name, self._clock())
        if self._drawn:
            self._start_live()
        else:
            self._say(labelled([("stage", name)]))

    def record(self, record: Record) -> None:
        """Takes a probe, trial, refusal, rung, window, confirmation or note as it is written."""
        if record.event == "note":
            self.note(record["text"])
        said = text.event(record, self._status.reference, self._status.objective)
        self._status.take(record)
        told = record.event not in ("rung", "window") and not self._drawn
        if said and (told or self._verbosity > 0):
            self._say(fit(said, self._err.width - 1))

    def note(self, said: str) -> None:
        """Says something a person should know."""
        self._say(labelled([("note", said)]))

    def warning(self, said: str) -> None:
        """Says what may be wrong, once for the same text, also when quiet."""
        if said not in self._warned:
            self._warned.add(said)
            show(self._err, labelled([("warning", said)]), "yellow")

    # -- at the end -------------------------------------------------------------------------------------------------

    def summary(self, summary: Summary, folder: Path, paths: Sequence[Path] = ()) -> None:
        """Prints the result to stdout, as wide as the terminal or as COLUMNS says, 80 columns in a pipe."""
        self._stop_live()
        for part in text.summary(summary):
            show(self._out, part)
        for number, command in enumerate(sentences.next_commands(summary, folder)):
            line(self._out, f"{'' if number else 'next':<{LABEL_WIDTH}}{command}")
        if paths:
            self._say(labelled([("wrote", f"{', '.join(p.name for p in paths)}, report.html in {folder}")]))

    def error(self, error: BaseException) -> None:
        """Prints an error as it describes itself, and how to go on with a run that can be resumed."""
        self._stop_live()
        for said in str(error).splitlines():
            line(self._err, said, "red" if said.startswith("error") else "")
        if self._resume and isinstance(error, PreflightError | StoppedEarly):
            self.resume_hint(self._resume)

    def traceback(self, error: BaseException) -> None:
        """Prints where an error came from, for -v and TUNING_DEBUG=1."""
        self._stop_live()
        for said in "".join(traceback.format_exception(error)).splitlines():
            line(self._err, said)

    def interrupted(self, signum: int) -> None:
        """Says that the run was interrupted and how to go on; nothing where it had not begun."""
        self._stop_live()
        name = signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"
        line(self._err, f"interrupted by {name}; every trial that ended is saved")
        if self._resume:
            self.resume_hint(self._resume)

    def resume_hint(self, command: str) -> None:
        """Says how to go on, on a line of its own to be copied."""
        line(self._err, f"resume with: {command}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _say(self, said: str | RenderableType) -> None:
        if self._verbosity >= 0:
            line(self._err, said) if isinstance(said, str) else show(self._err, said)

    def _start_live(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=lambda: Text(fit(self._status.line(self._clock()), self._err.width - 1)),
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


def console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """Returns a console without any escape code unless a person looks at a capable terminal; COLUMNS sets its width."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a log in ASCII takes "±" as \\xb1
    shown = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    columns = env.get("COLUMNS", "")
    asked = max(MIN_WIDTH, min(int(columns), MAX_WIDTH)) if re.fullmatch("[0-9]{1,6}", columns) else None
    made = _Console(
        file=stream,
        force_terminal=shown,
        color_system="auto" if shown else None,
        width=asked or (None if stream.isatty() else PIPE_WIDTH),
        markup=False,
        highlight=False,
        emoji=False,
    )
    made.width = max(MIN_WIDTH, made.width)
    return made


def line(on: Console, said: str, style: str = "") -> None:
    """Prints a line that is not broken, to be copied as it is; a Text is never parsed for markup."""
    on.print(Text(plain(said), style=style), soft_wrap=True)


def show(on: Console, part: RenderableType, style: str = "") -> None:
    """Prints what rich lays out; in a pipe without the spaces that fill up its lines."""
    if on.is_terminal:
        on.print(part, style=style)
        return
    with on.capture() as captured:
        on.print(part)
    for said in captured.get().splitlines():
        line(on, said.rstrip())


class _Console(Console):
    """Ends quietly when the reader of a pipe has gone, as `head` does; 141 is the shell's code for it."""

    def on_broken_pipe(self) -> None:
        """Raises SystemExit."""
        self.quiet = True
        raise SystemExit(reader_has_gone())
