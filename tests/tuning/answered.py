"""The recorded run as today's version writes it: finalists and `before` on the same fresh seeds, and three answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tuning.journal.records import Record
from tuning.search.race import SYSTEM

SEEDS = (11, 12, 13)
QUALITY = {
    "before": (0.887, 0.890, 0.885),
    "t007": (0.905, 0.909, 0.904),
    "t003": (0.911, 0.913, 0.910),
    "t009": (0.915, 0.917, 0.912),
    SYSTEM: (0.886, 0.891, 0.885),
}
PER_S = {"before": 33.0, "t007": 61.0, "t003": 50.0, "t009": 20.0, SYSTEM: 40.0}
POINTS = (300, 600, 900, 1200)


def changed(record: Record, **fields: Any) -> Record:
    """Returns a record with other fields."""
    return dataclasses.replace(record, fields={**record.fields, **fields})


def each(records: Sequence[Record], event: str, of: str | None = None, **fields: Any) -> list[Record]:
    """Returns the records with these fields in every one of an event, or in those of a name."""
    return [changed(r, **fields) if r.event == event and of in (None, r.get("name")) else r for r in records]


def until(records: Sequence[Record], stage: str) -> list[Record]:
    """Returns the records before a stage began."""
    return list(records[: next(n for n, r in enumerate(records) if (r.event, r.get("stage")) == ("stage", stage))])


def run(records: Sequence[Record], **pick: Any) -> list[Record]:
    """Returns the records with what fresh seeds say of each finalist; `pick` are fields of the last record."""
    configs = {r["trial"]: r["config"] for r in records if r.event == "trial"}
    today = next(r["config"] for r in records if r.event == "probe" and r["name"] == "before")
    configs |= {"before": today, SYSTEM: {**today, "num_workers": 0}, "t000": today}
    end = next(n for n, r in enumerate(records) if r.event == "confirmed")
    made = [_trained(records[end], name, seed, configs[name]) for seed in range(3) for name in QUALITY]
    first = next(n for n, r in enumerate(records) if r.event == "window")
    turns = [_window(records[first], name, number, configs[name]) for number in range(5) for name in QUALITY]
    picked = next(r for r in records if r.event == "pick")
    fields = {"best": "t007", "kind": "faster", "most_accurate": "t009", "best_at_speed": "t003", **pick}
    config = configs.get(fields["best"] or {"system": SYSTEM}.get(fields["kind"], "before"))
    fields = {"config": config, "reference": "before", "rule": "made up", "spread": 0.002, **fields}
    kept = [_of_today(r, today) for r in records if r.event not in ("window", "confirmed", "pick")]
    at = next(n for n, r in enumerate(kept) if (r.event, r.get("stage")) == ("stage", "confirm")) + 1
    found = [*kept[:at], *made, *turns, changed(picked, **fields), *kept[at:]]
    return [dataclasses.replace(r, seq=n) for n, r in enumerate(found)]


def _of_today(record: Record, today: Mapping[str, Any]) -> Record:
    """Returns the records of t000 as those of `before`."""
    if record.get("trial") != "t000" or record.event not in ("trial", "trial_start"):
        return record
    named = {"named": "before", "beside": True} if record.event == "trial_start" else {}
    return changed(record, config=today, **named)


def _trained(like: Record, name: str, number: int, config: Mapping[str, Any]) -> Record:
    end, per_s = QUALITY[name][number], PER_S[name]
    curve = [[n / per_s, n, {"accuracy": end - 0.02 * (3 - k)}] for k, n in enumerate(POINTS)]
    fields = {"name": name, "config": config, "seed": SEEDS[number], "values": {"accuracy": end}, "curve": curve}
    return changed(like, **fields, samples_per_s=per_s, train_s=POINTS[-1] / per_s)


def _window(like: Record, name: str, number: int, config: Mapping[str, Any]) -> Record:
    return changed(like, name=name, round=number, config=config, samples_per_s=PER_S[name] * (1 + number / 100))
