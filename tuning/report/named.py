"""Configurations that are spoken of by name, as they were measured: in windows, whole trainings, trials and probes."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainables.knobs import KnobTable, identity
from tuning.journal.events import Config, ConfirmedRecord, Facts, MeasuredRecord, PickRecord, WindowRecord
from tuning.journal.run import History
from tuning.report.time_to_quality import Curve, curves
from tuning.report.trial_views import TrialView, view
from tuning.search import bottleneck, selection, side_by_side
from tuning.search.bottleneck import Verdict
from tuning.search.confirm import EARLIER_SYSTEM, OLD_SYSTEM
from tuning.search.race import SYSTEM
from tuning.search.side_by_side import is_as_fast, is_same
from tuning.search.slowing import slowing
from tuning.search.throughput import place_of
from tuning.search.turns import CANDIDATE
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Quality, Throughput

PICKS = ("best", "best_at_speed", "most_accurate")
"""The answers: the pick, the best quality that is no slower than the reference, and the best quality."""
WORDS = {"best": "best", "best_at_speed": "as fast, better", "most_accurate": "most accurate"}
SHARES = frozenset(["accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "iou", "miou", "dice"])
"""The last words of objectives that are 0 to 1 where their values are: an interval ends there, too."""


def last_word(objective: str) -> str:
    """Returns the last word of an objective's name, such as one of `SHARES`."""
    return re.split("[^a-z0-9]+", objective.lower())[-1]


@dataclass(frozen=True)
class Named:
    """A configuration that has a name: those of `PICKS`, and before, after and the like.

    `trained` is over the confirm stage's whole trainings, without any its own of the search where no probe has its
    speed; `throughput` is over windows, in which configurations took turns; each is None where there are none.
    `verdict` is what holds it back, None where no spans were recorded. `curves` are those of `trained`, by seed.
    `trial` is "" for a configuration that was given and not found; `outcome` is that of the trial, or of the probe.
    `labels` are the names under which it was trained on fresh seeds.
    """

    name: str
    trial: str
    outcome: str
    config: Config
    trained: Throughput | None
    throughput: Throughput | None
    probed_samples_per_s: float | None
    quality: Mapping[str, Quality]
    peak_allocated_bytes: int | None
    """The largest of its trial, or its probe, and of the trainings that confirm it, or its windows without any."""
    seed: int | None
    samples: int | None = None
    """After which its qualities were measured, where trainings ended by themselves: the mean of them."""
    active: Facts = field(default_factory=dict)
    """Its first optimiser step as it was seen (`trainables.witness`); `search.runtime_check.compare` reads it."""
    verdict: Verdict | None = None
    card: str = ""
    """How the card was doing meanwhile (`bottleneck.card_words`)."""
    labels: frozenset[str] = frozenset()
    curves: Mapping[int, Curve] = field(default_factory=dict)
    beside_per_s: float | None = None
    """The reference's speed times its gain over it, None if the two were not measured side by side."""

    @property
    def samples_per_s(self) -> float | None:
        """The one speed that is shown of it: that beside the reference, else `speed`, else that of its probe."""
        return self.beside_per_s or (self.speed.mean if self.speed else self.probed_samples_per_s)

    @property
    def speed(self) -> Throughput | None:
        """Its speed in whole trainings if there are several, else in windows, else in its one training.

        Windows of 1.5 s came out 5 to 30 % below trainings of 17 s (docs/log/two_cores.md).
        """
        return self.throughput if self.throughput and not self.is_trained else self.trained

    @property
    def is_trained(self) -> bool:
        """Returns whether `speed` is that of whole trainings."""
        return self.trained is not None and (self.throughput is None or len(self.trained.windows) > 1)


