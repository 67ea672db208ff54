"""How far a study is, as one value: a function of its records, its configuration and the clock. No terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.cli import eta
from tuning.config.lenient import finite, mapping, whole
from tuning.config.schema import BEFORE, PLAIN, StudyConfig
from tuning.journal import timeline
from tuning.journal.records import Record, last_fields, trained_beside
from tuning.report import summary
from tuning.report.format import outcome, unlike
from tuning.report.trial_views import SPEED, TrialView, trial_views, view
from tuning.search.bottleneck import card_words
from tuning.search.race import LEAST_SEEDS, SYSTEM
from tuning.search.selection import leader, reference_name
from tuning.search.throughput import Speeds, probed
from tuning.workers.worker import Asked

STARTING = "start"
"""What comes before the first stage."""
UNITS = {"probe": "probes", "search": "trials", "confirm": "trainings and windows"}
"""What is counted in a stage."""
_ASKED_FOR = {
    "load": "a process loads torch, data and model",
    "describe": "reading data and model, and trying each hook of the workload",
    "kinds": "comparing a step with and without each system knob",
    "footprint": "measuring what a step takes of memory",
}


@dataclass(frozen=True)
class StageRow:
    """A probe, trial or configuration: what became of it, or since when (seconds of the run) it is running."""

    name: str
    state: str
    config: Mapping[str, Any]
    samples_per_s: float | None = None
    value: float | None = None
    peak_bytes: int | None = None
    since_s: float | None = None
    is_best: bool = False


@dataclass(frozen=True)
class Progress:
    """Stage `number` of `stages`, what runs and what ended there (`rows`, as they began), and the time in seconds.

    `done` of `planned` (None where nobody can say) are counted in `UNITS`. `doing` says why nothing runs, "" where
    something does. `ends_at_s` is when the study is expected to end, None while that is not known; `allowed_s` is
    search.max_time. `faster` is how many times as fast as `reference` the best is, None where it is that itself, or
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

    @property
    def best(self) -> StageRow | None:
        """The best so far, None where nothing has ended well."""
        return next((row for row in self.rows if row.is_best), None)


def progress(
    records: Sequence[Record], config: StudyConfig, used_s: float, asked: Asked | None = None, doing: str = ""
) -> Progress:
    """Returns how far a study is after `used_s` seconds.

    `asked` is what the measuring process is at; `doing` what goes on where the records do not tell.
    """
    study, stage, names = last_fields(records, "study"), stage_of(records), stages(config)
    objective = _objective(records)
    rows = tuple(_rows(records, config, stage, objective, asked or Asked()))
    done, planned = counted(records, config, stage)
    probed = {r.get("name") for r in records if r.event == "probe"}
    reference = reference_name(records) or next((n for n in (BEFORE, PLAIN) if n in probed), "")
    return Progress(
        stage=stage,
        number=names.index(stage) + 1 if stage in names else 0,
        stages=len(names),
        used_s=used_s,
        rows=rows,
        done=done,
        planned=planned,
        doing="" if any(row.since_s is not None for row in rows) else _doing(records, config, stage, asked) or doing,
        allowed_s=config.search.max_time_s,
        ends_at_s=eta.ends_at_s(records, config, used_s),
        objective=objective,
        cap_bytes=whole(mapping(study.get("card")).get("cap_bytes")),
        faster=_faster(reference, rows, records, stage),
        reference=reference,
        card=next((said for r in reversed(records) if (said := card_words(mapping(r.get("telemetry"))))), ""),
    )


@dataclass(frozen=True)
class Standing:
    """What one line of the log needs of the study: the knobs of the best so far in its stage, and how many are done."""

    stage: str = STARTING
    objective: str = ""
    best: Mapping[str, Any] | None = None
    done: int = 0
    planned: int | None = None


def standing(records: Sequence[Record], config: StudyConfig) -> Standing:
    """Returns what a line of the log needs, without the table of every trial that `progress` makes."""
    stage, objective = stage_of(records), _objective(records)
    if stage == "search":
        leads = leader(records)
        best = None if leads is None else leads.config
    else:
        rows = _rows(records, config, stage, objective, Asked())
        best = next((row.config for row in rows if row.is_best), None)
    return Standing(stage, objective, best, *counted(records, config, stage))


def _objective(records: Sequence[Record]) -> str:
    return next((name for name in mapping(last_fields(records, "study").get("objectives")) if name != SPEED), "")


def _is_best(name: str, rows: Sequence[StageRow], records: Sequence[Record]) -> bool:
    """Returns whether the best of a stage is the named configuration itself."""
    own = [mapping(r["config"]) for r in records if r.event == "probe" and r["name"] == name]
    return any(row.is_best and own and not unlike(row.config, own[-1]) for row in rows)


