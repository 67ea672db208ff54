"""How far predicted GPU memory is from what nvidia-smi measured of timm's models on an A100.

    PYTHONPATH=FOLDER_OF_TIMM python -m benchmarks.gpu_truth --table timm_a100.csv --traces traces.jsonl --models 200

The table has model, batch_size, measured_mib and faketensor_mib; it is not ours, so what is written are figures
computed from it, no row. Each model's step is traced at two sizes and replayed at the table's (`timm_steps`), with
cuDNN's timing on; traces are kept, so a run that was ended goes on where it was. Half of the models, by a hash of
their names, are for fitting constants (`--part fitted`), the other half for judging them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import timm_steps
from benchmarks.document import provenance, publish
from trainables.knobs import LOOP
from tuning.memory.allocator import MIB_BYTES, replay
from tuning.memory.convolutions import ConvolutionKernel, workspaces_of
from tuning.memory.guard import MOST_P_OOM, MemoryGuard
from tuning.memory.need import MARGINS, Margin
from tuning.memory.prediction import Prediction
from tuning.memory.profile import MemoryProfile, Point
from tuning.memory.trace import Event, Trace

CONTEXT_BYTES = 1725 * MIB_BYTES
"""What the card has in use beside torch's allocator: context, libraries and their kernels; fitted on one half."""
CARDS_MIB = {8: 8_192, 12: 12_288, 16: 16_384, 24: 24_576, 40: 40_360}
"""By name in GB. The last is the table's own card: the most that any run had of it."""
NEAR_MIB, FULL_MIB = 39_000, 40_000
"""A run that reports more than the first may have run out of memory, and of more than the second did."""
FEW = 4
"""A model with no more convolutions has them to cut its images into patches."""
LEVELS = (0.80, 0.95)
THRESHOLDS = (MOST_P_OOM, 0.2, 0.1, 0.05, 0.03, 0.01)
"""A run is said to fit up to so large a P(OOM): the first is a search's, the others tell what a stricter one costs."""
DRAWN = 200


@dataclass(frozen=True)
class Row:
    """A measured run; `measured_mib` None: it ran out of memory on the card. `faketensor_mib`: what FakeTensor said."""

    model: str
    batch_size: int
    measured_mib: float | None
    faketensor_mib: float


@dataclass(frozen=True)
class Predicted:
    """A row with what was predicted, context included, the family of its model and the source of the profile.

    `p_oom` is by the card's GB. `need_mib`: the least that this batch or a larger one of the model reported, infinite
    if none lived. A need never falls with the batch; what is above it was taken because the card had room, as by
    cuDNN's timing, which does with less where there is less.
    """

    row: Row
    predicted_mib: float
    family: str
    p_oom: Mapping[int, float]
    margin: Margin
    need_mib: float

    @property
    def error_frac(self) -> float:
        """The error of a row that fitted."""
        return self.predicted_mib / (self.row.measured_mib or math.nan) - 1