@dataclass(frozen=True)
class Confirming:
    """A run, asked for what the confirm stage measured of a configuration."""

    run: History
    objectives: Mapping[str, str]
    val_samples: int | None

    @functools.cached_property
    def slows(self) -> bool:
        """Returns whether trainings slow down, so that speeds are those of whole trainings."""
        return slowing(self.run) is not None

    @functools.cached_property
    def _peaks(self) -> dict[frozenset[tuple[str, str]], list[int | None]]:
        """Returns the peaks of the search's trainings, by their configuration."""
        found: dict[frozenset[tuple[str, str]], list[int | None]] = {}
        for end in self.run.ended:
            if end.config:
                found.setdefault(identity(end.config, self.run.table), []).append(end.peak_allocated_bytes)
        return found

    def named(self, name: str, source: TrialView, labels: frozenset[str] = frozenset()) -> Named:
        """Returns what is known of the configuration that a trial or a probe ran, called `name`.

        `labels` are the names of its trainings on fresh seeds, without any its own. Their qualities are its quality;
        their speed is of the system knobs that they had, which need not be its own.
        """
        labels = labels or frozenset([name])
        windows, learned = side_by_side.windows(self.run, source.config), self._learned(labels)
        whole_per_s = source.measured_samples_per_s if self.slows else None
        own = [r for r in learned if is_same(r.config or source.config, source.config, self.run.table)]
        rates, is_probed = [r.samples_per_s for r in own if r.samples_per_s], self._is_probed(source)
        is_probed = is_probed and not whole_per_s
        peaks = [source.peak_allocated_bytes, *(r.peak_allocated_bytes for r in own or windows)]
        peaks += self._peaks.get(identity(source.config, self.run.table), [])
        quality = {name: self._quality(name, learned, source) for name in self.objectives}
        found = Named(
            name=name,
            trial=source.trial if name in PICKS else "",
            outcome=source.outcome,
            config=source.config,
            trained=uncertainty.throughput(
                rates or ([x] if not is_probed and (x := whole_per_s or source.samples_per_s) else [])
            ),
            throughput=uncertainty.throughput([r.samples_per_s for r in windows if r.samples_per_s]),
            probed_samples_per_s=source.samples_per_s if is_probed else None,
            quality={name: found for name, found in quality.items() if found is not None},
            peak_allocated_bytes=max(filter(None, peaks), default=None),
            seed=source.seed,
            samples=_ended_after(learned) or (source.samples if source.has_ended and not learned else None),
            active=next((r.active for r in (*own, *windows) if r.active), source.active),
            labels=labels,
        )
        return self.at_speed(found, None)

    def at_speed(self, one: Named, beside_per_s: float | None) -> Named:
        """Returns a configuration with that speed, and with curves at the speed that is shown of it.

        At one speed trainings with other system knobs serve as well.
        """
        found = replace(one, beside_per_s=beside_per_s)
        per_s = found.samples_per_s if found.speed else None
        return replace(found, curves=curves(self._learned(one.labels), next(iter(self.objectives), ""), per_s))

    def _learned(self, labels: frozenset[str]) -> list[ConfirmedRecord]:
        """Returns the trainings on fresh seeds under these names that came to their end."""
        return [r for r in self.run.confirmed if r.name in labels and r.is_ok]

    def _is_probed(self, source: TrialView) -> bool:
        """Returns whether the speed of a trial or a probe is a probe's: else it is what the trial's training showed."""
        if all(end.trial != source.trial for end in self.run.ended):
            return True
        table = self.run.table
        place = place_of(source.config, table)
        return any(place_of(probe.config, table) == place for probe in self.run.probes if probe.samples_per_s)

    def _quality(self, objective: str, confirmed: Sequence[ConfirmedRecord], source: TrialView) -> Quality | None:
        by_seed = {r.seed: value for r in confirmed if (value := r.values.get(objective)) is not None}
        if by_seed and selection.sets_its_seed(self.run):  # one training, as often as it was made
            by_seed = {min(by_seed): statistics.fmean(by_seed.values())}
        kind = last_word(objective)
        share_of = self.val_samples if kind in ("accuracy", "acc") else None
        most = 1.0 if kind in SHARES else None
        searched = source.values.get(objective)
        if by_seed or searched is None:
            return uncertainty.quality(by_seed, proportion_of=share_of, most=most) if by_seed else None
        return uncertainty.quality({source.seed or 0: searched}, proportion_of=share_of, most=most, confirmed=False)