def _faster(name: str, rows: Sequence[StageRow], records: Sequence[Record], stage: str) -> float | None:
    """Returns how many times as fast as the named one the best of a stage is; None where nobody knows.

    In the end that is the gain of the summary, which takes a core from what is timed: before, of windows, trainings or
    a probe.
    """
    if not name or _is_best(name, rows, records):
        return None
    own = [finite(r.get(SPEED)) for r in records if r.event == "probe" and r["name"] == name]
    theirs = own[-1] if own else None
    if stage == "export" and (gain := summary.from_records(records).gain("best", name)) is not None:
        return gain.ratio
    if stage in ("confirm", "export"):
        theirs = next((row.samples_per_s for row in rows if row.name == name), None)
    ours = next((row.samples_per_s for row in rows if row.is_best), None)
    return ours / theirs if ours and theirs else None


def stages(config: StudyConfig) -> tuple[str, ...]:
    """Returns the stages of a study in order."""
    found = ("estimate", "probe", "search", "confirm", "export")
    return found if config.search.strategy == "staged" else tuple(name for name in found if name != "probe")


def stage_of(records: Sequence[Record]) -> str:
    """Returns the stage that has begun last, `STARTING` where none has."""
    return next((str(r["stage"]) for r in reversed(records) if r.event == "stage"), STARTING)


def counted(records: Sequence[Record], config: StudyConfig, stage: str) -> tuple[int, int | None]:
    """Returns how many probes, trials or measurements of the stage are done, and of how many, None where unknown."""
    if stage == "probe":
        return sum(r.event == "probe" for r in records), None
    if stage == "search":
        ended = {str(r["trial"]) for r in records if r.event in ("trial", "refused") and r.get("trial")}
        return len(ended - trained_beside(records)), config.search.most_trials
    if stage != "confirm":
        return 0, None
    budget = config.budget.confirm
    windows = budget.windows * len(eta.turns(records, config))
    done = sum(r.event == "window" for r in records[eta.began(records, "confirm") :])
    trained = sum(r.event == "confirmed" for r in records)  # those of an earlier session are not trained again
    return done + trained, max(done + trained, max(trained, 2 * LEAST_SEEDS) + windows)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(
    records: Sequence[Record], config: StudyConfig, stage: str, objective: str, asked: Asked
) -> Iterator[StageRow]:
    if stage == "probe":
        yield from _probes(records, asked)
    elif stage == "search":
        yield from _trials(records, config, objective)
    elif stage in ("confirm", "export"):
        yield from _confirmed(records, config, objective, asked)


def _probes(records: Sequence[Record], asked: Asked) -> Iterator[StageRow]:
    found = [r for r in records if r.event == "probe"]
    views = [view(r, {}, "name") for r in found]
    fastest = max((v for v in views if v.samples_per_s), key=lambda v: v.samples_per_s or 0.0, default=None)
    for number, own in enumerate(views, start=1):
        state = "" if own.outcome == "ok" else outcome(own.outcome)
        name, peak_bytes = own.trial or str(number), own.peak_allocated_bytes
        yield StageRow(name, state, own.config, own.samples_per_s, None, peak_bytes, is_best=own is fastest)
    if asked.method == "probe":
        placed = timeline.moments(records)
        yield StageRow(str(len(found) + 1), "runs", asked.knobs, since_s=placed[-1][1] if placed else 0.0)


def _trials(records: Sequence[Record], config: StudyConfig, objective: str) -> Iterator[StageRow]:
    ended = {one.trial: one for one in trial_views(records, {objective: ""})}
    rungs = {r["trial"]: r for r in records if r.event == "rung"}
    begun = {r["trial"]: (r, at) for r, at in timeline.moments(records) if r.event == "trial_start"}
    latest = {r["trial"]: r.seq for r in records if r.event == "trial"}
    best, speeds = _best(records), Speeds(probed(records))
    for trial in dict.fromkeys([*begun, *ended]):
        start, at = begun.get(trial, (None, 0.0))
        runs = start is not None and start.seq > latest.get(trial, -1)
        if runs and start is not None:
            rung = rungs.get(trial)
            seen = rung if rung is not None and rung.seq > start.seq else None
            value = None if seen is None else finite(mapping(seen["values"]).get(objective))
            speed = None if seen is None else finite(seen.get(SPEED))
            state = "runs" if seen is None else f"at {seen['samples']}"
            speed = speed or _expected(speeds, mapping(start["config"]))
            yield StageRow(trial, state, mapping(start["config"]), speed, value, since_s=at)
        else:
            yield _of_trial(ended[trial], objective, is_best=trial == best)


