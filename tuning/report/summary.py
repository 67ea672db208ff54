"""What a run found, as one value computed from its records: terminal, report and export print it and compute nothing.

Pure, so a run that is still going, was cut off or was recorded long ago is summed up by the same code.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

from trainables.knobs import KnobTable, table, using
from tuning.config.lenient import finite, mapping, numbers, texts, whole
from tuning.config.schema import BEFORE, PLAIN
from tuning.journal import timeline
from tuning.journal.records import Record, is_finished, table_of
from tuning.journal.timeline import Interval, Times
from tuning.report.ablation_results import AblationResult, ablation_results
from tuning.report.parts import Parts, parts
from tuning.report.trial_views import SPEED, TrialView, learning_curves, trial_views, view
from tuning.search import bottleneck, selection
from tuning.search.bottleneck import Verdict
from tuning.search.rule import Baseline, best_baseline
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Quality, Throughput

_Function = TypeVar("_Function", bound=Callable[..., Any])
PICKS = ("best", "knee", "most_accurate")


@dataclass(frozen=True)
class Place:
    """The device everything was measured on, and the card it was measured for.

    `virtual` is True where the card was emulated: memory was held to `cap_bytes`, and speed is the device's own.
    """

    device: str = "unknown device"
    type: str = ""
    cores: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    card: str = ""
    cap_bytes: int | None = None
    virtual: bool = False


@dataclass(frozen=True)
class Named:
    """One configuration that is spoken of by name: those of `PICKS`, and before, after and the like.

    `trained` is over the confirm stage's whole trainings, `throughput` over its windows, in which configurations took
    turns; each is None where there are none.
    `verdict` is what holds it back, None where no spans were recorded.
    `trial` is "" for a configuration that was given and not found; `outcome` is that of the trial, or of the probe.
    """

    name: str
    trial: str
    outcome: str
    config: Mapping[str, Any]
    trained: Throughput | None
    throughput: Throughput | None
    probed_samples_per_s: float | None
    data_wait_frac: float | None
    quality: Mapping[str, Quality]
    peak_allocated_bytes: int | None
    seed: int | None
    active: Mapping[str, Any] = field(default_factory=dict)
    """What its first optimiser step was seen to run (`trainables.witness`); `search.runtime_check.compare` reads it."""
    verdict: Verdict | None = None

    @property
    def samples_per_s(self) -> float | None:
        """The mean of its trainings, else of its windows, else its probe: what a training is expected to show.

        Windows of 1.5 s came out 5 to 30 % below trainings of 17 s (docs/log/two_cores.md), so trainings go first.
        """
        found = self.trained or self.throughput
        return found.mean if found else self.probed_samples_per_s

    @property
    def beside_others(self) -> float | None:
        """The one speed that a page shows of it: of windows measured in turns, else trainings, else its probe."""
        found = self.throughput or self.trained
        return found.mean if found else self.probed_samples_per_s


@dataclass(frozen=True)
class Claim:
    """What is claimed for `after` over `before`: the whole text, its first "N x" as a number, and where it was seen."""

    text: str
    ratio: float | None
    source: str


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
    confirmed: tuple[Named, ...]
    """What was trained again on fresh seeds to find the best, by its trial's name, the fastest first."""
    gains: tuple[Gain, ...]
    parts: Mapping[str, Parts]
    """Of the best's gain over each configuration that was named by hand, by its name."""
    claim: Claim | None
    ablation: tuple[AblationResult, ...]
    rule: str
    times: Times
    intervals: tuple[Interval, ...]
    notes: tuple[str, ...]
    stop_reason: str
    is_finished: bool
    """Nothing more is measured: the run has come to its export."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The system knobs that were found to change what is learned, each with the reason in words."""
    table: KnobTable = field(default_factory=table)
    """The knobs of its workload, which may be another than that in use."""
    provisional: bool = False
    """Whether the best is what is known so far: the run ended, or is, before its pick was trained again."""

    @property
    def best(self) -> Named | None:
        """The picked configuration; before the pick the best so far, None where nothing is known."""
        return self.named.get("best")

    @property
    def reference(self) -> Named | None:
        """What gains are measured against: the configuration as it was before, else the plain defaults."""
        return self.named.get(BEFORE) or self.named.get(PLAIN)

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

    def speed_of(self, trial: TrialView) -> float | None:
        """Returns the one speed that a page shows of a trial's configuration: as it was measured last (`Named`)."""
        own = [
            one
            for one in (*self.named.values(), *self.confirmed)
            if trial.trial and trial.trial in (one.trial, one.name)
        ]
        return next((one.beside_others for one in own if one.throughput or one.trained), trial.samples_per_s)

    def given(self) -> tuple[Named, ...]:
        """Returns the configurations that were named by hand, in the order in which they were measured."""
        return tuple(n for n in self.named.values() if n.name not in PICKS)

    def alternatives(self) -> tuple[Named, ...]:
        """Returns the knee point and the most accurate, without those that are the best itself or each other."""
        others = [self.named[name] for name in ("knee", "most_accurate") if name in self.named]
        by_trial = {other.trial: other for other in reversed(others)}
        return tuple(o for o in others if by_trial[o.trial] is o and not (self.best and o.trial == self.best.trial))

    def challengers(self) -> tuple[Named, ...]:
        """Returns what was trained on the same fresh seeds as the best and was not picked, the fastest first."""
        return tuple(one for one in self.confirmed if self.best is None or one.name != self.best.trial)


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
    ablated = [r for r in records if r.event in ("ablation", "receipt")]  # made later, and no part of the run's time
    records = [r for r in records if r.event not in ("ablation", "receipt")]
    study, pick = _last(records, "study"), _last(records, "pick")
    provisional = not pick
    if provisional and (so_far := selection.so_far(records)):
        pick = asdict(so_far)
    config, place = mapping(study.get("config")), _place(study)
    workload, given = mapping(config.get("workload")), mapping(config.get("named"))
    objectives = {k: str(v) for k, v in mapping(study.get("objectives")).items() if k != SPEED}
    front = [*pick["front"]] if isinstance(pick.get("front"), list | tuple) else []
    trials = tuple(replace(t, on_front=t.trial in front) for t in trial_views(records, objectives))
    probes = tuple(view(r, objectives, "name") for r in records if r.event == "probe")
    not_run = [r for r in records if r.event == "refused"]
    refused = Counter(str(r.get("stage")) for r in not_run)
    confirming = _Confirming(records, objectives, whole(study.get("val_samples")))
    named = _judged(records, _named(confirming, pick, trials, probes), probes, place)
    names = {r.get("name") for r in records if r.event == "confirmed"}
    confirmed = [confirming.named(t.trial, t) for t in trials if t.trial in names]
    ablation = ablation_results(ablated, texts(given.get("claims_of")))
    best, others = named.get("best"), [n for n in named if n not in PICKS]
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
        curves=learning_curves(records, next(iter(objectives), "")),
        refused=tuple(
            replace(view(r, {}, "trial"), outcome="refused", peak_allocated_bytes=whole(r.get("predicted_bytes")))
            for r in not_run
        ),
        named=named,
        confirmed=tuple(sorted(confirmed, key=lambda one: -(one.samples_per_s or 0.0))),
        gains=_gains(confirming, named),
        parts={n: parts(n, best.config, named[n].config, records, ablation) for n in others if best is not None},
        claim=_claim(given),
        ablation=ablation,
        rule=str(pick.get("rule", "")),
        times=timeline.times(records),
        intervals=tuple(timeline.intervals(records)),
        notes=tuple(str(r.get("text", "")) for r in records if r.event == "note"),
        stop_reason=str(_last(records, "stop").get("reason", "")),
        is_finished=is_finished(records) or any(r.get("stage") == "export" for r in records if r.event == "stage"),
        kinds=kinds_of(records),
        table=table(),
        provisional=provisional and "best" in named,
    )


