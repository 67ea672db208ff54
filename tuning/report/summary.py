"""What a run found, as one value computed from its records: terminal, report and export print it and compute nothing.

Pure, so a run that is still going, was cut off or was recorded long ago is summed up by the same code.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuning.config.lenient import finite, mapping, numbers, texts, whole
from tuning.journal import timeline
from tuning.journal.records import Record
from tuning.journal.timeline import Interval, Times
from tuning.report import ablation_results, trial_views
from tuning.report.ablation_results import Receipt
from tuning.report.trial_views import SAMPLES_PER_S, Candidate
from tuning.search import bottleneck
from tuning.search.bottleneck import Verdict
from tuning.search.rule import Baseline, best_baseline
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Quality, Throughput

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
        """What a training of this configuration can be expected to show, as far as it is known.

        Windows of 1.5 s came out 5 to 30 % below trainings of 17 s (docs/log/two_cores.md), so trainings go first.
        """
        found = self.trained or self.throughput
        return found.median if found else self.probed_samples_per_s

    @property
    def beside_others(self) -> float | None:
        """What to compare with other configurations: windows measured in turns, else probes."""
        return self.throughput.median if self.throughput else self.probed_samples_per_s


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
    trials: tuple[Candidate, ...]
    probes: tuple[Candidate, ...]
    trial_counts: Mapping[str, int]
    probe_counts: Mapping[str, int]
    named: Mapping[str, Named]
    confirmed: tuple[Named, ...]
    """What was trained again on fresh seeds to find the best, by its trial's name, the fastest first."""
    gains: tuple[Gain, ...]
    claim: Claim | None
    receipts: tuple[Receipt, ...]
    rule: str
    times: Times
    intervals: tuple[Interval, ...]
    notes: tuple[str, ...]
    stop_reason: str
    resumable: bool

    @property
    def best(self) -> Named | None:
        """The picked configuration, None before the pick."""
        return self.named.get("best")

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

    def given(self) -> tuple[Named, ...]:
        """Returns the configurations that were named by hand, in the order in which they were measured."""
        return tuple(n for n in self.named.values() if n.name not in PICKS)

    def alternatives(self) -> tuple[Named, ...]:
        """Returns the knee point and the most accurate, without those that are the best itself or each other."""
        seen = {self.best.trial} if self.best else set()
        found = []
        for name in ("knee", "most_accurate"):
            other = self.named.get(name)
            if other is not None and other.trial not in seen:
                seen.add(other.trial)
                found.append(other)
        return tuple(found)


def from_records(records: Sequence[Record]) -> Summary:
    """Returns the summary of a run, whole or cut off at any record; empty records give an empty summary."""
    ablated = [r for r in records if r.event in ("ablation", "receipt")]  # made later, and no part of the run's time
    records = [r for r in records if r.event not in ("ablation", "receipt")]
    study = _last(records, "study")
    pick, stop = _last(records, "pick"), _last(records, "stop")
    objectives = {k: str(v) for k, v in mapping(study.get("objectives")).items() if k != SAMPLES_PER_S}
    front = {str(t) for t in pick.get("front") or ()}
    trials = tuple(replace(t, on_front=t.trial in front) for t in trial_views.trials(records, objectives))
    probes = tuple(trial_views.candidate(r, objectives, "name") for r in records if r.event == "probe")
    refused = Counter(str(r.get("stage")) for r in records if r.event == "refused")
    named = _named(records, pick, trials, probes, objectives, whole(study.get("val_samples")))
    named = _judged(records, named, probes, _place(study))
    running = not (pick or stop)
    workload = mapping(mapping(study.get("config")).get("workload"))
    return Summary(
        id=str(study.get("id", "")),
        workload=str(study.get("workload", "")),
        ref=str(workload.get("ref") or study.get("workload", "")),
        options=mapping(workload.get("options")),
        horizon_samples=whole(study.get("horizon_samples")),
        study=study,
        place=_place(study),
        objectives=objectives,
        baselines={str(k): numbers(v) for k, v in mapping(study.get("baselines")).items()},
        trials=trials,
        probes=probes,
        trial_counts=_counts(trials, refused["search"], 0 if running else _lost(records)),
        probe_counts=_counts(probes, refused["probe"], 0),
        named=named,
        confirmed=_confirmed(records, trials, objectives, whole(study.get("val_samples"))),
        gains=_gains(records, named),
        claim=_claim(study),
        receipts=ablation_results.receipts(
            ablated, texts(mapping(mapping(study.get("config")).get("named")).get("claims_of"))
        ),
        rule=str(pick.get("rule", "")),
        times=timeline.times(records),
        intervals=tuple(timeline.intervals(records)),
        notes=tuple(str(r.get("text", "")) for r in records if r.event == "note"),
        stop_reason=str(stop.get("reason", "")),
        resumable=bool(stop.get("resumable", False)),
    )


