"""How far a study is, as one value: a function of its records, its configuration and the clock. No terminal."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.cli import eta
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.resolve import measured_beside
from tuning.config.schema import StudyConfig
from tuning.journal.events import Config, MeasuredRecord
from tuning.journal.run import History, Trial
from tuning.report import summary
from tuning.report.format import unlike
from tuning.report.trial_views import SPEED, TrialView, trial_view, trial_views, view
from tuning.report.words import measured_again, state
from tuning.search.bottleneck import card_words
from tuning.search.race import LEAST_SEEDS, SYSTEM
from tuning.search.selection import leader
from tuning.search.throughput import Speeds, probed
from tuning.workers.worker import Asked

STARTING = "start"
"""The name of the time before the first stage."""
STAGES = ("estimate", "probe", "search", "confirm", "export")
"""The stages of a study in order."""
MAX_ROWS = 20
"""The most rows of a stage that are shown: the best, what runs, and the latest."""
LATEST = 100
"""Records among which is looked for the last that tells how the card was doing."""
UNITS = {"probe": "probe", "search": "trial", "confirm": "measurement"}
"""The unit that is counted in a stage."""
_ASKED_FOR = {
    "import": "a process imports the workload's file",
    "load": "a process loads torch, data and model",
    "describe": "reading data and model, and trying each hook of the workload",
    "kinds": "comparing a step with and without each system knob",
    "footprint": "measuring what a step takes of memory",
}


@dataclass(frozen=True)
class StageRow:
    """A probe, trial or configuration: what became of it, or since when (seconds of the run) it is running.

    `is_named` says that its name tells its knobs, such as `before`.
    """

    name: str
    state: str
    config: Config
    samples_per_s: float | None = None
    value: float | None = None
    peak_bytes: int | None = None
    since_s: float | None = None
    is_best: bool = False
    is_named: bool = False


@dataclass(frozen=True)
class Progress:
    """Stage `number` of `stages`, what runs and what ended there (`rows`, as they began), and the time in seconds.

    `done` of `planned` (None if nobody can say) are counted in `UNITS`. `doing` says why nothing runs, "" if something
    does. `ends_at_s` is when the study is expected to end, None while that is not known; `allowed_s` is
    search.max_time. `faster` is how many times as fast as `reference` the best is, None if it is that itself, or
    nobody knows. `card` says how the card was doing at the last measurement or training.
    """

    stage: str
    number: int
    stages: int
    used_s: float
    rows: tuple[StageRow, ...] = ()
    done: int = 0
    planned: int | None = None
    doing: str = ""
    allowed_s: float | None = None
    ends_at_s: float | None = None
    objective: str = ""
    cap_bytes: int | None = None
    faster: float | None = None
    reference: str = ""
    card: str = ""
    table: KnobTable = field(default_factory=lambda: EVERY)
    """The knobs of the study."""

    @property
    def best(self) -> StageRow | None:
        """Returns the best so far, None if nothing has ended well."""
        return next((row for row in self.rows if row.is_best), None)


def progress(run: History, config: StudyConfig, used_s: float, asked: Asked | None = None, doing: str = "") -> Progress:
    """Returns how far a study is after `used_s` seconds.

    `asked` is what the measuring process is at; `doing` what goes on where the records do not tell.
    """
    stage, names = run.stage or STARTING, STAGES
    objective = objective_of(run)
    rows = tuple(_rows(run, config, stage, objective, asked or Asked()))
    done, planned = counted(run, config, stage)
    names_probed = {probe.name for probe in run.probes}
    reference = run.reference_name or next((name for name in (BEFORE, PLAIN) if name in names_probed), "")
    latest = itertools.islice(reversed(run.events), LATEST)
    return Progress(
        stage=stage,
        number=names.index(stage) + 1 if stage in names else 0,
        stages=len(names),
        used_s=used_s,
        rows=rows,
        done=done,
        planned=planned,
        doing="" if any(row.since_s is not None for row in rows) else _doing(run, config, stage, asked) or doing,
        allowed_s=config.search.max_time_s,
        ends_at_s=eta.ends_at_s(run, config, used_s),
        objective=objective,
        cap_bytes=None if run.study is None else run.study.cap_bytes,
        faster=_faster(reference, rows, run, stage),
        reference=reference,
        card=next((w for e in latest if isinstance(e, MeasuredRecord) and (w := card_words(e.telemetry))), ""),
        table=run.table,
    )


def objective_of(run: History) -> str:
    """Returns the quality that the study is about, "" before that is known."""
    return next((name for name in (run.study.objectives if run.study else ()) if name != SPEED), "")


def _faster(name: str, rows: Sequence[StageRow], run: History, stage: str) -> float | None:
    """Returns how many times as fast as the named one the best of a stage is; None if nobody knows.

    In the end that is the gain of the summary. It takes a core from what is timed, so before it is of the table's
    speeds.
    """
    probe = next((probe for probe in reversed(run.probes) if probe.name == name), None)
    is_best = probe is not None and any(row.is_best and not unlike(row.config, probe.config, run.table) for row in rows)
    if not name or is_best:
        return None
    theirs = None if probe is None else probe.samples_per_s
    if stage == "export" and (gain := summary.of_run(run).gain("best", name)) is not None:
        return gain.ratio
    if stage in ("confirm", "export"):
        theirs = next((row.samples_per_s for row in rows if row.name == name), None)
    ours = next((row.samples_per_s for row in rows if row.is_best), None)
    return ours / theirs if ours and theirs else None


def counted(run: History, config: StudyConfig, stage: str) -> tuple[int, int | None]:
    """Returns how many probes, trials or measurements of the stage are done, and of how many, None where unknown."""
    if stage == "probe":
        return len(run.probes), None
    if stage == "search":
        ended = [trial for trial in run.trials.values() if trial.last is not None and not trial.is_beside]
        return len(ended), config.search.most_trials
    if stage != "confirm":
        return 0, None
    budget = config.budget.confirm
    windows = budget.windows * len(_turns(run, config))
    done = sum(run.has_begun("confirm", window) for window in run.windows)
    trained = len(run.confirmed)  # those of an earlier session are not trained again
    return done + trained, max(done + trained, max(trained, 2 * LEAST_SEEDS) + windows)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(run: History, config: StudyConfig, stage: str, objective: str, asked: Asked) -> Iterator[StageRow]:
    if stage == "probe":
        yield from _probes(run, asked)
    elif stage == "search":
        yield from _trials(run, objective)
    elif stage in ("confirm", "export"):
        yield from _confirmed(run, config, objective, asked)


def _row(one: TrialView, objective: str, *, is_best: bool) -> StageRow:
    """Returns the row of a trial or probe that ended."""
    return StageRow(
        name=f"{one.trial} {one.named}".rstrip(),
        state=state(one),
        config=one.config,
        samples_per_s=one.known_per_s,
        value=one.values.get(objective),
        peak_bytes=one.peak_allocated_bytes,
        is_best=is_best,
        is_named=bool(one.named),
    )


def _probes(run: History, asked: Asked) -> Iterator[StageRow]:
    probes = [view(probe) for probe in run.probes]
    fastest = max((one for one in probes if one.known_per_s), key=lambda one: one.known_per_s or 0.0, default=None)
    for number, one in enumerate(probes, start=1):
        yield replace(_row(one, "", is_best=one is fastest), name=one.trial or str(number), is_named=bool(one.trial))
    if asked.method == "probe":
        yield StageRow(str(len(probes) + 1), "runs", asked.knobs, since_s=_now_s(run))


def _now_s(run: History) -> float:
    """Returns the moment of the last record."""
    return run.events[-1].at_s if run.events else 0.0


def _trials(run: History, objective: str) -> Iterator[StageRow]:
    best, speeds = _best(run), Speeds(probed(run.probes, run.table), run.table)
    known = [trial for trial in run.trials.values() if trial.starts or trial.ends]
    kept = {best, *(trial.id for trial in [*run.unfinished, *known[-MAX_ROWS:]])}
    for trial in known:
        if trial.id not in kept:
            continue
        if trial.end is None or (trial.starts and trial.end.seq < trial.starts[-1].seq):
            yield _running(trial, objective, speeds)
        else:
            yield _row(trial_view(trial, trial.end, [objective]), objective, is_best=trial.id == best)


def _running(trial: Trial, objective: str, speeds: Speeds) -> StageRow:
    """Returns a trial that runs, with what it had at its last rung since it began."""
    start = trial.starts[-1]
    try:
        expected = speeds.of(start.config)
    except ValueError:  # knobs of another version
        expected = None
    if not trial.rungs or trial.rungs[-1].seq < start.seq:
        return StageRow(trial.id, "runs", start.config, expected, since_s=start.at_s)
    seen = trial.rungs[-1]
    speed, value = seen.samples_per_s or expected, seen.values.get(objective)
    return StageRow(trial.id, f"at {seen.samples}", start.config, speed, value, since_s=start.at_s)


def _best(run: History) -> str:
    """Returns the trial that would be picked now, "" if there is none."""
    leads = leader(run)
    return "" if leads is None else leads.trial


def _turns(run: History, config: StudyConfig) -> list[str]:
    """Returns the names of the configurations that take turns in windows: those named, and "best" or several trials."""
    named = measured_beside(config)
    own = [window.name for window in run.windows if run.has_begun("confirm", window)]
    return [*named, *(dict.fromkeys(name for name in own if name not in named) or ["best"])]


def _confirmed(run: History, config: StudyConfig, objective: str, asked: Asked) -> Iterator[StageRow]:
    """Yields the configurations that are measured again: those trained on fresh seeds, and those in windows."""
    trainings = [again for again in run.confirmed if run.has_begun("confirm", again)]
    windows = [window for window in run.windows if run.has_begun("confirm", window)]
    first = _best(run) or "best"
    searched = {one.named or one.trial: one for one in trial_views(run, [objective])}
    configs = {name: one.config for name, one in searched.items()}
    configs |= {record.name: record.config for record in (*trainings, *windows) if record.config}
    again = [record.name for record in trainings]
    if asked.method == "trial":
        trains = next((name for name, knobs in configs.items() if dict(knobs) == dict(asked.knobs)), SYSTEM)
        configs.setdefault(trains, asked.knobs)
        again.append(trains)
    names = dict.fromkeys([first, *again, *(name for name in _turns(run, config) if name != "best")])
    picked = _picked(run) or first
    for name in names:
        labels, known = {name, "best"} if name == picked else {name}, searched.get(name)
        knobs = configs.get(name, config.named.get(name, {}))
        trained = [record for record in trainings if record.name in labels]
        timed = [window for window in windows if window.name in labels]
        values = [value for record in trained if (value := record.values.get(objective)) is not None]
        speeds = [record.samples_per_s for record in timed or trained if record.samples_per_s]
        runs = asked.method in ("trial", "window") and dict(asked.knobs) == dict(knobs)
        doing = "takes its turn" if asked.method == "window" else "trains"
        yield StageRow(
            name,
            doing if runs else measured_again(len(trained), len(timed)),
            knobs,
            statistics.median(speeds) if speeds else None,
            statistics.fmean(values) if values else known.values.get(objective) if known else None,
            max((record.peak_allocated_bytes or 0 for record in trained), default=0) or None,
            since_s=_now_s(run) if runs else None,
            is_best=name == picked,
            is_named=name not in run.trials,
        )


def _picked(run: History) -> str:
    """Returns the name of the pick, "" before there is one; it need not be a trial."""
    if run.pick is None:
        return ""
    return run.pick.best or {"system": SYSTEM, "reference": run.pick.reference}.get(run.pick.kind, "")


# -- why nothing runs --------------------------------------------------------------------------------------------------


def _doing(run: History, config: StudyConfig, stage: str, asked: Asked | None) -> str:
    if asked and asked.method in _ASKED_FOR:
        return _ASKED_FOR[asked.method]
    if stage == "estimate":
        return _ASKED_FOR["footprint"]
    if stage == "search":
        since = max((one.seq for one in run.stages if one.stage == "search"), default=0)
        if not any(start.seq >= since for trial in run.begun for start in trial.starts):
            slots = (run.study.concurrency if run.study else None) or 1
            return f"starting Ray and {slots} workers" if slots > 1 or config.dashboard else "proposing the first trial"
        return "proposing the next trial"
    if stage == "confirm":
        return "choosing what is measured again"
    return "writing best.yaml and the report" if stage == "export" else ""
