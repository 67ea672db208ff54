"""How many times as fast one configuration trains as another: by trainings on the same seeds, and windows in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trainables.knobs import KnobTable, identity
from tuning.journal.events import Config, ConfirmedRecord, MeasuredRecord, WindowRecord
from tuning.journal.run import History
from tuning.search.slowing import slowing
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Pair

DRIFT_S2 = 1600.0
"""Two measurements of T seconds each, D seconds apart, count as T / (1 + T D / DRIFT_S2) seconds.

The variance of their ratio is that of the measurements, which falls with T, and that of the machine's pace, which grows
with D. On two cores a window of 1 s is off by about 0.2; half an hour changes the pace by as much and up to 0.39
(docs/log/two_cores.md).
"""
RATE = frozenset(["learning_rate", "schedule", "warmup_frac"])
"""Knobs that no speed depends on, in whatever loop."""
MeasuredT = TypeVar("MeasuredT", bound=MeasuredRecord)
WINDOW_S = 1.5
"""The seconds of a measurement of an earlier version, which did not write them."""


def gain(run: History, of: str, over: str, ours: Config, theirs: Config) -> Gain | None:
    """Returns how many times as fast `ours` is as `theirs`, by all that was measured of both; None without a pair.

    Whole trainings and windows count by their seconds: three windows of a second do not overrule minutes of training.
    """
    trained = _pairs(trainings(run, ours), trainings(run, theirs), lambda record: record.seed)
    rounds = _pairs(windows(run, ours), windows(run, theirs), lambda record: record.round)
    return uncertainty.gain(of, over, rounds, trained)


def windows(run: History, config: Config) -> list[WindowRecord]:
    """Returns a configuration's windows, under whatever name; none if trainings slow down, as these time the start."""
    return [] if slowing(run) else [w for w in run.windows if w.samples_per_s and is_same(w.config, config, run.table)]


def trainings(run: History, config: Config) -> list[ConfirmedRecord]:
    """Returns a configuration's trainings on fresh seeds that came to their end, under whatever name."""
    ended = [r for r in run.confirmed if r.is_ok and r.samples_per_s]
    return [r for r in ended if is_same(r.config, config, run.table)]


def is_same(config: Config, other: Config, table: KnobTable) -> bool:
    """Returns whether two configurations run the same; one that was not written runs as none."""
    return bool(config) and identity(config, table) == identity(other, table)


def is_as_fast(config: Config, other: Config, table: KnobTable) -> bool:
    """Returns whether two configurations differ at most in knobs that no speed depends on."""
    return {name for name, _ in identity(config, table) ^ identity(other, table)} <= RATE


def _pairs(ours: Sequence[MeasuredT], theirs: Sequence[MeasuredT], key: Callable[[MeasuredT], int]) -> list[Pair]:
    """Returns a pair for each seed or round that both have; of several the last."""
    mine, others = ({key(record): record for record in of} for of in (ours, theirs))
    return [_pair(mine[one], others[one]) for one in sorted(mine.keys() & others.keys())]


def _pair(one: MeasuredRecord, other: MeasuredRecord) -> Pair:
    took_s = [_seconds(record) for record in (one, other)]
    # A record is written at its end; the middles are compared.
    apart_s = abs((one.at_s - took_s[0] / 2) - (other.at_s - took_s[1] / 2))
    weight_s = min(took_s) / (1 + min(took_s) * apart_s / DRIFT_S2)
    return Pair(one.samples_per_s or 0.0, other.samples_per_s or 0.0, weight_s)


def _seconds(record: MeasuredRecord) -> float:
    """Returns for how long a speed was measured."""
    trained_s = record.train_s if isinstance(record, ConfirmedRecord) else 0.0
    return max(1e-3, trained_s or record.spans.get("wall_s") or WINDOW_S)
