"""python -m tuning estimate: what a training step needs of a card's memory, before there is a card, and what fits.

Nothing is trained. The step is traced in a process of its own (`tuning.memory.predictor`), once for each coupling of
memory knobs; every micro-batch size follows from that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from trainables.knobs import Scalar
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.config.resolve import option_fault
from tuning.memory.fitting import Cell, Fit, fit
from tuning.memory.levers import Asked, levers
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, default_cache, predict_all
from tuning.report import estimate_lines
from tuning.report.estimate_request import Question, question
from tuning.workers import doctor

HELP = """\
Says what fits a card, without one: the predicted peak of a training step, by micro-batch, type of autocast,
activation checkpointing and adapter.

  python -m tuning estimate workload=nli card=rtx4060
  python -m tuning estimate workload=mine.py card=rtx3090 knobs.micro_batch_size=[1,2,4,8] --json
"""

Predict = Callable[[Sequence[Request]], list[Prediction]]


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    made = argparse.ArgumentParser(
        prog="python -m tuning estimate", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("settings", nargs="*", metavar="key=value", help="as for python -m tuning.run")
    made.add_argument(
        "--kernels",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="whose kernels: cpu is what a virtual card on this machine counts  [auto: the card's]",
    )
    made.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="most seconds of tracing, 1 to 3600  [120]"
    )
    made.add_argument("--no-cache", action="store_true", help="trace again, and keep nothing")
    made.add_argument("--json", action="store_true", help="JSON on stdout")
    return made


def main(argv: Sequence[str], predicts: Predict | None = None) -> int:
    """Returns the exit code; raises ConfigError for a wrong command line.

    `predicts` stands in for the predictor's process, for tests.
    """
    asked = parser().parse_intermixed_args(argv)
    if not 1 <= asked.timeout <= 3600:
        raise ConfigError(f"--timeout {asked.timeout:g}", allowed="1 to 3600 seconds", remedy="--timeout 300")
    began = time.monotonic()
    about = question(load(asked.settings), asked.kernels, doctor.gpus())
    cache = None if asked.no_cache else default_cache()
    answer = answered(about, predicts or (lambda requests: predict_all(requests, timeout_s=asked.timeout, cache=cache)))
    answer = {**answer, "seconds": time.monotonic() - began}
    if asked.json:
        print(json.dumps(answer))
        return 0
    for line in estimate_lines.lines(answer):
        print(line)
    return 0


def answered(about: Question, predicts: Predict) -> dict[str, Any]:
    """Returns the answer as plain values: a row for each coupling with a cell for each micro-batch size, and levers.

    Raises ConfigError where the workload refuses its options.
    """
    known: dict[str, Prediction] = {}

    def of(knobs: Mapping[str, Scalar]) -> Prediction:
        key = json.dumps(dict(knobs), sort_keys=True)
        if key not in known:
            known[key] = predicts([_request(about, knobs)])[0]
        return known[key]

    couplings = [{**about.knobs, **coupling} for coupling in about.couplings]
    predictions = _side_by_side([_request(about, knobs) for knobs in couplings], predicts)
    known |= {json.dumps(knobs, sort_keys=True): one for knobs, one in zip(couplings, predictions, strict=True)}
    _refuse_what_the_workload_refuses(about, predictions)
    fits = [
        fit(coupling, found, about.micro_batches, about.usable_bytes, about.kernels)
        for coupling, found in zip(about.couplings, predictions, strict=True)
    ]
    wanted = about.micro_batches[0] if about.asked else 1
    none_fits = about.usable_bytes is not None and any(p.traces for p in predictions)
    none_fits = none_fits and not any((one.largest or 0) >= wanted for one in fits)
    helping = []
    if none_fits and about.usable_bytes is not None and predictions[0].peak(wanted) is not None:
        helping = levers(Asked(couplings[0], wanted, about.usable_bytes, about.kernels, about.read), of)
    return {
        "workload": about.name,
        "card": {
            "name": about.card,
            "memory_bytes": about.memory_bytes,
            "usable_bytes": about.usable_bytes,
            "capability": list(about.capability),
        },
        "kernels": about.kernels,
        "knobs": dict(about.knobs),
        "searched": {name: list(values) for name, values in about.searched.items()},
        "notes": list(about.notes),
        "rows": [_row(one) for one in fits],
        "wanted": wanted if none_fits else None,
        "levers": [asdict(lever) for lever in helping],
    }


def _request(about: Question, knobs: Mapping[str, Scalar]) -> Request:
    return Request(about.workload, about.options, knobs, about.kernels, about.capability)


def _side_by_side(requests: Sequence[Request], predicts: Predict) -> list[Prediction]:
    """Returns the predictions, traced in as many processes as there are cores; none is started for a single one."""
    count = max(1, min(doctor.cores(), len(requests) // 2))
    parts = [requests[n::count] for n in range(count)]
    with ThreadPoolExecutor(max_workers=count) as pool:
        found = list(pool.map(predicts, parts))
    return [found[n % count][n // count] for n in range(len(requests))]


def _refuse_what_the_workload_refuses(about: Question, predictions: Sequence[Prediction]) -> None:
    """Raises ConfigError where the workload says that its options or its data are wrong; that is no prediction."""
    for one in predictions:
        for note in one.notes if one.confidence == "none" else ():
            if note.startswith(("WorkloadError: ", "DataError: ")):
                raise option_fault(note.partition(": ")[2], about.options)


def _row(one: Fit) -> dict[str, Any]:
    return {
        "knobs": dict(one.knobs),
        "confidence": one.confidence,
        "notes": list(one.notes),
        "cells": [_cell(c) for c in one.cells],
        "largest": one.largest,
        "largest_cell": None if one.largest_cell is None else _cell(one.largest_cell),
    }


def _cell(one: Cell) -> dict[str, Any]:
    own = {"needed_bytes": one.needed_bytes, "share_frac": one.share_frac, "verdict": one.verdict}
    return {**own, **asdict(one.peak)}
