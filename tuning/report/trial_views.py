"""The one view of what was trained or probed, from its records: every screen, table and file reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tuning.journal.events import Config, ConfirmedRecord, Facts, ProbeRecord, TrialRecord
from tuning.journal.run import History

SPEED, MEASURED = "samples_per_s", "measured_samples_per_s"
"""The keys of a record's throughput, and of that which its own training showed."""


@dataclass(frozen=True)
class TrialView:
    """A trial that ended, or a probe (`trial` is then its name, if any); values are None if there is none."""

    trial: str
    outcome: str
    config: Config
    values: Mapping[str, float | None] = field(default_factory=dict)
    samples: int | None = None
    stopped_at: int | None = None
    samples_per_s: float | None = None
    measured_samples_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    seed: int | None = None
    message: str = ""
    on_front: bool = False
    active: Facts = field(default_factory=dict)
    named: str = ""
    """The reference, `before` or the plain defaults, if it was its training."""
    has_ended: bool = False
    """A custom loop ended it before its horizon."""

    @property
    def known_per_s(self) -> float | None:
        """Returns its speed, None if it failed: then that is only what was expected."""
        return self.samples_per_s if self.outcome in ("", "ok", "stopped") else None


def view(made: TrialRecord | ConfirmedRecord | ProbeRecord) -> TrialView:
    """Returns the view of one record; a probe's or a confirming training's name stands in the place of a trial."""
    if not isinstance(made, TrialRecord):
        seen = TrialView(made.name, made.outcome, made.config, samples_per_s=made.samples_per_s, active=made.active)
        seen = replace(seen, peak_allocated_bytes=made.peak_allocated_bytes, message=made.message)
        return replace(seen, values=made.values, seed=made.seed) if isinstance(made, ConfirmedRecord) else seen
    return TrialView(
        trial=made.trial,
        outcome=made.outcome,
        config=made.config,
        values=made.values,
        samples=made.samples,
        stopped_at=made.stopped_at,
        samples_per_s=made.samples_per_s,
        measured_samples_per_s=made.measured_samples_per_s,
        peak_allocated_bytes=made.peak_allocated_bytes,
        seed=made.seed,
        message=made.message or made.reason,
        active=made.active,
        has_ended=made.has_ended,
    )


def trial_views(run: History, objectives: Iterable[str]) -> list[TrialView]:
    """Returns each trial that ended, once, with its latest ending: a resumed run may repeat one."""
    ended = [(run.trials[end.trial], end) for end in run.ended]
    return [replace(view(end), values={n: t.values.get(n) for n in objectives}, named=t.named) for t, end in ended]
