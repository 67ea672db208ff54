"""The findings of a run, one value computed from its records: terminal, report and export print it and compute nothing.

Pure, so a run that is still going, was cut off or was recorded long ago is summed up by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from trainables.knobs import KnobTable, Options
from trainables.our_knobs import EVERY
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.lenient import mapping, whole
from tuning.journal import events, timeline
from tuning.journal.format import Record
from tuning.journal.run import History
from tuning.journal.timeline import Times
from tuning.report.answers import AnswerView, answers
from tuning.report.named import PICKS, Confirming, Named, at_one_pace, gains, judged, named_of
from tuning.report.trial_views import SPEED, TrialView, trial_views, view
from tuning.search import ablation, selection
from tuning.search.ablation import AblationResult
from tuning.search.race import PRIOR_DEGREES
from tuning.search.rule import Baseline, best_baseline
from tuning.search.slowing import Slowing, slowing
from tuning.stats.uncertainty import Gain, Spread

_NOTHING = Record(-1, "", "", {})


@dataclass(frozen=True)
class Place:
    """The device everything was measured on, and the card it was measured for.

    `virtual` is True where the card was emulated: memory was held to `cap_bytes`, and speed is the device's own.
    `target` names its kind among those of a cluster, "" without one. So many `devices_per_trial` trained together.
    """

    device: str = "unknown device"
    type: str = ""
    cores: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    card: str = ""
    cap_bytes: int | None = None
    virtual: bool = False
    target: str = ""
    devices_per_trial: int = 1


@dataclass(frozen=True)
class Summary:
    """Everything there is to say about a run; figures in the units of the records (seconds, bytes, fractions)."""

    id: str
    workload: str
    ref: str
    options: Options
    horizon_samples: int | None
    study: events.StudyRecord
    place: Place
    objectives: Mapping[str, str]
    baselines: Mapping[str, Mapping[str, float]]
    trials: tuple[TrialView, ...]
    probes: tuple[TrialView, ...]
    trial_counts: Mapping[str, int]
    probe_counts: Mapping[str, int]
    curves: Mapping[str, tuple[tuple[int, float], ...]]
    """By trial: (samples seen, value of the first objective), at its rungs and its end."""
    named: Mapping[str, Named]
    answers: Mapping[str, AnswerView]
    """The answers to choose from, the pick first, by the names of `PICKS`."""
    confirmed: tuple[Named, ...]
    """The trials that were trained again on fresh seeds, the fastest first."""
    gains: tuple[Gain, ...]
    ablation: tuple[AblationResult, ...]
    rule: str
    times: Times
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """Notes that say that something is likely wrong."""
    stop_reason: str
    is_finished: bool
    """Nothing more is measured: the run has come to its export."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The system knobs that were found to change what is learned, each with the reason in words."""
    table: KnobTable = field(default_factory=lambda: EVERY)
    """The knobs of its workload."""
    nodes: tuple[events.NodeRecord, ...] = ()
    """The nodes of a cluster as they were checked, in each session anew."""
    reference_name: str = ""
    """The name of the reference, by the pick or the search's first trial; "" if neither has it."""
    provisional: bool = False
    """Whether the best is what is known so far: the run ended, or is, before its pick was trained again."""
    sets_its_seed: bool = False
    """Whether trainings on fresh seeds had the search's, as a custom loop sets it."""
    slowing: Slowing | None = None
    """A training that slows down on its way, as most do; None if they do not."""
    beside: int = 0
    """How many trials that ended are of configurations that the space lacks."""

    @property
    def best(self) -> Named | None:
        """The picked configuration; before the pick the best so far, None where nothing is known."""
        return self.named.get("best")

    @property
    def reference(self) -> Named | None:
        """Returns the baseline of gains: the trained reference, else `before`, else the plain defaults."""
        return _reference(self.named, self.reference_name)

    @property
    def trials_done(self) -> int:
        """The trials of the search that came to some end; what was trained beside it is none of them."""
        return sum(self.trial_counts.values()) - self.beside

    @property
    def trials_asked(self) -> int | None:
        """The trials that were asked for, None where the study does not say."""
        return whole(self.study.setting("search", "trials"))

    @property
    def objective(self) -> str:
        """The workload's first objective, "" where the study names none."""
        return next(iter(self.objectives), "")

    @property
    def baseline(self) -> Baseline | None:
        """The best of the workload's baselines by that objective; None where it states none."""
        return best_baseline(self.baselines, self.objective, self.objectives.get(self.objective, ""))

    def gain(self, of: str, over: str) -> Gain | None:
        """Returns the gain of one named configuration over another, None where either was not measured."""
        return next((g for g in self.gains if (g.of, g.over) == (of, over)), None)

    def asks_for(self, knob: str) -> bool:
        """Returns whether the workload reads the knob: a custom loop reads the knobs it asks for, and batch sizes."""
        asked = self.study.asked
        return asked is None or knob in (*asked, "batch_size", "micro_batch_size")

    def given(self) -> tuple[Named, ...]:
        """Returns the configurations that were named by hand, in the order in which they were measured."""
        return tuple(n for n in self.named.values() if n.name not in PICKS)

    def others_trained_again(self) -> tuple[Named, ...]:
        """Returns the trials that were trained on the same fresh seeds and are no answer, the fastest first."""
        chosen = {self.named[name].trial for name in self.answers}
        return tuple(one for one in self.confirmed if one.name not in chosen)


def _reference(named: Mapping[str, Named], name: str) -> Named | None:
    return named.get(name) or named.get(BEFORE) or named.get(PLAIN)


