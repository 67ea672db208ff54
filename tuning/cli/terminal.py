"""The terminal: progress to stderr, the result to stdout. Values are text and never markup, whatever is in them.

Each event is a short line. A terminal also has a live view of what goes on; a pipe, a CI log or TERM=dumb has no escape
code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuning.cli import live
from tuning.cli.progress import STAGES, STARTING, Progress, best_of, counted, objective_of, progress
from tuning.config.errors import PreflightError, StoppedEarly, UserCodeError, reader_has_gone
from tuning.config.schema import StudyConfig
from tuning.config.space import shown
from tuning.journal import events
from tuning.journal.events import Importances
from tuning.journal.run import History
from tuning.report import sentences, tables, text, words
from tuning.report.format import LABEL_WIDTH, labelled, plain, table
from tuning.report.summary import Summary
from tuning.search.selection import leader, next_leader
from tuning.workers.doctor import Check
from tuning.workers.worker import Asked

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
        self._config: StudyConfig | None = None
        self._leader: events.TrialRecord | None = None
        self._run = History()
        self._asked: Callable[[], Asked] = Asked
        self._began, self._doing, self._resume = clock(), "", ""

    # -- before and during ------------------------------------------------------------------------------------------

    def begin(self, began: float) -> None:
        """Says that the run has begun, at `began` of the clock, before anything of size is loaded."""
        self._began = began
        self.doing("looking at the machine and the workload")

    def doing(self, what: str) -> None:
        """Says what goes on while there is no stage yet."""
        self._doing = what
        if self._drawn:
            self._start_live()
        else:
            self._say(labelled([(STARTING, what)]))

    def checks(self, findings: Sequence[Check]) -> None:
        """Says what preflight found: what is not right, or everything when verbose. A FAIL is raised by its check."""
        for found in findings:
            told = f"{found.name}: {found.detail}" + (f"; {found.remedy}" if found.remedy else "")
            if found.state == "WARN":
                self.warning(told)
            elif self._verbosity > 0:
                self._say(labelled([(found.state.lower(), told)]))

    def findings(self, checks: Sequence[Check]) -> None:
        """Prints every finding to stdout: its state, its name, what was found, and what to do."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for found in checks:
            told = f"{found.detail}; {found.remedy}" if found.remedy else found.detail
            style = {"WARN": "yellow", "FAIL": "bold red"}.get(found.state, "")
            grid.add_row(Text(found.state, style=style), Text(found.name), Text(plain(told)))
        show(self._out, grid)

    def plan(self, config: StudyConfig) -> None:
        """Says what will be done, before anything of it is loaded: what, on what, how much, until when."""
        self._config = config
        self._say(labelled(text.planned(config)))
        for said in config.dropped if self._verbosity > 0 else ():
            self.note(said)

    def watch(self, asked: Callable[[], Asked]) -> None:
        """Has it shown what the measuring process is at."""
        self._asked = asked

    def opened(self, study: events.StudyRecord, folder: Path, began: float, run: History) -> None:
        """Says where the run stands, what it trains on, and how to go on with it; from here on it is shown.

        `began` is when it would have begun in one go, by the clock.
        """
        self._resume, self._doing = sentences.resume_command(folder), ""
        self._began, self._run = began, run
        self._say(labelled([*text.trained_on(study, folder), ("resume", self._resume)]))

    def dashboard(self, url: str, token_path: Path) -> None:
        """Says where Ray's dashboard is and how to log in; it answers 401 without the token."""
        self._say(f"{'ray':<{LABEL_WIDTH}}{url}")
        self._say(f"{'':<{LABEL_WIDTH}}log in with the token: cat {shlex.quote(str(token_path))}")

    def stage(self, name: str) -> None:
        """Says that a stage begins."""
        self._doing, found = "", self._progress(self._run)
        said = f"{live.header(found)}   {live.clock(found)}" if found else f"stage {name}"
        self._say(Text(f"{said}{STAGES[name]}"))
        if self._drawn:
            self._start_live()

    def record(self, made: events.Event) -> None:
        """Takes a probe, trial, refusal, rung, window, confirmation or note as it is written."""
        if isinstance(made, events.NoteRecord):
            self.note(made.text)
        elif self._verbosity > 0 or not isinstance(made, events.RungRecord | events.WindowRecord):
            best, is_best = self._best_before(made)
            named = ""
            if isinstance(made, events.TrialRecord):
                trial = self._run.trials[made.trial]
                made, named = replace(made, values=trial.values), trial.named
            is_again = isinstance(made, events.ConfirmedRecord)
            done, planned = (0, None) if is_again or self._config is None else counted(self._run, self._config)
            count = f"{done}/{planned}" if done and planned is not None else str(done or "")
            told = words.event(made, best, self._run.table, objective_of(self._run), count, named, is_best=is_best)
            self._say(labelled([told])) if told else None

    def _best_before(self, made: events.Event) -> tuple[events.Config, bool]:
        """Returns the configuration that was the best before a record, and whether the recorded one is now."""
        run, known, leads = self._run, self._leader, False
        if isinstance(made, events.TrialRecord):
            self._leader = leader(run) if known is None else next_leader(run, known, made)
            leads = self._leader is not None and self._leader.trial == made.trial
        if run.stage == "search" and (base := known or run.reference) is not None:
            return base.config, leads
        with contextlib.suppress(Exception):  # what is shown of a study must never end it
            best = best_of(run.before(made.seq))
            if isinstance(made, events.ProbeRecord) and made.outcome == "ok" and made.samples_per_s:
                leads = best is None or made.samples_per_s > (best.samples_per_s or 0.0)
            return (best.config if best else {}), leads
        return {}, leads

    def space(self, config: StudyConfig) -> None:
        """Prints the space to stdout, a knob a line, as it would be typed."""
        for name, given in config.space.as_raw().items():
            line(self._out, shlex.quote(f"knobs.{name}={shown(given)}"))

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
        self.close()
        for part in text.summary(summary):
            show(self._out, part)
        for number, command in enumerate(sentences.next_commands(summary, folder)):
            line(self._out, f"{'' if number else 'next':<{LABEL_WIDTH}}{command}")
        if paths:
            self._say(labelled([("wrote", f"{', '.join(p.name for p in paths)}, report.html in {folder}")]))

    def trials(self, summary: Summary, importances: Importances) -> None:
        """Prints every trial to stdout, and which knobs decide what; nothing of what is not known."""
        if (found := tables.trials(summary, brief=self._out.width < live.WITH_PEAK)) is not None:
            show(self._out, Text(f"\n{sentences.SEARCHED}\n"))
            show(self._out, table(found.head, found.rows))
        if (shares := tables.importances(importances)) is not None:
            show(self._out, Text("\nthe share of each searched knob in what makes trials good (PED-ANOVA)\n"))
            show(self._out, table(shares.head, shares.rows))

    def error(self, error: BaseException) -> None:
        """Prints an error as it describes itself, and how to go on with a run that can be resumed."""
        self.close()
        for said in str(error).splitlines():
            on_screen = self._err.is_terminal and "try: " not in said  # what is to be typed is never broken
            style = "red" if said.startswith("error") else ""
            show(self._err, Text(plain(said)), style) if on_screen else line(self._err, said, style)
        if self._resume and isinstance(error, PreflightError | StoppedEarly):
            self.resume_hint(self._resume)

    def traceback(self, error: BaseException) -> None:
        """Prints where an error came from, for -v and TUNING_DEBUG=1."""
        self.close()
        theirs = error.traceback if isinstance(error, UserCodeError) else ""
        for said in (theirs or "".join(traceback.format_exception(error))).splitlines():
            line(self._err, said)

    def interrupted(self, signum: int) -> None:
        """Says that the run was interrupted and how to go on; nothing where it had not begun."""
        self.close()
        name = signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"
        who = " (Ctrl-C, or `stop`)" * (signum == signal.SIGINT)
        saved = "every trial that ended is saved" if self._resume else "nothing had been measured"
        line(self._err, f"interrupted by {name}{who}; {saved}")
        if self._resume:
            self.resume_hint(self._resume)

    def left(self, said: str) -> None:
        """Says what a run that ends early leaves, also when quiet."""
        self.close()
        line(self._err, said)

    def resume_hint(self, command: str) -> None:
        """Says how to go on, on a line of its own to be copied."""
        line(self._err, f"resume with: {command}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _say(self, said: str | RenderableType) -> None:
        if self._verbosity >= 0:
            line(self._err, said) if isinstance(said, str) else show(self._err, said)

    def _progress(self, run: History) -> Progress | None:
        """Returns how far the study is, None before its plan is known."""
        if self._config is None:
            return None
        try:
            return progress(run, self._config, self._clock() - self._began, self._asked(), self._doing)
        except Exception:  # what is shown of a study must never end it
            return None

    def _view(self) -> RenderableType:
        found = self._progress(self._run.before()) or Progress(
            STARTING, 0, 0, self._clock() - self._began, doing=self._doing
        )
        return live.study(found)

    def _start_live(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._view,
                console=self._err,
                refresh_per_second=live.REFRESH_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()

    def close(self) -> None:
        """Ends the live view."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """Returns a console without any escape code unless a person looks at a capable terminal; COLUMNS sets its width."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a log in ASCII takes "±" as \\xb1
    shown = stream.isatty() and env.get("TERM") != "dumb"
    columns = env.get("COLUMNS", "")
    asked = max(MIN_WIDTH, min(int(columns), MAX_WIDTH)) if re.fullmatch("[0-9]{1,6}", columns) else None
    made = _Console(
        file=cast(TextIO, _UntilGone(stream)),
        force_terminal=shown,
        force_jupyter=False,  # in a notebook each line would be a table of its own
        color_system="auto" if shown and not env.get("NO_COLOR") else None,
        width=asked or (None if stream.isatty() else PIPE_WIDTH),
        markup=False,
        highlight=False,
        emoji=False,
    )
    if made.width < MIN_WIDTH:  # else a terminal may become wider or narrower while a study runs
        made.width = MIN_WIDTH
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


class _UntilGone:
    """A stream that drops what is written once its terminal is gone, as after a log-out: it never ends a study."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_gone = stream, False

    def write(self, said: str) -> int:
        """Writes, or drops."""
        self._until_gone(lambda: self._stream.write(said))
        return len(said)

    def flush(self) -> None:
        """Hands on what was written."""
        self._until_gone(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _until_gone(self, act: Callable[[], object]) -> None:
        try:
            if not self._is_gone:
                act()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._is_gone = True


class _Console(Console):
    """Ends quietly when the reader of a pipe has gone, as `head` does; 141 is the shell's code for it."""

    def on_broken_pipe(self) -> None:
        """Raises SystemExit."""
        self.quiet = True
        raise SystemExit(reader_has_gone())
