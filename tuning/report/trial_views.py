"""Trials and probes as a summary has them, each from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuning.config.lenient import finite, mapping, whole
from tuning.journal.records import Record, rated
from tuning.search.bottleneck import joules_a_sample

SPEED, MEASURED = "samples_per_s", "measured_samples_per_s"
"""The keys of a record's throughput, and of that which its own training showed."""


@dataclass(frozen=True)
class TrialView:
    """One trial that ended, or one probe (`trial` is then its name, if any); values are None where there is none."""

    trial: str
    outcome: str
    config: Mapping[str, Any]
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
    active: Mapping[str, Any] = field(default_factory=dict)
    named: str = ""
    """The reference, `before` or the plain defaults, if it was its training."""
    has_ended: bool = False
    """A loop of one's own ended it before its horizon."""


def trial_views(records: Sequence[Record], objectives: Mapping[str, str]) -> list[TrialView]:
    """Returns each trial once, with its last record: a resumed run may repeat one.

    Earlier versions gave it the system knobs of one that was faster in turns (`rated`).
    """
    ended = [with_values(r, records) for r in records if r.event == "trial"]
    last = {str(r.get("trial", "")): view(r, objectives, "trial") for r in ended}
    named = {str(r["trial"]): str(r["named"]) for r in records if r.event == "trial_start" and r.get("named")}
    last |= {trial: replace(last[trial], named=name) for trial, name in named.items() if trial in last}
    for trial, record in rated(records).items():
        own, config = last[trial], mapping(record.get("config"))
        own = replace(own, samples_per_s=finite(record.get(SPEED)))
        if config != own.config:  # what was measured of the configuration that ran does not hold for this one
            own = replace(own, config=config, measured_samples_per_s=None, peak_allocated_bytes=None)
            own = replace(own, joules_per_sample=None, active={})
        last[trial] = own
    return list(last.values())


def with_values(record: Record, records: Sequence[Record]) -> Record:
    """Returns the record; of a trial that the time stopped between two rungs with the values of the one behind it, as
    one stopped at a rung has.
    """
    known = any(finite(value) is not None for value in mapping(record.get("values")).values())
    if record.event != "trial" or record.get("outcome") != "stopped" or known:
        return record
    rungs = (r for r in reversed(records) if r.event == "rung" and r.get("trial") == record.get("trial"))
    return replace(record, fields={**record.fields, "values": next((r.get("values") for r in rungs), {})})


def view(record: Record, objectives: Mapping[str, str], key: str) -> TrialView:
    """Returns what the record of a trial or a probe says; `key` names the field that names it."""
    values = mapping(record.get("values"))
    return TrialView(
        trial=str(record.get(key) or ""),
        outcome=str(record.get("outcome", "")),
        config=mapping(record.get("config")),
        values={name: finite(values.get(name)) for name in objectives},
        samples=whole(record.get("samples")),
        stopped_at=whole(record.get("stopped_at")),
        samples_per_s=finite(record.get(SPEED)),
        measured_samples_per_s=finite(record.get(MEASURED)),
        peak_allocated_bytes=whole(record.get("peak_allocated_bytes")),
        joules_per_sample=joules_a_sample(mapping(record.get("telemetry")), finite(record.get(MEASURED))),
        seed=whole(record.get("seed")),
        message=str(record.get("message") or record.get("reason") or ""),
        active=mapping(record.get("active")),
        has_ended=bool(record.get("has_ended")),
    )


def learning_curves(records: Sequence[Record], objective: str) -> dict[str, tuple[tuple[int, float], ...]]:
    """Returns for each trial its (samples seen, value of `objective`) at every rung and at its end, in that order."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if record.event in ("rung", "trial"):
            samples = whole(record.get("stopped_at")) or whole(record.get("samples"))
            value = finite(mapping(record.get("values")).get(objective))
            if samples and value is not None:
                found.setdefault(str(record.get("trial", "")), {})[samples] = value
    return {trial: tuple(sorted(points.items())) for trial, points in found.items()}