def _ended_after(trainings: Sequence[ConfirmedRecord]) -> int | None:
    """Returns the mean of the samples of trainings, None unless one has ended by itself."""
    samples = [r.samples for r in trainings if r.samples]
    return round(statistics.fmean(samples)) if samples and any(r.has_ended for r in trainings) else None


def named_of(
    confirming: Confirming, pick: PickRecord, trials: Sequence[TrialView], probes: Sequence[TrialView]
) -> dict[str, Named]:
    """Returns every configuration that is spoken of by name: those picked, and those that were given."""
    by_id, trained = {t.trial: t for t in trials}, {t.named: t for t in trials if t.named and t.outcome == "ok"}
    picks = {"best": pick.best, "best_at_speed": pick.best_at_speed, "most_accurate": pick.most_accurate}
    sources = {name: by_id[trial] for name, trial in picks.items() if trial in by_id}
    labels = {name: frozenset([name, source.trial]) for name, source in sources.items()}
    if pick.config:
        own = sources.get("best") or (trained.get(pick.reference) if pick.kind == "reference" else None)
        if "best" not in sources and pick.kind in ("system", "reference"):
            labels["best"] = frozenset([SYSTEM if pick.kind == "system" else pick.reference])
        source = own or _probed_as(pick.config, probes)
        sources["best"] = _exported(source, pick.config, confirming.run.table)
    if not sources and (probe := selection.fastest_probe(confirming.run)) is not None:
        sources["best"] = view(probe)
    windowed = {window.name: window.config for window in confirming.run.all_windows}
    left = [] if pick.kind == "reference" else [SYSTEM]
    left += [n for n in windowed if n.endswith((OLD_SYSTEM, EARLIER_SYSTEM)) or n.startswith(CANDIDATE)]
    theirs = [n for n in windowed if n not in (*PICKS, *by_id, *left)]
    sources |= {name: TrialView(name, "ok", windowed[name]) for name in theirs}
    sources |= {p.trial: p for p in probes if p.trial and p.trial not in PICKS}
    for name, own in trained.items():
        source = sources.get(name, own)
        whole = {n: getattr(own, n) for n in ("values", "seed", "samples", "has_ended", "measured_samples_per_s")}
        sources[name] = replace(source, **whole)
    return {name: confirming.named(name, source, labels.get(name, frozenset())) for name, source in sources.items()}


def _exported(own: TrialView, config: Config, table: KnobTable) -> TrialView:
    """Returns a trial with the configuration that is exported of it; what it ran with other knobs is not of that."""
    if is_same(own.config, config, table):
        return replace(own, config=config)
    return replace(own, config=config, samples_per_s=None, peak_allocated_bytes=None, active={})


def _probed_as(config: Config, probes: Sequence[TrialView]) -> TrialView:
    """Returns the last probe of a configuration that no trial had, as far as there is one."""
    known = [p for p in probes if all(config.get(n) == v for n, v in p.config.items() if n in config)]
    return replace(known[-1], trial="", config=config) if known else TrialView("", "ok", config)


