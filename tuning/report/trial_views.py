"""Trials and probes as a summary has them, each from its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tuning.journal.events import Config, Facts, ProbeRecord, RefusedRecord, TrialRecord
from tuning.journal.run import History, Trial
from tuning.search.bottleneck import joules_a_sample

SPEED, MEASURED = "samples_per_s", "measured_samples_per_s"
"""The keys of a record's throughput, and of that which its own training showed."""


@dataclass(frozen=True)
class TrialView:
    """One trial that ended, or one probe (`trial` is then its name, if any); values are None where there is none."""

    trial: str
    outcome: str
    config: Config
    values: Mapping[str, float | None] = field(default_factory=dict)
    samples: int | None = None
    stopped_at: int | None = None
    samples_per_s: float | None = None
    measured_samples_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    joules_per_sample: float | None = None
    seed: int | None = None
    message: str = ""
    on_front: bool = False
    active: Facts = field(default_factory=dict)
    named: str = ""
    """The reference, `before` or the plain defaults, if it was its training."""
    has_ended: bool = False
    """A custom loop ended it before its horizon."""


def trial_views(run: History, objectives: Iterable[str]) -> list[TrialView]:
    """Returns each trial that ended, once, with its latest ending: a resumed run may repeat one."""
    return [_of_trial(run.trials[end.trial], end, objectives) for end in run.ended]


def _of_trial(trial: Trial, end: TrialRecord, objectives: Iterable[str]) -> TrialView:
    return TrialView(
        trial=trial.id,
        outcome=end.outcome,
        config=end.config,
        values={name: trial.values.get(name) for name in objectives},
        samples=end.samples,
        stopped_at=end.stopped_at,
        samples_per_s=end.samples_per_s,
        measured_samples_per_s=end.measured_samples_per_s,
        peak_allocated_bytes=end.peak_allocated_bytes,
        joules_per_sample=joules_a_sample(end.telemetry, end.measured_samples_per_s),
        seed=end.seed,
        message=end.message or end.reason,
        active=end.active,
        named=trial.named,
        has_ended=end.has_ended,
    )


def probe_view(probe: ProbeRecord) -> TrialView:
    """Returns a probe, its name in the place of a trial."""
    return TrialView(
        trial=probe.name,
        outcome=probe.outcome,
        config=probe.config,
        samples_per_s=probe.samples_per_s,
        peak_allocated_bytes=probe.peak_allocated_bytes,
        message=probe.message,
        active=probe.active,
    )


def refused_view(refusal: RefusedRecord) -> TrialView:
    """Returns what was not launched, with the peak that was predicted for it."""
    peak_bytes = refusal.predicted_bytes
    return TrialView(refusal.trial, "refused", refusal.config, peak_allocated_bytes=peak_bytes, message=refusal.reason)
