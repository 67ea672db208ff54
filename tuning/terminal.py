"""What a run says: progress to stderr, the result to stdout. Values are text and never markup, whatever is in them.

A terminal gets one live line; a pipe, a CI log or TERM=dumb gets a short line for each event, without any escape code.
"""

from __future__ import annotations

import io
import os
import signal
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tuning import wording
from tuning.records import Record
from tuning.sections import StudyConfig
from tuning.summary import SAMPLES_PER_S, Named, Summary

WIDTH = 80
MIN_WIDTH = 40
REFRESH_PER_S = 4
MIN_TRIALS_FOR_ETA = 3
_LABEL = 8  # columns of "best    ", "trials  " and the like
_MAX_VALUE = 36


class Finding(Protocol):
    """A preflight check, as `tuning.doctor` makes them."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def detail(self) -> str: ...  # noqa: D102
    @property
    def remedy(self) -> str: ...  # noqa: D102


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
                self._say(f"{found.state.lower():<{_LABEL}}{text}")

    def plan(self, config: StudyConfig, facts: Record | Mapping[str, Any], folder: Path) -> None:
        """Says what will be done, before it is: where, how much, for how long, and how to go on after an interruption."""
        self._resume = f"python -m tuning.run resume={folder.name}{_runs_dir(folder, 'runs_dir=')}"
        self._progress = Progress(facts, config.search.trials)
        for line in plan_lines(config, facts, folder):
            self._say(line)
        self._say(f"{'resume':<{_LABEL}}{self._resume}")

    def dashboard(self, url: str, token_path: Path) -> None:
        """Says where Ray's dashboard is and how to log in; it answers 401 without the token."""
        self._say(f"{'ray':<{_LABEL}}{url}  log in with the token: cat {token_path}")

    def stage(self, name: str, detail: str = "") -> None:
        """Says that a stage begins."""
        self._progress.enter(name, self._clock())
        if self._drawn:
            self._start_live()
        else:
            self._say(f"{'stage':<{_LABEL}}{wording.plain(name)}" + (f"  {wording.plain(detail)}" if detail else ""))

    def record(self, record: Record) -> None:
        """Takes a probe, trial, refusal, rung, window or confirmation as it is written."""
        line = event_line(record, self._progress.reference)
        self._progress.take(record)
        told = record.event not in ("rung", "window") and not self._drawn
        if line and (told or self._verbosity > 0):
            self._say(_fit(line, WIDTH - 1))

    def note(self, text: str) -> None:
        """Says something a person should know."""
        for line in _wrapped("note", wording.plain(text).split(" "), WIDTH, " "):
            self._say(line)

    def warning(self, text: str) -> None:
        """Says what may be wrong, once for the same text, also when quiet."""
        if text not in self._warned:
            self._warned.add(text)
            for line in _wrapped("warning", wording.plain(text).split(" "), WIDTH, " "):
                self._print(self._err, line, "yellow" if line.startswith("warning") else "")

    # -- at the end -------------------------------------------------------------------------------------------------

    def summary(self, summary: Summary, folder: Path, paths: Sequence[Path] = ()) -> None:
        """Prints the result to stdout, in at most 80 columns."""
        self._stop_live()
        for line in summary_lines(summary, folder, max(MIN_WIDTH, min(WIDTH, self._out.width))):
            self._print(self._out, line, "bold" if line.startswith("best ") else "")
        if paths:
            self._say(f"{'wrote':<{_LABEL}}{', '.join(p.name for p in paths)}, report.html in {folder}")

    def error(self, error: BaseException) -> None:
        """Prints an error as it describes itself; the run's own log lines stay above it."""
        self._stop_live()
        for line in str(error).splitlines():
            self._print(self._err, wording.plain(line), "red" if line.startswith("error") else "")

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
                get_renderable=lambda: Text(_fit(self._progress.line(self._clock()), self._err.width - 1)),
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
        self._objective = next((n for n in objectives if n != SAMPLES_PER_S), "")
        self._lower = objectives.get(self._objective) == "min"
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
            value = (record.get("values") or {}).get(self._objective)
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
            best = f"best {self._objective} {self._best_value:.3f}"
        eta = self.eta_s()
        left = f"~{wording.duration(eta)} left" if eta is not None else ""
        parts = [self._stage, done, best, wording.duration(max(0.0, now_s - self._entered)), left]
        return "  ".join(part for part in parts if part)


