"""How far a study is, as one value: a function of its records, its configuration and the clock. No terminal."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.schema import StudyConfig
from tuning.journal.events import Config, MeasuredRecord
from tuning.journal.run import History
from tuning.report import summary
from tuning.report.format import duration, unlike
from tuning.report.trial_views import SPEED
from tuning.search import side_by_side
from tuning.search.bottleneck import card_words
from tuning.search.race import LEAST_SEEDS, SYSTEM
from tuning.search.selection import fastest_probe, leader
from tuning.search.timeplan import TimePlan
from tuning.search.timeplan import planned as plan_of
from tuning.workers.worker import Asked

STARTING = "start"
"""The name of the time before the first stage."""
STAGES = {
    "estimate": "",
    "probe": "; each line has what differs from the best probe so far",
    "search": "; each line has what differs from the best trial so far, at first the reference",
    "confirm": "; the candidates and the reference are trained again on new seeds",
    "export": "",
}
"""The stages of a run in order, and what is said as each begins."""
MOST_RUNNING = 8
"""So many trials that run are named."""
LATEST = 100
"""Records among which is looked for the last that tells how the card was doing."""
UNITS = {"probe": "probe", "search": "trial"}
"""The unit that is counted in a stage."""
_ASKED_FOR = {
    "import": "a process imports the workload's file",
    "load": "a process loads torch, data and model",
    "describe": "reading data and model, and trying each hook of the workload",
    "kinds": "comparing a step with and without each system knob",
    "footprint": "measuring what a step takes of memory",
}
_MEASURES = {"probe": "timing", "trial": "training", "window": "alternating timing"}


@dataclass(frozen=True)
class BestSoFar:
    """The trial that is or would be picked; the fastest probe before any trial has ended."""

    name: str
    config: Config
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """Stage `number` of `stages`, the best so far, what goes on, and the time in seconds.

    `done` of `planned` (None if nobody can say) are counted in `UNITS`. `ends_at_s` is when the study is expected to
    end, None while that is not known; `allowed_s` is search.max_time. `faster` is how many times as fast as `reference`
    the best is, None if it is that itself, or nobody knows. `card` says how the card was doing at the last measurement
    or training.
    """

    stage: str
    number: int
    stages: int
    used_s: float
    best: BestSoFar | None = None
    done: int = 0
    planned: int | None = None
    doing: str = ""
    allowed_s: float | None = None
    ends_at_s: float | None = None
    faster: float | None = None
    reference: str = ""
    card: str = ""
    table: KnobTable = field(default_factory=lambda: EVERY)
    """The knobs of the study."""


def progress(run: History, config: StudyConfig, used_s: float, asked: Asked | None = None, doing: str = "") -> Progress:
    """Returns how far a study is after `used_s` seconds.

    `asked` is what the measuring process is at; `doing` what goes on if the records do not tell.
    """
    stage, best = run.stage or STARTING, best_of(run)
    done, planned = counted(run, config)
    probed = {probe.name for probe in run.probes}
    reference = run.reference_name or next((name for name in (BEFORE, PLAIN) if name in probed), "")
    latest = itertools.islice(reversed(run.events), LATEST)
    return Progress(
        stage=stage,
        number=list(STAGES).index(stage) + 1 if stage in STAGES else 0,
        stages=len(STAGES),
        used_s=used_s,
        best=best,
        done=done,
        planned=planned,
        doing=_doing(run, config, stage, asked or Asked(), best, used_s) or doing,
        allowed_s=config.search.max_time_s,
        ends_at_s=ends_at_s(run, config, used_s),
        faster=_faster(reference, best, run, stage),
        reference=reference,
        card=next((w for e in latest if isinstance(e, MeasuredRecord) and (w := card_words(e.telemetry))), ""),
        table=run.table,
    )


def objective_of(run: History) -> str:
    """Returns the quality that the study is about, "" before that is known."""
    return next((name for name in (run.study.objectives if run.study else ()) if name != SPEED), "")


def best_of(run: History) -> BestSoFar | None:
    """Returns the pick once it is confirmed, before that what would be picked now; None if nothing has ended well."""
    if run.stage in ("confirm", "export") and (pick := run.pick) is not None:
        name = pick.best or {"system": SYSTEM, "reference": pick.reference}.get(pick.kind, "")
        trial = run.trials.get(pick.best)
        return BestSoFar(name, pick.config, trial.end.samples_per_s if trial is not None and trial.end else None)
    if (leads := leader(run)) is not None:
        return BestSoFar(leads.trial, leads.config, leads.samples_per_s)
    timed = [probe for probe in run.probes if probe.samples_per_s and probe.outcome == "ok"]
    fastest = max(timed, key=lambda probe: probe.samples_per_s or 0.0, default=None)
    if (probe := fastest if run.stage == "probe" else fastest_probe(run)) is None:
        return None
    number = next((str(n) for n, one in enumerate(run.probes, start=1) if one.seq == probe.seq), "")
    return BestSoFar(probe.name or f"probe {number}", probe.config, probe.samples_per_s)


def _faster(name: str, best: BestSoFar | None, run: History, stage: str) -> float | None:
    """Returns how many times as fast as the reference of that name the best is; None if nobody knows.

    At the end that is the gain of the summary, which takes a core from what is timed. Before it is that of trainings on
    the same seeds, else of judged speeds. While trials run it is that of a trial: the fastest probe may learn less.
    """
    if stage == "search" and leader(run) is None:
        return None
    probe = next((probe for probe in reversed(run.probes) if probe.name == name), None)
    if not name or best is None or (probe is not None and not unlike(best.config, probe.config, run.table)):
        return None
    if stage == "export" and (gain := summary.of_run(run).gain("best", name)) is not None:
        return gain.ratio
    if probe is not None and (trained := side_by_side.gain(run, "", "", best.config, probe.config)) is not None:
        return trained.ratio
    return best.samples_per_s / probe.samples_per_s if probe and probe.samples_per_s and best.samples_per_s else None


def counted(run: History, config: StudyConfig) -> tuple[int, int | None]:
    """Returns how many probes or trials of the stage are done, and of how many, None if nobody can say."""
    if run.stage == "search":
        return sum(t.last is not None and not t.is_beside for t in run.trials.values()), config.search.most_trials
    return len(run.probes) if run.stage == "probe" else 0, None  # confirming goes on until the pick is settled


def _doing(run: History, config: StudyConfig, stage: str, asked: Asked, best: BestSoFar | None, used_s: float) -> str:
    """Returns what runs, and why if nothing does; "" if the records do not tell."""
    if stage == "search" and (running := list(_running(run, used_s))):
        more = f" and {len(running) - MOST_RUNNING} more" * (len(running) > MOST_RUNNING)
        return f"training {', '.join(running[:MOST_RUNNING])}{more}"
    if asked.method in _MEASURES:
        knobs = " ".join(unlike(asked.knobs, best.config if best else {}, run.table))
        return f"{_MEASURES[asked.method]} {knobs or 'the best so far'}"
    if asked.method in _ASKED_FOR:
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


def _running(run: History, used_s: float) -> Iterator[str]:
    """Yields each trial that runs, with its last rung since it began, and for how long it has run."""
    for trial in run.unfinished:
        start = trial.starts[-1]
        if trial.end is None or trial.end.seq < start.seq:
            is_at = trial.rungs and trial.rungs[-1].seq > start.seq
            at = f" at {trial.rungs[-1].samples}" if is_at else ""
            yield f"{trial.id}{at} for {duration(round(max(0.0, used_s - start.at_s)))}"


# -- when it will have ended -------------------------------------------------------------------------------------------


def ends_at_s(run: History, config: StudyConfig, used_s: float) -> float | None:
    """Returns when the study will have ended, in seconds of the run of which `used_s` are over.

    At the most it is search.max_time, as long as that is not over. None while nothing is known: neither a limit, nor
    the speed of a probe or trial.
    """
    plan = plan_of(run, config, None if run.study is None else run.study.horizon_samples)
    if not run.stages or (not plan.training_s and config.search.trials != 0):
        return config.search.max_time_s
    stage, spent_s, left_s = run.stage, used_s - run.stages[-1].at_s, 0.0
    if stage in ("estimate", "probe"):
        left_s = max(0.0, plan.probes_s - (spent_s if stage == "probe" else 0.0))
    if stage in ("estimate", "probe", "search"):
        if config.search.trials == 0:
            left_s += plan.rounds * plan.round_s
        elif not run.begun and plan.training_s > plan.limit_s - used_s - left_s - plan.least_rounds_s:
            left_s += plan.least_rounds_s  # nothing can be trained in the time
        else:
            left_s += plan.confirm_s + _search_left_s(run, plan, spent_s if stage == "search" else 0.0)
    if stage == "confirm":
        left_s = max(0.0, min(_confirm_left_s(run, plan), plan.share_s - spent_s))
    return used_s + left_s if used_s > plan.limit_s else min(used_s + left_s, plan.limit_s)


def _search_left_s(run: History, plan: TimePlan, spent_s: float) -> float:
    """Returns what the trials that are left take in their slots, by the mean of those that ended."""
    left = max(0, plan.trials - len(run.searched))
    took = [end.setup_s + end.train_s + end.evaluate_s for trial in run.trials.values() for end in trial.ends]
    if took:
        return statistics.fmean(took) * left / plan.slots
    return max(0.0, plan.training_s * left / plan.slots - spent_s)


def _confirm_left_s(run: History, plan: TimePlan) -> float:
    """Returns what is left of confirming: trainings as long as those so far, then windows as long as those so far."""
    windows_s = [window.wall_s for window in run.windows if run.has_begun("confirm", window)]
    took = [again.setup_s + again.train_s + again.evaluate_s or plan.training_s for again in run.confirmed]
    missing = 0 if windows_s or not plan.training_s else max(0, 2 * LEAST_SEEDS - len(took))
    each_s = (any(windows_s) and statistics.fmean(windows_s)) or plan.round_s / plan.turns
    windows = max(0, plan.rounds * plan.turns - len(windows_s))
    return (statistics.fmean(took) if took else plan.training_s) * missing + each_s * windows
