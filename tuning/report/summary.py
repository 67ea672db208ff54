"""What a run found, as one value computed from its records: terminal, report and export print it and compute nothing.

Pure, so a run that is still going, was cut off or was recorded long ago is summed up by the same code.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

from trainables.knobs import KnobTable, table, using
from tuning.config.lenient import finite, mapping, numbers, whole
from tuning.config.schema import BEFORE, PLAIN
from tuning.journal import timeline
from tuning.journal.records import Record, is_finished, last_fields, reopened, table_of, trained_beside
from tuning.journal.timeline import Times
from tuning.report.answers import AnswerView, answers
from tuning.report.named import PICKS, Confirming, Named, gains, judged, named_of
from tuning.report.trial_views import SPEED, TrialView, learning_curves, trial_views, view
from tuning.search import ablation, selection
from tuning.search.ablation import AblationResult
from tuning.search.race import PRIOR_DEGREES
from tuning.search.rule import Baseline, best_baseline
from tuning.stats.uncertainty import Gain, Spread

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
    options: Mapping[str, Any]
    horizon_samples: int | None
    study: Mapping[str, Any]
    place: Place
    objectives: Mapping[str, str]
    baselines: Mapping[str, Mapping[str, float]]
    trials: tuple[TrialView, ...]
    probes: tuple[TrialView, ...]
    trial_counts: Mapping[str, int]
    probe_counts: Mapping[str, int]
    curves: Mapping[str, tuple[tuple[int, float], ...]]
    """Of each trial: (samples seen, value of the first objective), at its rungs and its end."""
    refused: tuple[TrialView, ...]
    """What was not launched, with the peak that was predicted for it."""
    named: Mapping[str, Named]
    answers: Mapping[str, AnswerView]
    """What there is to choose from, the pick first, by the names of `PICKS`."""
    confirmed: tuple[Named, ...]
    """The trials that were trained again on fresh seeds, the fastest first."""
    gains: tuple[Gain, ...]
    ablation: tuple[AblationResult, ...]
    rule: str
    times: Times
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """Those of the notes that say that something is likely wrong."""
    stop_reason: str
    is_finished: bool
    """Nothing more is measured: the run has come to its export."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The system knobs that were found to change what is learned, each with the reason in words."""
    table: KnobTable = field(default_factory=table)
    """The knobs of its workload, which may be another than that in use."""
    nodes: tuple[Mapping[str, Any], ...] = ()
    """The nodes of a cluster as they were checked, in each session anew."""
    reference_name: str = ""
    """Of what is trained today, as the pick or the search's first trial says; "" if neither does."""
    provisional: bool = False
    """Whether the best is what is known so far: the run ended, or is, before its pick was trained again."""
    sets_its_seed: bool = False
    """Whether trainings on fresh seeds had the search's, as a loop of one's own sets it."""
    beside: int = 0
    """How many trials that ended are of configurations that the space lacks."""

    @property
    def best(self) -> Named | None:
        """The picked configuration; before the pick the best so far, None where nothing is known."""
        return self.named.get("best")

    @property
    def reference(self) -> Named | None:
        """What gains are measured against: the trained reference, else `before`, else the plain defaults."""
        return _reference(self.named, self.reference_name)

    @property
    def trials_done(self) -> int:
        """The trials of the search that came to some end; what was trained beside it is none of them."""
        return sum(self.trial_counts.values()) - self.beside

    @property
    def trials_asked(self) -> int | None:
        """The trials that were asked for, None where the study does not say."""
        return whole(mapping(mapping(self.study.get("config")).get("search")).get("trials"))

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
        """Returns whether the workload reads the knob: a loop of one's own reads what it asks for, and batch sizes."""
        asked = self.study.get("asked")
        return not isinstance(asked, list) or knob in (*asked, "batch_size", "micro_batch_size")

    def given(self) -> tuple[Named, ...]:
        """Returns the configurations that were named by hand, in the order in which they were measured."""
        return tuple(n for n in self.named.values() if n.name not in PICKS)

    def others_trained_again(self) -> tuple[Named, ...]:
        """Returns the trials that were trained on the same fresh seeds and are no answer, the fastest first."""
        chosen = {self.named[name].trial for name in self.answers}
        return tuple(one for one in self.confirmed if one.name not in chosen)