@dataclass(frozen=True)
class _Confirming:
    """The records of a run, asked for what the confirm stage measured of a configuration."""

    records: Sequence[Record]
    objectives: Mapping[str, str]
    val_samples: int | None

    def named(self, name: str, source: TrialView) -> Named:
        """Returns what is known of the configuration that a trial or a probe ran, called `name`."""
        labels = {name, source.trial} if name in PICKS else {name}
        windows = self.windows(labels, source.config)
        confirmed = [r for r in self.records if r.event == "confirmed" and r.get("name") in labels]
        waits = [x for r in windows if (x := finite(r.get("data_wait_frac"))) is not None]
        peaks = [peak for r in confirmed if (peak := whole(r.get("peak_allocated_bytes")))]
        quality = {name: self._quality(name, confirmed, source) for name in self.objectives}
        return Named(
            name=name,
            trial=source.trial if name in PICKS else "",
            outcome=source.outcome,
            config=source.config,
            trained=uncertainty.throughput([x for r in confirmed if (x := finite(r.get(SPEED)))]),
            throughput=uncertainty.throughput([x for r in windows if (x := finite(r.get(SPEED)))]),
            probed_samples_per_s=source.samples_per_s,
            data_wait_frac=statistics.median(waits) if waits else source.data_wait_frac,
            quality={name: found for name, found in quality.items() if found is not None},
            peak_allocated_bytes=source.peak_allocated_bytes or max(peaks, default=None),
            seed=source.seed,
            active=next((a for r in [*confirmed, *windows] if (a := mapping(r.get("active")))), source.active),
        )

    def windows(self, names: Collection[str], config: Mapping[str, Any]) -> list[Record]:
        """Returns a configuration's windows by name or trial; of the best's only its own: another may have been it."""
        own = [r for r in self.records if r.event == "window" and r.get("name") in names]
        return [r for r in own if r.get("name") not in PICKS or r.get("config", config) == config]

    def by_round(self, one: Named) -> dict[int, float]:
        """Returns the median samples a second of a configuration in each round."""
        rates: dict[int, list[float]] = {}
        for record in self.windows({one.name, one.trial} - {""}, one.config):
            if rate := finite(record.get(SPEED)):
                rates.setdefault(whole(record.get("round")) or 0, []).append(rate)
        return {number: statistics.median(values) for number, values in rates.items()}

    def _quality(self, objective: str, confirmed: Sequence[Record], source: TrialView) -> Quality | None:
        values = [(whole(r.get("seed")) or 0, finite(mapping(r.get("values")).get(objective))) for r in confirmed]
        by_seed = {seed: value for seed, value in values if value is not None}
        share_of = self.val_samples if objective == "accuracy" or objective.endswith("_accuracy") else None
        searched = source.values.get(objective)
        if by_seed or searched is None:
            return uncertainty.quality(by_seed, proportion_of=share_of) if by_seed else None
        return uncertainty.quality({source.seed or 0: searched}, proportion_of=share_of, confirmed=False)