def main() -> int:
    """Returns 0 where every bar is met."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--table", type=Path, required=True, help="the measured runs, a .csv")
    made.add_argument("--traces", type=Path, required=True, help="a .jsonl that keeps the traces; may not exist yet")
    made.add_argument("--part", choices=("fitted", "judged"), default="judged", help="which half of the models")
    made.add_argument("--models", type=int, default=DRAWN, help="so many are drawn of it")
    made.add_argument("--seed", type=int, default=0, help="of the draw")
    made.add_argument("--not-seed", type=int, help=f"leave out the {DRAWN} models of this draw")
    made.add_argument("--context-mib", type=float, default=CONTEXT_BYTES / MIB_BYTES)
    made.add_argument("--worst", type=int, default=0, help="show so many of the largest errors")
    made.add_argument("--out", type=Path, help="a .jsonl to add the figures to")
    asked = made.parse_args()
    rows = read(asked.table)
    models = {row.model for row in rows}
    seen = () if asked.not_seed is None else drawn(models, asked.part, DRAWN, asked.not_seed)
    names = drawn(models - set(seen), asked.part, asked.models, asked.seed)
    _trace_missing(names, asked.traces)
    found = list(predicted(rows, names, asked.traces, asked.context_mib))
    figures = {"untraced": sorted(set(names) - {one.row.model for one in found}), **summary(found)}
    told = ("part", "models", "seed", "not_seed", "context_mib")
    head = {key: str(value) for key, value in vars(asked).items() if key in told}
    for one in sorted((p for p in found if p.row.measured_mib), key=lambda p: -abs(p.error_frac))[: asked.worst]:
        print(f"{one.row.model} {one.row.batch_size} {one.family}: {one.error_frac:+.1%}", file=sys.stderr)
    publish({**provenance("gpu_truth"), "asked": head, **figures}, asked.out, append=True)
    return 0 if figures["met"] else 1


def read(table: Path) -> list[Row]:
    """Returns the runs of which it is known how they ended.

    A run had at least the tensors that FakeTensor counts: one below them died, and so did runs of a model that report
    the same at several sizes. Those are left out unless the line through the two sizes before leaves the card, and so
    are runs that nearly filled it.
    """
    by_model: dict[str, list[Row]] = defaultdict(list)
    with table.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            figures = float(line["measured_mib"]), float(line["faketensor_mib"] or "nan")
            by_model[line["model"]].append(Row(line["model"], int(line["batch_size"]), *figures))
    return [row for of_one in by_model.values() for row in _ended(sorted(of_one, key=lambda r: r.batch_size))]


def _ended(rows: Sequence[Row]) -> Iterator[Row]:
    figures = [row.measured_mib for row in rows]
    lived: list[tuple[int, float]] = []
    for row in rows:
        measured = row.measured_mib or 0.0
        if measured < NEAR_MIB and figures.count(measured) == 1 and not measured < row.faketensor_mib:
            lived.append((row.batch_size, measured))
            yield row
        elif measured >= FULL_MIB or _continued(lived, row.batch_size) > CARDS_MIB[40]:
            yield replace(row, measured_mib=None)


def _continued(lived: Sequence[tuple[int, float]], batch_size: int) -> float:
    """Returns the line through the last two runs that lived, at a larger batch; 0 without two."""
    if len(lived) < 2:
        return 0.0
    (m0, b0), (m1, b1) = lived[-2:]
    return b1 + (b1 - b0) / (m1 - m0) * (batch_size - m1)


def drawn(models: Iterable[str], part: str, count: int, seed: int) -> list[str]:
    """Returns so many models of a part, in the order of the draw; all where there are no more."""
    found = [
        name for name in sorted(models) if (hashlib.sha256(name.encode()).digest()[-1] % 2 == 1) == (part == "judged")
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


def _trace_missing(names: Sequence[str], traces: Path) -> None:
    """Adds the models that the file lacks, each as soon as it is traced; one that ends the process has its line too."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    while missing := _missing(names, traces):
        with traces.open("a", encoding="utf-8") as out:
            command = [sys.executable, "-m", "benchmarks.timm_steps"]
            done = subprocess.run(command, input="\n".join(missing), stdout=out, text=True, check=False, env=env)
        if done.returncode > 0:
            raise SystemExit("tracing does not start; its reason is above")
        if done.returncode < 0 and (left := _missing(names, traces)):  # it may also die when all is done
            with traces.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"model": left[0], "error": f"signal {-done.returncode}"}) + "\n")


def _missing(names: Sequence[str], traces: Path) -> list[str]:
    known = {line["model"] for line in _lines(traces)}
    return [name for name in names if name not in known]


def _lines(traces: Path) -> Iterator[dict[str, Any]]:
    if traces.exists():
        with traces.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


# -- predictions -------------------------------------------------------------------------------------------------------


def predicted(rows: Iterable[Row], names: Sequence[str], traces: Path, context_mib: float) -> Iterator[Predicted]:
    """Yields each row of the named models that could be traced."""
    wanted: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        wanted[row.model].append(row)
    for line in _lines(traces):
        if line["model"] not in names or "error" in line:
            continue
        found = Prediction.from_json(line["prediction"])
        if found.trace(max(timm_steps.SIZES) + 1) is None:  # its step depends on the batch: no two give the others
            continue
        family = family_of(found.traces[0])
        source = "workspaces modelled" if any(line["convolutions"][0].values()) else "traced"
        sizes = {row.batch_size: reserved_bytes(line, found, row.batch_size) for row in wanted[line["model"]]}
        if not sizes:
            continue
        profile = MemoryProfile(4 * line["parameters"], tuple(Point(m, b, b) for m, b in sizes.items()), source)
        for row in wanted[line["model"]]:
            p_oom, expected = dict[int, float](), 0
            for gib, card_mib in CARDS_MIB.items():
                guard = MemoryGuard(round((card_mib - context_mib) * MIB_BYTES), {(): profile}, LOOP)
                p_oom[gib] = guard.p_oom((), row.batch_size) or 0.0
                expected = guard.predicted_bytes((), row.batch_size) or 0
            of_model = wanted[line["model"]]
            need_mib = min(o.measured_mib or math.inf for o in of_model if o.batch_size >= row.batch_size)
            yield Predicted(row, expected / MIB_BYTES + context_mib, family, p_oom, MARGINS[source], need_mib)


