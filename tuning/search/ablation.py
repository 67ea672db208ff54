"""The worth of each knob: configurations one knob apart, measured in windows that take turns (`search.confirm`).

At the best one knob at a time goes back to what it is today, or is set as asked; at what is trained today one is set as
in the best.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainables.knob_columns import word
from trainables.knobs import Knobs, KnobTable, Scalar
from tuning.journal.events import Config, Facts, WindowRecord
from tuning.journal.run import History
from tuning.memory.groups import micro_batch_of
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Pair

BATCHES = ("batch_size", "micro_batch_size")
"""Two knobs that people speak of as one; they are also changed together."""


@dataclass(frozen=True)
class Change:
    """The configuration `config`, which differs from the one called `base` in `knobs` only.

    `value` is compared with `instead_of`, both in words. If it is `added`, `config` has `value`, else the base has it.
    """

    base: str
    knobs: tuple[str, ...]
    value: str
    instead_of: str
    config: Mapping[str, Scalar]
    added: bool

    @property
    def label(self) -> str:
        """Returns the knobs' names, joined by " + "."""
        return " + ".join(self.knobs)

    @property
    def name(self) -> str:
        """Returns what the configuration is called, such as "best, amp_dtype=fp32"."""
        return f"{self.base}, {self.label}={self.value if self.added else self.instead_of}"


@dataclass(frozen=True)
class AblationResult:
    """The gain of `knobs` at `base`: speed with `value` over speed with `instead_of`, and the same of peak memory.

    `gain` is None if one of the two was not measured.
    """

    base: str
    knobs: str
    value: str
    instead_of: str
    gain: Gain | None
    memory_ratio: float | None
    added: bool


def changes(
    best: Mapping[str, Scalar],
    today: Mapping[str, Scalar],
    table: KnobTable,
    name: str = "before",
    asked: Mapping[str, Scalar] = types.MappingProxyType({}),
) -> tuple[list[Change], dict[str, str]]:
    """Returns the changes to measure, and of those that are none beside the other knobs the reason in words.

    `name` is what the configuration `today` is called; each knob of `asked` is set at the best. Knobs that change what
    is learned and not how fast are left out; the batch size changes both.
    """
    new, old = Knobs.of(best, table).as_dict(), Knobs.of(today, table).as_dict()
    differing = [n for n in table if new[n] != old[n] and (table[n].kind != "learning" or n in BATCHES)]
    groups: list[tuple[str, ...]] = [(n,) for n in differing]
    if all(n in differing for n in BATCHES):
        groups.append(BATCHES)
    sides = [(knobs, *side) for knobs in groups for side in (("best", new, old, False), (name, old, new, True))]
    sides += [((knob,), "best", new, {**new, **asked}, True) for knob in asked]
    found, idle = list[Change](), dict[str, str]()
    for knobs, base, own, other, added in sides:
        config = settled({**own, **{n: other[n] for n in knobs}}, table)
        pair = (other, own) if added else (own, other)
        value, instead_of = ("/".join(word(one[n]) for n in knobs) for one in pair)
        change = Change(base, knobs, value, instead_of, config, added)
        if config == settled(own, table):
            idle[f"{base}: {change.label}"] = "changes nothing there, beside its other knobs"
        else:
            found.append(change)
    return found, idle


def turns(ends: Mapping[str, Config], changed: Sequence[Change], table: KnobTable) -> dict[str, dict[str, Scalar]]:
    """Returns what takes turns, by name: the two `ends` if they are changed, and what comes of it."""
    named = {name: settled(own, table) for name, own in ends.items() if any(one.base == name for one in changed)}
    return {**named, **{one.name: dict(one.config) for one in changed}}


def results(run: History, best: Mapping[str, Scalar] | None = None) -> tuple[AblationResult, ...]:
    """Returns a result for each change of the last ablation of a run, those at the best first, by what they bought.

    There is none if another configuration than `best` was ablated, as before a study went on.
    """
    made = run.ablation
    if made is None or (best is not None and made.best and made.best != best):
        return ()
    windows: dict[str, dict[int, WindowRecord]] = {}
    for window in run.all_windows:
        windows.setdefault(window.name, {})[window.round] = window
    found = [_result(change, windows) for change in made.changes]
    by_worth = sorted(found, key=lambda one: (-(one.gain.ratio if one.gain else 0.0), one.knobs))
    return tuple(sorted(by_worth, key=lambda one: (one.base != "best", one.added)))


def _result(change: Facts, windows: Mapping[str, Mapping[int, WindowRecord]]) -> AblationResult:
    name, base, knobs, value, instead_of = (str(change.get(n, "")) for n in _OF_CHANGE)
    added = bool(change.get("added", base != "best"))
    with_, without = (windows.get(one, {}) for one in ((name, base) if added else (base, name)))
    both = [(with_[n], without[n]) for n in with_ if n in without]
    peaks = [(a.peak_allocated_bytes, b.peak_allocated_bytes) for a, b in both]
    speeds = [(a.samples_per_s, b.samples_per_s) for a, b in both]
    memory_ratio = max((a / b for a, b in peaks if a and b), default=None)
    gain = uncertainty.gain("with", "without", [Pair(a, b) for a, b in speeds if a and b])
    return AblationResult(base, knobs, value, instead_of, gain, memory_ratio, added)


_OF_CHANGE = ("name", "base", "label", "value", "instead_of")
"""The fields of each change in the record of an ablation."""


def raw(changed: Sequence[Change]) -> list[dict[str, str | bool]]:
    """Returns the changes as the record of an ablation has them."""
    return [{name: getattr(one, name) for name in (*_OF_CHANGE, "added")} for one in changed]


def settled(knobs: Mapping[str, Scalar], table: KnobTable) -> dict[str, Scalar]:
    """Returns the knobs as a run takes them: none without effect, the micro-batch no larger than the batch."""
    full = {**Knobs.of(knobs, table).as_dict(), "micro_batch_size": micro_batch_of(knobs)}
    return {name: value for name, value in full.items() if table.is_active(name, full)}