def _named(
    records: Sequence[Record],
    pick: Mapping[str, Any],
    trials: Sequence[Candidate],
    probes: Sequence[Candidate],
    objectives: Mapping[str, str],
    val_samples: int | None,
) -> dict[str, Named]:
    by_id = {t.trial: t for t in trials}
    sources = {name: by_id.get(str(pick.get(name, ""))) for name in PICKS}
    # A joint search probes nothing: its named configurations are known from their windows alone.
    windowed = [r for r in records if r.event == "window" and r.get("config") and r["name"] not in (*PICKS, *by_id)]
    sources |= {r["name"]: Candidate(r["name"], "ok", r["config"]) for r in windowed}
    sources |= {p.trial: p for p in probes if p.trial and p.trial not in PICKS}
    return {
        name: _one_named(name, source, records, objectives, val_samples)
        for name, source in sources.items()
        if source is not None
    }


def _confirmed(
    records: Sequence[Record], trials: Sequence[Candidate], objectives: Mapping[str, str], val_samples: int | None
) -> tuple[Named, ...]:
    names = {r.get("name") for r in records if r.event == "confirmed"}
    again = [_one_named(t.trial, t, records, objectives, val_samples) for t in trials if t.trial in names]
    return tuple(sorted(again, key=lambda one: -(one.samples_per_s or 0.0)))


def _one_named(
    name: str, source: Candidate, records: Sequence[Record], objectives: Mapping[str, str], val_samples: int | None
) -> Named:
    windows = _windows(records, name, source.config)
    labels = {name, source.trial} if name in PICKS else {name}
    rates = [x for r in windows if (x := finite(r.get(SAMPLES_PER_S)))]
    waits = [x for r in windows if (x := finite(r.get("data_wait_frac"))) is not None]
    confirmed = [r for r in records if r.event == "confirmed" and r.get("name") in labels]
    peaks = [peak for r in confirmed if (peak := whole(r.get("peak_allocated_bytes")))]
    quality = {}
    for objective in objectives:
        by_seed = {
            whole(r.get("seed")) or 0: value
            for r in confirmed
            if (value := finite(mapping(r.get("values")).get(objective))) is not None
        }
        searched = source.values.get(objective)
        share_of = val_samples if objective == "accuracy" or objective.endswith("_accuracy") else None
        if by_seed:
            quality[objective] = uncertainty.quality(by_seed, proportion_of=share_of)
        elif searched is not None:
            quality[objective] = uncertainty.quality(
                {source.seed or 0: searched}, proportion_of=share_of, confirmed=False
            )
    return Named(
        name=name,
        trial=source.trial if name in PICKS else "",
        outcome=source.outcome,
        config=source.config,
        trained=uncertainty.throughput([x for r in confirmed if (x := finite(r.get(SAMPLES_PER_S)))]),
        throughput=uncertainty.throughput(rates),
        probed_samples_per_s=source.samples_per_s,
        data_wait_frac=statistics.median(waits) if waits else source.data_wait_frac,
        quality=quality,
        peak_allocated_bytes=source.peak_allocated_bytes or max(peaks, default=None),
        seed=source.seed,
        active=next((a for r in [*confirmed, *windows] if (a := mapping(r.get("active")))), source.active),
    )