def _named(
    confirming: _Confirming, pick: Mapping[str, Any], trials: Sequence[TrialView], probes: Sequence[TrialView]
) -> dict[str, Named]:
    by_id = {t.trial: t for t in trials}
    sources = {name: by_id[str(pick[name])] for name in PICKS if str(pick.get(name, "")) in by_id}
    if config := mapping(pick.get("config")):  # found by probes alone
        known = [p for p in probes if all(config.get(n) == v for n, v in p.config.items() if n in config)]
        sources["best"] = replace(known[-1], trial="") if known else TrialView("", "ok", config)
        sources["best"] = replace(sources["best"], config=config)
    if not sources and (probe := selection.fastest_probe(confirming.records)) is not None:
        sources["best"] = view(probe, confirming.objectives, "name")
    # A joint search probes nothing: its named configurations are known from their windows alone.
    windowed = [r for r in confirming.records if r.event == "window" and r.get("config")]
    sources |= {r["name"]: TrialView(r["name"], "ok", r["config"]) for r in windowed if r["name"] not in PICKS}
    sources = {name: source for name, source in sources.items() if name not in by_id}
    sources |= {p.trial: p for p in probes if p.trial and p.trial not in PICKS}
    return {name: confirming.named(name, source) for name, source in sources.items()}


def _judged(
    records: Sequence[Record], named: Mapping[str, Named], probes: Sequence[TrialView], place: Place
) -> dict[str, Named]:
    """The configurations with what holds them back: in their last whole training, else window, else trial or probe."""
    cap_bytes = place.cap_bytes or (place.memory_bytes if place.type == "cuda" else None)
    tried = {f"{n}={str(v).lower()}" for p in probes if p.outcome == "ok" for n, v in p.config.items()}
    found = dict(named)
    for name, one in named.items():
        labels = {name, one.trial} - {""}
        own = [r for r in records if r.get("spans") and (r.get("name") in labels or r.get("trial") in labels)]
        own = [r for r in own if r.event != "trial" or r.get("config") == one.config]  # else it was rated anew
        source = max(own, key=lambda r: (r.event == "confirmed", r.event == "window", r.seq), default=None)
        if source is not None:
            peak = one.peak_allocated_bytes
            memory_frac = peak / cap_bytes if peak and cap_bytes else None
            spans, telemetry = mapping(source.get("spans")), mapping(source.get("telemetry"))
            verdict = bottleneck.judge(spans, telemetry, one.config, memory_frac=memory_frac, tried=tried)
            found[name] = replace(one, verdict=verdict)
    return found


def _gains(confirming: _Confirming, named: Mapping[str, Named]) -> tuple[Gain, ...]:
    """Gains from the rounds in which both were measured; from the two separate figures where there are none."""
    found = []
    for of, over in [("best", name) for name in named if name not in PICKS] + [("after", "before")]:
        if of not in named or over not in named:
            continue
        ours, theirs = confirming.by_round(named[of]), confirming.by_round(named[over])
        gain = uncertainty.gain(of, over, [(ours[k], theirs[k]) for k in sorted(ours.keys() & theirs.keys())])
        a, b = named[of].beside_others, named[over].beside_others
        if gain is None and a and b:
            gain = Gain(of, over, a / b, None, None, 0)
        if gain is not None:
            found.append(gain)
    return tuple(found)


def kinds_of(records: Sequence[Record]) -> dict[str, str]:
    """Returns the system knobs that the study found to change what is learned, each with the reason in words."""
    return {str(knob): str(why) for knob, why in mapping(_last(records, "kinds").get("changed")).items()}


def _lost(records: Sequence[Record]) -> int:
    """Trials that began and have no end, of a run that is over."""
    if not any(r.event in ("pick", "stop") for r in records):
        return 0
    started = {str(r.get("trial", "")) for r in records if r.event == "trial_start"}
    return len(started - {str(r.get("trial", "")) for r in records if r.event == "trial"})


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
    )


def _claim(given: Mapping[str, Any]) -> Claim | None:
    text = str(given.get("claims") or "")
    factor = re.search(r"(\d+(?:\.\d+)?)x\b", text)
    return Claim(text, float(factor[1]) if factor else None, str(given.get("source") or "")) if text else None


def _last(records: Sequence[Record], event: str) -> Mapping[str, Any]:
    return next((r.fields for r in reversed(records) if r.event == event), {})