def _reference(named: Mapping[str, Named], name: str) -> Named | None:
    return named.get(name) or named.get(BEFORE) or named.get(PLAIN)


def _spread(pick: Mapping[str, Any]) -> Spread | None:
    deviation, degrees = finite(pick.get("spread")), whole(pick.get("spread_degrees"))
    return None if not deviation else Spread(deviation, degrees or PRIOR_DEGREES)


def of_its_knobs(shown: _Function) -> _Function:
    """Returns the function of a summary as one that works with the knobs of the summary's own workload in use."""

    @functools.wraps(shown)
    def called(found: Summary, *args: Any, **kwargs: Any) -> Any:
        with using(found.table):
            return shown(found, *args, **kwargs)

    return cast(_Function, called)


def from_records(records: Sequence[Record]) -> Summary:
    """Returns the summary of a run, whole or cut off at any record; empty records give an empty summary."""
    with using(table_of(records)):
        return _from_records(records)


def _from_records(records: Sequence[Record]) -> Summary:
    # An ablation is made later, and no part of the run's time; its windows are of other turns.
    end = next((n for n, r in enumerate(records) if r.event == "ablation"), len(records))
    records, ablated = records[:end], records[end:]
    timed = [r for r in records if not _is_of_writing(r)]
    study, pick = last_fields(records, "study"), last_fields(records, "pick")
    provisional = not pick
    if provisional and (so_far := selection.so_far(records)):
        pick = asdict(so_far)
    config, place = mapping(study.get("config")), _place(study)
    workload = mapping(config.get("workload"))
    objectives = {k: str(v) for k, v in mapping(study.get("objectives")).items() if k != SPEED}
    front = [*pick["front"]] if isinstance(pick.get("front"), list | tuple) else []
    trials = tuple(replace(t, on_front=t.trial in front) for t in trial_views(records, objectives))
    probes = tuple(view(r, objectives, "name") for r in records if r.event == "probe")
    not_run = [r for r in records if r.event == "refused"]
    refused = Counter(str(r.get("stage")) for r in not_run)
    confirming = Confirming(records, objectives, whole(study.get("val_samples")))
    cap_bytes = place.cap_bytes or (place.memory_bytes if place.type == "cuda" else None)
    asked = study["asked"] if isinstance(study.get("asked"), list) else None
    named = judged(records, named_of(confirming, pick, trials, probes), probes, cap_bytes, asked)
    names = {r.get("name") for r in records if r.event == "confirmed"}
    confirmed = [confirming.named(t.trial, t) for t in trials if t.trial in names]
    best = named.get("best")
    reference_name = str(pick.get("reference") or selection.reference_name(records))
    reference = _reference(named, reference_name)
    found_gains = gains(confirming, named, reference.name if reference else "")
    objective = next(iter(objectives.items()), ("", ""))
    resumed = [str(r["command"]) for r in records if r.event == "resume" and r.get("command")]
    study = {**study, "command": " && ".join([str(study.get("command", "")), *resumed])}
    return Summary(
        id=str(study.get("id", "")),
        workload=str(study.get("workload", "")),
        ref=str(workload.get("ref") or study.get("workload", "")),
        options=mapping(workload.get("options")),
        horizon_samples=whole(study.get("horizon_samples")),
        study=study,
        place=place,
        objectives=objectives,
        baselines={str(k): numbers(v) for k, v in mapping(study.get("baselines")).items()},
        trials=trials,
        probes=probes,
        trial_counts=_counts(trials, refused["search"], _lost(records)),
        probe_counts=_counts(probes, refused["probe"], 0),
        curves=learning_curves(records, objective[0]),
        refused=tuple(
            replace(view(r, {}, "trial"), outcome="refused", peak_allocated_bytes=whole(r.get("predicted_bytes")))
            for r in not_run
        ),
        named=named,
        confirmed=tuple(sorted(confirmed, key=lambda one: -(one.samples_per_s or 0.0))),
        answers=answers(named, reference, found_gains, objective, _spread(pick)),
        gains=found_gains,
        ablation=ablation.results(ablated, dict(best.config) if best else None),
        rule=str(pick.get("rule", "")),
        times=timeline.times(timed),
        notes=tuple(dict.fromkeys(_notes(records))),
        warnings=_warnings(records),
        nodes=tuple(r.fields for r in records if r.event == "node"),
        stop_reason=str(last_fields(records, "stop").get("reason", "")),
        is_finished=is_finished(records)
        or any(r.get("stage") == "export" for r in reopened(records) if r.event == "stage"),
        kinds=kinds_of(records),
        table=table(),
        reference_name=reference_name,
        provisional=provisional and "best" in named,
        sets_its_seed=selection.sets_its_seed(records),
        beside=sum(t.trial in trained_beside(records) for t in trials),
    )