def plan_lines(config: StudyConfig, facts: Record | Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yields the plan: what, on what, how much, until when, where to."""
    device = facts.get("device") or {}
    card = facts.get("card") or {}
    emulated = ", emulated" if card.get("virtual") else ""
    what = f"{config.workload.name} on card {card.get('name') or config.card.name}{emulated}, device {device.get('name', 'unknown')}"
    slots = facts.get("concurrency") or config.concurrency
    confirm = config.budget.confirm
    limit = f"at most {wording.duration(config.search.max_time_s)}" if config.search.max_time_s else "no time limit"
    steps = (
        [f"probes for {wording.duration(config.budget.probe.max_time_s)},"]
        if config.search.strategy == "staged"
        else []
    )
    steps += [f"{config.search.trials} trials ({slots} at a time),"]
    steps += [f"{confirm.windows} windows and {confirm.seeds} seeds to confirm"]
    rows = [
        ("run", [folder.name]),
        ("what", what.split(" ")),
        ("plan", steps),
        ("budget", [f"{config.budget.name}, {limit},", f"{facts.get('horizon_samples') or '?'} samples a trial,"]
         + [f"seed {config.search.seed}"]),
        ("writes", [f"{folder}/trials.jsonl"]),
    ]  # fmt: skip
    for label, parts in rows:
        yield from _wrapped(label, [wording.plain(p) for p in parts], WIDTH, " ")


def event_line(record: Record, reference: Mapping[str, Any] | None) -> str:
    """Returns what happened in a line, "" for events that are not told; knobs are those other than in `reference`."""
    config = record.get("config") or {}
    differing = wording.differing(config, reference)
    first = {k: differing[k] for k in ("learning_rate", "batch_size") if k in differing}
    knobs = " ".join(wording.knobs({**first, **differing}))
    name = wording.plain(record.get("trial") or record.get("name") or "")
    speed = record.get(SAMPLES_PER_S)
    rate = f"{wording.rate(speed)} samples/s" if speed else ""
    outcome = wording.plain(record.get("outcome") or "ok")
    if record.event == "probe":
        told = rate if speed else outcome
        return f"{'probe':<{_LABEL}}{name:<8}{told:<16}{wording.size(record.get('peak_allocated_bytes')):<10}{knobs}"
    values = " ".join(f"{wording.plain(k)} {v:.3f}" for k, v in (record.get("values") or {}).items() if v is not None)
    if record.event == "trial":
        told = f"stopped at {record.get('stopped_at')}" if record.get("stopped_at") else outcome
        rate = rate if values else ""  # of one that failed it is only what was expected
        return f"{'trial':<{_LABEL}}{name:<6}{told:<16}{values:<16}{rate.replace(' samples', ''):<8}{knobs}"
    if record.event == "rung":
        return f"{'rung':<{_LABEL}}{name:<6}{record.get('samples')} samples  {values}"
    if record.event == "refused":
        return f"{'refused':<{_LABEL}}{wording.plain(record.get('reason') or '')}  {knobs}"
    if record.event == "window":
        return f"{'window':<{_LABEL}}{name:<8}{rate or outcome}"
    if record.event == "confirmed":
        return f"{'again':<{_LABEL}}{name:<8}seed {record.get('seed')}  {values or outcome}  {rate}"
    return ""


def summary_lines(summary: Summary, folder: Path, width: int = WIDTH) -> list[str]:
    """Returns the result in hyperfine's manner: the best, what it gains, what was tried, where the time went, what next.

    No line but a command or a path that cannot be cut is longer than `width` columns.
    """
    lines = _best_lines(summary, width)
    if summary.baselines:
        texts = [
            f"{wording.plain(name)} {', '.join(f'{v:.3f}' for v in values.values())}"
            for name, values in summary.baselines.items()
        ]
        lines += _wrapped("without training:", [f"{t}," for t in texts[:-1]] + texts[-1:], width, " ")
    lines += _wrapped("trials", wording.counts(summary.trial_counts).split(" "), width, " ")
    if summary.probes:
        probes = wording.counts(summary.probe_counts, always=("ok", "oom", "refused"))
        lines += _wrapped("probes", probes.split(" "), width, " ")
    times = summary.times
    shares = [f"{name} {wording.percent(seconds / times.wall_s)}" for name, seconds in wording.shares(times)]
    told = [f"{wording.duration(times.wall_s)}:", *(f"{share}," for share in shares[:-1]), *shares[-1:]]
    lines += _wrapped("time", told, width, " ")
    if summary.stop_reason and summary.stop_reason != "finished":
        lines += _wrapped("ended", wording.plain(summary.stop_reason).split(" "), width, " ")
    commands = wording.next_commands(summary, str(folder), _runs_dir(folder, "--runs-dir "))
    for number, command in enumerate(commands):
        lines += _wrapped("next" if number == 0 else "", command.split(" "), width, " ", broken=" \\")
    return lines


def _best_lines(summary: Summary, width: int) -> list[str]:
    best = summary.best
    if best is None:
        return ["no configuration was picked"]
    segments = [best.trial, f"{wording.named_rate(best)} samples/s"]
    segments += [f"{wording.plain(name)} {wording.quality(found)}" for name, found in best.quality.items()]
    segments += [wording.size(best.peak_allocated_bytes)] if best.peak_allocated_bytes else []
    lines = _wrapped("best", segments, width, "   ")
    lines += _wrapped("", _knob_texts(summary, best), width, " ")
    for gain in summary.gains:
        if gain.of == "best":
            lines += textwrap.wrap(wording.gain_sentence(gain), width)
    claim = wording.claim_sentence(summary.claim, summary.gain("after", "before"))
    lines += textwrap.wrap(claim, width) if claim else []
    if summary.place.virtual:
        lines += textwrap.wrap(wording.place_sentence(summary.place), width)
    return lines


def _knob_texts(summary: Summary, best: Named) -> list[str]:
    """The knobs that are otherwise than in `before`, each cut in its middle where its value is long."""
    before = summary.named.get("before")
    differing = wording.differing(best.config, before.config if before else None)
    texts = [f"{wording.plain(k)}={_cut(wording.plain(v), _MAX_VALUE)}" for k, v in differing.items()]
    return texts or (["the knobs of before"] if before else [])


def _wrapped(label: str, parts: Sequence[str], width: int, between: str, broken: str = "") -> list[str]:
    """`parts` after a label, in as many lines as it takes; a part that is too long has a line of its own."""
    indent = max(_LABEL, len(label) + 1) if label else _LABEL
    lines = [f"{label:<{indent}}"]
    room = width - len(broken)
    for number, part in enumerate(parts):
        start = number == 0 or len(lines[-1]) <= indent
        if not start and len(lines[-1]) + len(between) + len(part) > room:
            lines[-1] += broken
            lines.append(" " * indent)
            start = True
        lines[-1] += part if start else between + part
    return [line.rstrip() for line in lines] if parts else []


def _cut(text: str, limit: int) -> str:
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def _fit(line: str, width: int) -> str:
    line = line.rstrip()
    return line if len(line) <= width else f"{line[: max(1, width - 1)]}…"


def _runs_dir(folder: Path, option: str) -> str:
    """The option that says where runs are, where that is not the default."""
    runs_dir = folder.parent.parent
    return "" if runs_dir == Path("runs") else f" {option}{runs_dir}"


def _console(stream: TextIO, env: Mapping[str, str]) -> Console:
    """A console without any escape code, colour and weight included, unless a person looks at a capable terminal."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a log in ASCII takes "±" as \\xb1
    shown = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    return _Console(
        file=stream,
        force_terminal=shown,
        color_system="auto" if shown else None,
        width=None if stream.isatty() else WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


class _Console(Console):
    """Ends quietly when the reader of a pipe has gone, as `head` does; 141 is the shell's code for it."""

    def on_broken_pipe(self) -> None:
        """Raises SystemExit, with stdout led away so that its last flush does not fail again."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)