def _expected(speeds: Speeds, config: Mapping[str, Any]) -> float | None:
    """Returns what a probe found for these knobs; None where nobody probed them, or they are of another version."""
    try:
        return speeds.of(config)
    except ValueError:
        return None


def _of_trial(own: TrialView, objective: str, *, is_best: bool) -> StageRow:
    state = f"stopped at {own.stopped_at}" if own.stopped_at is not None else outcome(own.outcome)
    trained = own.outcome in ("ok", "stopped")  # of one that failed the speed is only what was expected
    speed = own.samples_per_s if trained else None
    return StageRow(
        own.trial, state, own.config, speed, own.values.get(objective), own.peak_allocated_bytes, is_best=is_best
    )


def _best(records: Sequence[Record]) -> str:
    """Returns the trial that would be picked now, "" where there is none."""
    leads = leader(records)
    return "" if leads is None else leads.id


def _confirmed(records: Sequence[Record], config: StudyConfig, objective: str, asked: Asked) -> Iterator[StageRow]:
    """Yields the configurations that are measured again: those trained on fresh seeds, and those in windows."""
    own = [r for r in records[eta.began(records, "confirm") :] if r.event in ("confirmed", "window")]
    first = _best(records) or "best"
    searched = {t.named or t.trial: t for t in trial_views(records, {objective: ""})}
    configs = {name: own_view.config for name, own_view in searched.items()}
    configs |= {str(r["name"]): mapping(r.get("config")) for r in own if r.get("config")}
    again = [str(r["name"]) for r in own if r.event == "confirmed"]
    if asked.method in ("begin", "advance"):
        trains = next((name for name, knobs in configs.items() if dict(knobs) == dict(asked.knobs)), SYSTEM)
        configs.setdefault(trains, asked.knobs)
        again.append(trains)
    names = dict.fromkeys([first, *again, *(n for n in eta.turns(records, config) if n != "best")])
    now = timeline.moments(records)[-1][1] if records else 0.0
    picked = _picked(records) or first
    for name in names:
        labels, known = {name, "best"} if name == picked else {name}, searched.get(name)
        knobs = configs.get(name, config.named.get(name, {}))
        trained = [r for r in own if r.event == "confirmed" and r["name"] in labels]
        windows = [r for r in own if r.event == "window" and r["name"] in labels]
        values = [v for r in trained if (v := finite(mapping(r["values"]).get(objective))) is not None]
        speeds = [v for r in windows or trained if (v := finite(r.get(SPEED)))]
        parts = [
            f"{len(of)} {word}{'s' * (len(of) > 1)}" for of, word in ((trained, "seed"), (windows, "window")) if of
        ]
        runs = asked.method in ("begin", "advance", "window") and dict(asked.knobs) == dict(knobs)
        yield StageRow(
            name,
            ("trains" if asked.method != "window" else "window") if runs else ", ".join(parts),
            knobs,
            statistics.median(speeds) if speeds else None,
            statistics.fmean(values) if values else known.values.get(objective) if known else None,
            max((whole(r.get("peak_allocated_bytes")) or 0 for r in trained), default=0) or None,
            since_s=now if runs else None,
            is_best=name == picked,
        )


def _picked(records: Sequence[Record]) -> str:
    """Returns the name of the pick, "" before there is one; it need not be a trial."""
    pick = last_fields(records, "pick")
    of_kind = {"system": SYSTEM, "reference": str(pick.get("reference", ""))}
    return str(pick.get("best") or "") or of_kind.get(str(pick.get("kind", "")), "")


# -- why nothing runs --------------------------------------------------------------------------------------------------


def _doing(records: Sequence[Record], config: StudyConfig, stage: str, asked: Asked | None) -> str:
    if asked and asked.method in _ASKED_FOR:
        return _ASKED_FOR[asked.method]
    if stage == "estimate":
        return _ASKED_FOR["footprint"]
    if stage == "search":
        session = max((n for n, r in enumerate(records) if (r.event, r.get("stage")) == ("stage", "search")), default=0)
        if not any(r.event == "trial_start" for r in records[session:]):
            slots = whole(last_fields(records, "study").get("concurrency")) or 1
            return f"starting Ray and {slots} workers" if slots > 1 or config.dashboard else "proposing the first trial"
        return "proposing the next trial"
    if stage == "confirm":
        return "choosing what is measured again"
    return "writing best.yaml and the report" if stage == "export" else ""