def _is_of_writing(record: Record) -> bool:
    """Returns whether a record comes after the page was written: one with its own time could never be."""
    return record.event == "stop" or (record.get("stage"), record.get("state")) == ("export", "end")


def kinds_of(records: Sequence[Record]) -> dict[str, str]:
    """Returns the system knobs that the study found to change what is learned, each with the reason in words."""
    return {str(knob): str(why) for knob, why in mapping(last_fields(records, "kinds").get("changed")).items()}


def _lost(records: Sequence[Record]) -> int:
    """Trials that began and have no end, of a run that is over."""
    if not any(r.event in ("pick", "stop") for r in records):
        return 0
    started = {str(r.get("trial", "")) for r in records if r.event == "trial_start"}
    return len(started - {str(r.get("trial", "")) for r in records if r.event == "trial"})


def _warnings(records: Sequence[Record]) -> tuple[str, ...]:
    """Returns the last note of each subject that warns, without those that are not so any more."""
    notes = set(_notes(records))
    latest = {str(r["warns"]): str(r["text"]) for r in records if r.event == "note" and r.get("warns")}
    if not any(r.get("warns") == "few" for r in reopened(records, "search")):
        latest.pop("few", None)
    if any(r.event == "trial_start" and r.get("named") == BEFORE for r in records):
        latest.pop(BEFORE, None)
    return tuple(text for text in latest.values() if text in notes)


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """Yields what was noted, without what is of a pick that another has replaced since."""
    since, of_a_pick = reopened(records), False
    for record in records:
        if record.event in ("stage", "resume"):
            of_a_pick = record.get("stage") in ("confirm", "export")
        elif record.event == "note" and not (of_a_pick and record.seq < since[0].seq):
            yield str(record.get("text", ""))


def _counts(views: Sequence[TrialView], refused: int, lost: int) -> dict[str, int]:
    """Outcomes with how many had each: the usual ones first, even at 0, then what else happened."""
    counts = Counter({"ok": 0, "stopped": 0, "oom": 0, "refused": refused})
    counts.update(one.outcome for one in views)
    return {**counts, "lost": lost}


def _place(study: Mapping[str, Any]) -> Place:
    device, card = mapping(study.get("device")), mapping(study.get("card"))
    return Place(
        device=str(device.get("name") or "unknown device"),
        type=str(device.get("type", "")),
        cores=whole(device.get("cores")),
        threads=whole(device.get("threads")),
        memory_bytes=whole(device.get("memory_bytes")),
        card=str(card.get("name", "")),
        cap_bytes=whole(card.get("cap_bytes")),
        virtual=bool(card.get("virtual", False)),
        target=str(study.get("target") or ""),
        devices_per_trial=whole(mapping(study.get("config")).get("devices_per_trial")) or 1,
    )