def family_of(trace: Trace) -> str:
    """Returns whether a model attends, convolves, or does both; what does neither counts as a transformer."""
    if trace.ops.count("aten.convolution.default") // 2 <= FEW:  # an operator's result, and its workspaces
        return "transformer"
    return (
        "mixed"
        if any("_softmax" in op.replace("_log_softmax", "") or "dot_product" in op for op in trace.ops)
        else "convolutional"
    )


def reserved_bytes(line: Mapping[str, Any], found: Prediction, batch_size: int) -> int:
    """Returns the most that torch's allocator has of the card in two steps of a batch and in the loader's stream."""
    trace = found.trace(batch_size)
    if trace is None:
        raise ValueError(f"{line['model']}: the births of its two traces differ")
    more = batch_size - found.traces[0].micro_batch

    def convolutions(ident: int) -> Iterator[ConvolutionKernel]:
        for one, other in zip(*(each.get(str(ident), []) for each in line["convolutions"]), strict=True):
            yield ConvolutionKernel(**{key: _at(one[key], other[key], more) for key in one})

    events = list(two_steps(trace, convolutions))
    image_bytes = 4 * batch_size * math.prod(line["image"])
    return replay(events).peak_reserved_bytes + replay(loader(image_bytes)).peak_reserved_bytes


def _at(one: Any, other: Any, more: int) -> Any:
    """Returns a number of the first trace, or several, at `more` samples than it has."""
    if isinstance(one, list):
        return tuple(_at(*pair, more) for pair in zip(one, other, strict=True))
    return one if isinstance(one, str) else one + more * (other - one)


def two_steps(trace: Trace, convolutions: Callable[[int], Iterable[ConvolutionKernel]]) -> Iterator[Event]:
    """Yields the first step, in which cuDNN times its kernels, and the second, which finds the optimiser's state made.

    The batch is left out; see `loader`. What the first step leaves, such as its loss, dies when the second has its own.
    """
    begin = next(at for at, phase in trace.marks if phase == "forward")
    kinds, most = trace.categories, len(trace.ops)
    yield from (event for event in trace.events[:begin] if kinds[event[0]] != "batch")
    timed: set[ConvolutionKernel] = set()
    born = {own for own, size in trace.events[begin:] if size >= 0}
    left = born - {own for own, size in trace.events[begin:] if size < 0}
    ident = 3 * most
    for step in (0, 1):
        places = set[int]()
        for own, size in trace.events[begin:]:
            some = list(convolutions(own)) if size >= 0 else []
            if some:
                places.add(own)
                for hidden in (each for one in some for each in workspaces_of(one, timed)):
                    if isinstance(hidden, tuple):
                        yield hidden
                    elif hidden > 0:
                        ident += 1
                        yield from ((ident, hidden), (ident, -1))
            elif own not in places and kinds[own] != "batch" and not (step and size >= 0 and kinds[own] == "optimizer"):
                yield own + step * most if own in born else own, size
                if step and size >= 0 and own in left:
                    yield own, -1