def _spread(pick: events.PickRecord) -> Spread | None:
    return Spread(pick.spread, pick.spread_degrees or PRIOR_DEGREES) if pick.spread else None


def of_run(run: History, ablated: History | None = None) -> Summary:
    """Returns the summary of a run, whole or cut off at any record; without records it is empty.

    `ablated` is what `ablate` measured later: it is no part of the run's time.
    """
    study, pick = run.study or events.StudyRecord.read(_NOTHING), run.pick
    provisional = pick is None
    if pick is None:
        so_far = selection.so_far(run)
        pick = events.PickRecord.read(_NOTHING if so_far is None else replace(_NOTHING, fields=asdict(so_far)))
    place, workload = _place(study), mapping(study.setting("workload"))
    objectives = {name: mode for name, mode in study.objectives.items() if name != SPEED}
    trials = tuple(replace(t, on_front=t.trial in pick.front) for t in trial_views(run, objectives))
    probes = tuple(map(view, run.probes))
    refused = Counter(refusal.stage for refusal in run.refused)
    confirming = Confirming(run, objectives, study.val_samples)
    cap_bytes = place.cap_bytes or (place.memory_bytes if place.type == "cuda" else None)
    named = judged(run, named_of(confirming, pick, trials, probes), probes, cap_bytes, study.asked)
    names = {record.name for record in run.confirmed}
    confirmed = [confirming.named(t.trial, t) for t in trials if t.trial in names]
    reference_name = pick.reference or run.reference_name
    reference = _reference(named, reference_name)
    found_gains = gains(confirming, named, reference.name if reference else "")
    named = at_one_pace(confirming, named, reference.name if reference else "", found_gains)
    best = named.get("best")
    objective = next(iter(objectives.items()), ("", ""))
    commands = [study.command, *(resume.command for resume in run.resumes if resume.command)]
    return Summary(
        id=study.id,
        workload=study.workload,
        ref=str(workload.get("ref") or study.workload),
        options=mapping(workload.get("options")),
        horizon_samples=study.horizon_samples,
        study=replace(study, command=" && ".join(commands)),
        place=place,
        objectives=objectives,
        baselines=study.baselines,
        trials=trials,
        probes=probes,
        trial_counts=_counts(trials, refused["search"], _lost(run)),
        probe_counts=_counts(probes, refused["probe"], 0),
        curves={trial.id: curve for trial in run.trials.values() if (curve := trial.curve(objective[0]))},
        named=named,
        confirmed=tuple(sorted(confirmed, key=lambda one: -(one.samples_per_s or 0.0))),
        answers=answers(named, reference, found_gains, objective, _spread(pick)),
        gains=found_gains,
        ablation=ablation.results(ablated or History(), dict(best.config) if best else None),
        rule=pick.rule,
        times=timeline.times([event for event in run.events if not _is_of_writing(event)]),
        notes=tuple(dict.fromkeys(_notes(run))),
        warnings=_warnings(run),
        nodes=tuple(run.nodes),
        stop_reason="" if run.stop is None else run.stop.reason,
        is_finished=run.is_finished or run.began("export") is not None,
        kinds={} if run.kinds is None else run.kinds.changed,
        table=run.table,
        reference_name=reference_name,
        provisional=provisional and "best" in named,
        sets_its_seed=selection.sets_its_seed(run),
        slowing=slowing(run),
        beside=sum(run.trials[t.trial].is_beside for t in trials),
    )


def _is_of_writing(event: events.Event) -> bool:
    """Returns whether an event comes after the page was written: one with its own time could never be."""
    is_export = isinstance(event, events.StageRecord) and (event.stage, event.state) == ("export", "end")
    return is_export or isinstance(event, events.StopRecord)


def _lost(run: History) -> int:
    """Trials that began and have no end, of a run that is over."""
    return sum(not trial.ends for trial in run.begun) if run.picks or run.stop else 0


def _warnings(run: History) -> tuple[str, ...]:
    """Returns the last note of each subject that warns, without those that are not so any more."""
    notes = set(_notes(run))
    latest = {note.warns: note for note in run.notes if note.warns}
    if "few" in latest and latest["few"].seq < run.since("search"):
        del latest["few"]
    if run.reference_name == BEFORE:
        latest.pop(BEFORE, None)
    return tuple(note.text for note in latest.values() if note.text in notes)


def _notes(run: History) -> Iterator[str]:
    """Yields what was noted, without what is of a pick that another has replaced since."""
    of_a_pick = False
    for event in run.events:
        match event:
            case events.StageRecord():
                of_a_pick = event.stage in ("confirm", "export")
            case events.ResumeRecord():
                of_a_pick = False
            case events.NoteRecord() if not (of_a_pick and event.seq < run.since()):
                yield event.text


def _counts(views: Sequence[TrialView], refused: int, lost: int) -> dict[str, int]:
    """Outcomes with how many had each: the usual ones first, even at 0, then what else happened."""
    counts = Counter({"ok": 0, "stopped": 0, "oom": 0, "refused": refused})
    counts.update(one.outcome for one in views)
    return {**counts, "lost": lost}


def _place(study: events.StudyRecord) -> Place:
    device, card = study.device, study.card
    return Place(
        device=str(device.get("name") or "unknown device"),
        type=str(device.get("type", "")),
        cores=whole(device.get("cores")),
        threads=whole(device.get("threads")),
        memory_bytes=whole(device.get("memory_bytes")),
        card=str(card.get("name", "")),
        cap_bytes=study.cap_bytes,
        virtual=bool(card.get("virtual", False)),
        target=study.target,
        devices_per_trial=whole(study.setting("devices_per_trial")) or 1,
    )
