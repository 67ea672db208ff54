"""What part of a gain is another model, and what part is free: by the ablation where it was run, else by the probes.

Knobs that shape the model make it faster by making it another one; that is bought with what it can learn. System knobs
cannot change what is learned. The other knobs can, and leave the model as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainables.knobs import Knobs, kind_of, table
from tuning.config.lenient import finite
from tuning.journal.records import Record
from tuning.report.ablation_results import AblationResult
from tuning.report.format import apart, differing, plain
from tuning.report.trial_views import SPEED
from tuning.search.ablation import word
from tuning.search.throughput import group_of, probed


@dataclass(frozen=True)
class Parts:
    """How a gain over `over` comes about, each part as a ratio; None where nothing that was measured tells it.

    `model` are the knobs that make it another model, as "hidden_size=64 for 128", and `is_smaller` whether all of them
    are numbers that became less; `model_ratio` is 1 where there are none. `system_ratio` is what system knobs bring at
    the old values of all others. `others` are the knobs that are neither; `ground` says what tells of the model.
    """

    over: str
    model: tuple[str, ...]
    is_smaller: bool
    model_ratio: float | None
    system_ratio: float | None
    others: tuple[str, ...]
    ground: str


def shapes_model(name: str) -> bool:
    """Returns whether a knob makes another model: its width, its kind, its adapters; not a way of computing it."""
    row = table().get(name)
    return row is not None and row.shapes_model and row.kind == "both" and row.domain.type is not bool


def parts(
    over: str,
    best: Mapping[str, Any],
    other: Mapping[str, Any],
    records: Sequence[Record],
    ablation: Sequence[AblationResult],
) -> Parts:
    """Returns the parts of the gain of the configuration `best` over the configuration `other`, called `over`."""
    new, old = ({**Knobs().as_dict(), **config} for config in (best, other))
    names = apart(best, other)
    model = [name for name in names if shapes_model(name)]
    ratio, ground = (1.0, "") if not model else (_ablated(over, {n: old.get(n) for n in model}, ablation), "ablation")
    if ratio is None:
        ratio = _of_probes(new, {**new, **{n: old.get(n) for n in model}}, records)
        ground = "probes" if ratio else ""
    return Parts(
        over=over,
        model=tuple(f"{n}={plain(new.get(n))} for {plain(old.get(n))}" for n in model),
        is_smaller=bool(model) and all(_is_less(new.get(n), old.get(n)) for n in model),
        model_ratio=ratio,
        system_ratio=_of_system(over, old, records),
        others=tuple(n for n in names if n not in model and n in table() and kind_of(n) != "system"),
        ground=ground,
    )


def _ablated(over: str, model: Mapping[str, Any], ablation: Sequence[AblationResult]) -> float | None:
    """Returns what the ablation says of these knobs at the best: the product, where each was taken back to `model`."""
    own = {r.knobs: r for r in ablation if r.base == "best" and r.gain is not None}
    if not all(n in own and own[n].instead_of == word(value) for n, value in model.items()):
        return None
    return math.prod(r.gain.ratio for n, r in own.items() if n in model and r.gain is not None)


def _of_probes(new: Mapping[str, Any], old: Mapping[str, Any], records: Sequence[Record]) -> float | None:
    """Returns how many times faster one model was probed than the other, each with its fastest system knobs."""
    (ours, _), (theirs, _) = (_fastest(config, records) for config in (new, old))
    return ours / theirs if ours and theirs else None


def _of_system(over: str, old: Mapping[str, Any], records: Sequence[Record]) -> float | None:
    """Returns how many times faster system knobs alone made the old configuration, None where nobody probed that."""
    own = [finite(r.get(SPEED)) for r in records if r.event == "probe" and r.get("name") == over]
    fastest, knobs = _fastest(old, records)
    if not (own and own[-1] and fastest):
        return None
    changed = [name for name in differing(knobs, old) if kind_of(name) == "system"]
    return max(1.0, fastest / own[-1]) if changed else 1.0  # probed twice, two speeds are the machine's


def _fastest(config: Mapping[str, Any], records: Sequence[Record]) -> tuple[float | None, Mapping[str, Any]]:
    """Returns the largest speed that was probed with the "both" knobs of a configuration, and with which knobs."""
    own = [r for r in records if r.event == "probe" and not r.get("name") and isinstance(r.get("config"), Mapping)]
    whole = [r for r in own if all(finite(r.get(n)) is not None for n in (SPEED, "micro_step_s", "optimizer_step_s"))]
    batch_size, group = finite(config.get("batch_size")), group_of(config)
    rates = (
        [(p.at_batch_size(int(batch_size)), p.knobs) for p in probed(whole) if group_of(p.knobs) == group]
        if batch_size
        else []
    )
    return max(((rate, knobs) for rate, knobs in rates if rate), key=lambda one: one[0], default=(None, {}))


def _is_less(new: object, old: object) -> bool:
    return isinstance(new, int | float) and isinstance(old, int | float) and new < old