def loader(image_bytes: int) -> Iterator[Event]:
    """Yields what timm's loader has in its own stream: bytes turned to floats; of three batches, when it loads one."""
    for batch in range(0, 6, 2):
        yield from ((batch, image_bytes // 4), (batch + 1, image_bytes), (batch, -1))


# -- figures -----------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Predicted]) -> dict[str, Any]:
    """Returns the errors, the confusion of what fits, how often the intervals hold, and whether every bar is met."""
    fitted = [one for one in found if one.row.measured_mib is not None]
    constant = statistics.median((o.row.measured_mib or 0) - o.row.faketensor_mib for o in fitted)
    beside = [(o.row.faketensor_mib + constant) / (o.row.measured_mib or 1) - 1 for o in fitted]
    errors = _errors(o.error_frac for o in fitted)
    families = {
        name: _errors(o.error_frac for o in fitted if o.family == name) for name in sorted({o.family for o in fitted})
    }
    batches = {
        m: _errors(o.error_frac for o in fitted if o.row.batch_size == m)
        for m in sorted({o.row.batch_size for o in fitted})
    }
    largest = sorted(fitted, key=lambda o: -(o.row.measured_mib or 0))[: len(fitted) // 10]
    held = {level: _held(fitted, level) for level in LEVELS}
    judged = {threshold: _judged(found, threshold) for threshold in THRESHOLDS}
    (false_fits, over), (false_refusals, under) = judged[MOST_P_OOM]
    confusion = {gib: _judged(found, MOST_P_OOM, (gib,)) for gib in CARDS_MIB}
    met = {
        "median 2.5 %": errors["median"] <= 0.025,
        "90th 10 %": errors["p90"] <= 0.10,
        "mean 1 %": abs(errors["mean"]) <= 0.01,
        "false fits 1 %": false_fits <= 0.01 * over,
        "false refusals 3 %": false_refusals <= 0.03 * under,
        "convolutional 90th 15 %": families.get("convolutional", errors)["p90"] <= 0.15,
        "80 % interval": 0.75 <= held[0.80] <= 0.88,
        "95 % interval": 0.92 <= held[0.95] <= 0.98,
    }
    return {
        "models": len({o.row.model for o in found}),
        "ran_out_rows": len(found) - len(fitted),
        "errors": errors,
        "faketensor": {**_errors(beside), "constant_mib": round(constant)},
        "families": families,
        "batch_sizes": batches,
        "not_undercut": _errors(o.error_frac for o in fitted if not _undercut(o.row, fitted)),
        "largest_tenth": _errors(o.error_frac for o in largest),
        "confusion": confusion,
        "false_fits": [false_fits, over],
        "false_refusals": [false_refusals, under],
        "by_need": _judged(found, MOST_P_OOM, by_need=True),
        "by_threshold": judged,
        "intervals": held,
        "bars": met,
        "met": all(met.values()),
    }


def _judged(
    found: Sequence[Predicted], threshold: float, cards: Iterable[int] = CARDS_MIB, *, by_need: bool = False
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the false `fits` and of how many that do not fit, the false refusals and of how many that fit.

    A run fits a card that has what it reported or, `by_need`, what it needed.
    """
    fits, refused = [0, 0], [0, 0]
    for one in found:
        took_mib = one.need_mib if by_need else one.row.measured_mib or math.inf
        for gib in cards:
            of_kind, said = (refused, False) if took_mib <= CARDS_MIB[gib] else (fits, True)
            of_kind[0] += (one.p_oom[gib] <= threshold) is said
            of_kind[1] += 1
    return (fits[0], fits[1]), (refused[0], refused[1])


def _errors(errors: Iterable[float]) -> dict[str, float]:
    found = list(errors)
    sizes = sorted(map(abs, found))
    figures = {
        "median": statistics.median(sizes),
        "p90": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "mean": statistics.mean(found),
        "median_signed": statistics.median(found),
        "most": sizes[-1],
    }
    return {"rows": len(found), **{name: round(value, 4) for name, value in figures.items()}}


def _undercut(row: Row, found: Sequence[Predicted]) -> bool:
    """Returns whether a larger batch of the model needed less, so that something else was measured with this one."""
    larger = (o.row for o in found if o.row.model == row.model and o.row.batch_size > row.batch_size)
    return any((other.measured_mib or 0) < (row.measured_mib or 0) for other in larger)


def _held(found: Sequence[Predicted], level: float) -> float:
    """Returns the share of rows in the middle of what was held possible, where a share of `level` should be."""
    places = (one.margin.share_below(math.log1p(one.error_frac) / one.margin.spread_frac) for one in found)
    return round(sum(abs(place - 0.5) <= level / 2 for place in places) / len(found), 3)


if __name__ == "__main__":
    sys.exit(main())
