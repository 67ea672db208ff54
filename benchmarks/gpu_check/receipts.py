"""Part `receipts`: what each optimisation buys on this device: the best less one knob, `before` plus one, in pairs.

Best is that of part `workloads` where it has run, else `after`. The pairs of a workload are kept in a journal, so that
what the minutes of one run do not hold, the next run measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import knob_cases
from benchmarks.gpu_check.cards import Described, described, this
from benchmarks.gpu_check.place import OutOfTime, Place
from benchmarks.gpu_check.workloads import best_of, lacking, options_of
from trainables.knobs import Scalar
from trainables.workload import BUILT_IN
from tuning.config.cards import Card, refuse
from tuning.config.errors import TuningError
from tuning.journal.records import Journal, Record
from tuning.report.ablation_results import ablation_results
from tuning.search import ablate
from tuning.search.ablation import Pair, pairs
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

CARD, SMALL = (3, 0.4), (2, 0.1)
"""Rounds, and seconds of a window."""
SMALL_WORKLOADS, SMALL_PAIRS = ("signals",), 2
"""Of the same, where it runs small."""


def run(place: Place) -> dict[str, Any]:
    """Returns the receipts of each workload; `finished` is whether every pair has all its rounds."""
    best = dict(best_of(place))
    found: dict[str, Any] = {"rows": [], "finished": True}
    for name in SMALL_WORKLOADS if place.small else BUILT_IN:
        row, whole = measured(place, name, best.get(name))
        found["rows"].append(row)
        found["finished"] = found["finished"] and whole
    return found


def chosen(name: str, about: Described, best: dict[str, Scalar] | None, card: Card) -> list[Pair]:
    """Returns the pairs of the ablation, and those cases of `knob_cases` whose knobs it does not have already."""
    ablated, _ = pairs(best or about.after, about.before)
    have = {pair.knobs for pair in ablated}
    more = [p for p in knob_cases.pairs(name, cuda=card.device == "cuda") if p.knobs not in have]
    both = [p for p in [*ablated, *more] if not refuse(card, p.with_) and not refuse(card, p.without)]
    return both[:SMALL_PAIRS] if card.device == "cpu" else both


def measured(place: Place, name: str, best: dict[str, Scalar] | None) -> tuple[dict[str, Any], bool]:
    """Returns a workload's receipts, and whether all of its pairs were measured."""
    if why := lacking(name):
        return {"workload": name, "why": why}, True
    card = this(place)
    about = described(name, card)
    setting = WorkerConfig(name, options_of(place, name, about), place.device, place.cores, None, place.seed)
    todo = chosen(name, about, best, card)
    rounds, window_s = SMALL if place.small else CARD
    path = place.out / f"receipts_{name}_{place.device}_{place.revision}.jsonl"
    if place.again:
        path.unlink(missing_ok=True)
    row: dict[str, Any] = {"workload": name, "base": "best" if best else "after", "pairs": len(todo), "rounds": rounds}
    with Journal.open(path, create=not path.exists()) as journal:
        whole = True
        try:
            _within(place, setting, journal, todo, rounds, window_s)
        except OutOfTime:
            whole = False
        except TuningError as error:
            row["why"] = str(error)[:300]
        return {**row, "receipts": _raw(journal.records, about)}, whole


def _within(
    place: Place, setting: WorkerConfig, journal: Journal, todo: Sequence[Pair], rounds: int, window_s: float
) -> None:
    """Measures what the journal lacks; raises OutOfTime after the pair at which the part's minutes are over."""
    have = sum(r.event == "receipt" for r in journal.records)
    if have >= rounds * len(todo):
        return
    place.check()
    with Worker(setting) as profiler:
        ablate.measure(profiler, journal, todo, rounds, window_s, lambda _: place.check())


def _raw(records: Sequence[Record], about: Described) -> list[dict[str, Any]]:
    """Returns the receipts as plain values, with the words of the verdict."""
    return [{**asdict(one), "verdict": one.verdict} for one in ablation_results(records, about.claims_of)]