def _judged(
    records: Sequence[Record], named: Mapping[str, Named], probes: Sequence[Candidate], place: Place
) -> dict[str, Named]:
    """The configurations with what holds them back: in their last whole training, else window, else trial or probe."""
    cap_bytes = place.cap_bytes or (place.memory_bytes if place.type == "cuda" else None)
    tried = {f"{n}={str(v).lower()}" for p in probes if p.outcome == "ok" for n, v in p.config.items()}
    found = {}
    for name, one in named.items():
        labels = {name, one.trial} - {""}
        own = [r for r in records if r.get("spans") and (r.get("name") in labels or r.get("trial") in labels)]
        own = [r for r in own if r.event != "trial" or r.get("config") == one.config]  # else it was rated anew
        source = max(own, key=lambda r: (r.event == "confirmed", r.event == "window", r.seq), default=None)
        if source is None:
            continue
        peak = one.peak_allocated_bytes
        memory_frac = peak / cap_bytes if peak and cap_bytes else None
        spans, telemetry = mapping(source.get("spans")), mapping(source.get("telemetry"))
        found[name] = bottleneck.judge(spans, telemetry, one.config, memory_frac=memory_frac, tried=tried)
    return {name: replace(one, verdict=found.get(name)) for name, one in named.items()}


def _gains(records: Sequence[Record], named: Mapping[str, Named]) -> tuple[Gain, ...]:
    """Gains from the rounds in which both were measured; from the two separate figures where there are none."""
    found = []
    for of, over in [("best", name) for name in named if name not in PICKS] + [("after", "before")]:
        if of not in named or over not in named:
            continue
        ours, theirs = _by_round(records, named[of]), _by_round(records, named[over])
        gain = uncertainty.gain(of, over, [(ours[k], theirs[k]) for k in sorted(ours.keys() & theirs.keys())])
        a, b = named[of].beside_others, named[over].beside_others
        if gain is None and a and b:
            gain = Gain(of, over, a / b, None, None, 0)
        if gain is not None:
            found.append(gain)
    return tuple(found)


def _windows(records: Sequence[Record], name: str, config: Mapping[str, Any]) -> list[Record]:
    """The windows of a name; of the best's only its own: before it was confirmed, another may have been the best."""
    own = [r for r in records if r.event == "window" and r.get("name") == name]
    return [r for r in own if name not in PICKS or r.get("config", config) == config]


def _by_round(records: Sequence[Record], of: Named) -> dict[int, float]:
    rates: dict[int, list[float]] = {}
    for record in _windows(records, of.name, of.config):
        if rate := finite(record.get(SAMPLES_PER_S)):
            rates.setdefault(whole(record.get("round")) or 0, []).append(rate)
    return {key: statistics.median(values) for key, values in rates.items()}


def _lost(records: Sequence[Record]) -> int:
    started = {str(r.get("trial", "")) for r in records if r.event == "trial_start"}
    return len(started - {str(r.get("trial", "")) for r in records if r.event == "trial"})


def _counts(candidates: Sequence[Candidate], refused: int, lost: int) -> dict[str, int]:
    """Outcomes with how many had each: the usual ones first, even at 0, then what else happened."""
    counts = Counter({"ok": 0, "stopped": 0, "oom": 0, "refused": 0})
    counts.update(c.outcome for c in candidates)
    counts["refused"] += refused
    counts["lost"] += lost
    return dict(counts)


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


def _claim(study: Mapping[str, Any]) -> Claim | None:
    named = mapping(mapping(study.get("config")).get("named"))
    text = str(named.get("claims") or "")
    if not text:
        return None
    factor = re.search(r"(\d+(?:\.\d+)?)x\b", text)
    return Claim(text, float(factor[1]) if factor else None, str(named.get("source") or ""))


def _last(records: Sequence[Record], event: str) -> Mapping[str, Any]:
    return next((r.fields for r in reversed(records) if r.event == event), {})