def judged(
    run: History,
    named: Mapping[str, Named],
    probes: Sequence[TrialView],
    cap_bytes: int | None,
    asked: Collection[str] | None,
) -> dict[str, Named]:
    """Returns them with what holds them back: in their last whole training, else window, else trial or probe.

    `asked` are the knobs that a custom loop reads, None for all.
    """
    tried = {f"{n}={str(v).lower()}" for p in probes if p.outcome == "ok" for n, v in p.config.items()}
    found = dict(named)
    measured: list[tuple[str, MeasuredRecord]] = [(end.trial, end) for end in run.ended]
    measured += [(record.name, record) for record in (*run.probes, *run.all_windows, *run.confirmed)]
    for name, one in named.items():
        labels = {name, one.trial, *one.labels} - {""}
        known = [r for label, r in measured if r.spans and label in labels]
        own = [r for r in known if is_same(r.config or one.config, one.config, run.table)]
        source = max(own, key=_last_of_longest, default=None)
        if source is not None:
            peak = one.peak_allocated_bytes
            memory_frac = peak / cap_bytes if peak and cap_bytes else None
            verdict = bottleneck.judge(
                source.spans, source.telemetry, one.config, run.table, memory_frac=memory_frac, tried=tried, asked=asked
            )
            card = bottleneck.card_words(source.telemetry)
            found[name] = replace(one, verdict=verdict, card=card)
    return found


def _last_of_longest(record: MeasuredRecord) -> tuple[bool, bool, int]:
    """Returns what sorts trainings on fresh seeds last, windows before them, and each by when it was written."""
    return isinstance(record, ConfirmedRecord), isinstance(record, WindowRecord), record.seq


def speeds(one: Named, other: Named) -> tuple[tuple[str, float], tuple[str, float]] | None:
    """Returns how each of two was measured and its speed: in the same way where both were, as one kind reads otherwise
    than another (`Named.samples_per_s`). None where one has no speed.
    """
    ours, theirs = _by_kind(one), _by_kind(other)
    both = [kind for kind in ours if kind in theirs]
    pairs = zip(both or ours, both or theirs, strict=False)
    return next((((a, ours[a]), (b, theirs[b])) for a, b in pairs), None)


def _by_kind(one: Named) -> dict[str, float]:
    """Returns the speeds that are known of a configuration, by how they were measured."""
    turns = one.throughput.mean if one.throughput else None
    found = {"window": turns, "short timing": one.probed_samples_per_s}
    found["training"] = one.trained.mean if one.trained else None
    return {kind: speed for kind, speed in found.items() if speed}


def gains(confirming: Confirming, named: Mapping[str, Named], reference: str) -> tuple[Gain, ...]:
    """Returns gains of the best over those given, and of all others over the reference.

    They are from trainings on the same seeds and rounds in turns, else from speeds of one kind, or as known. A
    configuration over itself, or over one that differs in its learning rate alone, has 1: if two measurements of it
    differ, that is noise.
    """
    table, found, others = confirming.run.table, [], [name for name in named if name not in ("best", reference)]
    pairs = [*(("best", name) for name in named if name not in PICKS), *((name, reference) for name in others)]
    for of, over in pairs:
        if of not in named or over not in named:
            continue
        pair = named[of], named[over]
        gain = side_by_side.gain(confirming.run, of, over, pair[0].config, pair[1].config)
        if gain is None and (known := speeds(*pair)) is not None:
            (kind, ours_per_s), (other, theirs_per_s) = known
            grounds = f"{kind}s" if kind == other else f"a {kind} over a {other}"
            gain = Gain(of, over, ours_per_s / theirs_per_s, None, None, 0, grounds)
        if gain is not None and is_as_fast(pair[0].config, pair[1].config, table):
            gain = Gain(of, over, 1.0, 1.0, 1.0, gain.rounds, trainings=gain.trainings)
        if gain is not None:
            found.append(gain)
    return tuple(found)


def at_one_pace(
    confirming: Confirming, named: Mapping[str, Named], reference: str, found: Sequence[Gain]
) -> dict[str, Named]:
    """Returns the configurations with speeds that are the reference's times their gains over it, as far as known.

    The pace of a machine changes from one measurement to the next; so speeds that stand below each other compare.
    """
    times = {gain.of: gain.ratio for gain in found if gain.over == reference and gain.rounds + gain.trainings}
    today_per_s = named[reference].samples_per_s if reference in named else None
    paced = {name: confirming.at_speed(named[name], today_per_s * times[name]) for name in times if today_per_s}
    return {**named, **paced}
