"""How far a step's peak, derived from two traces, is from one that is traced; and how long `estimate` takes.

    python -m benchmarks.symbolic_check --out benchmarks/results/symbolic_check.jsonl
    python -m benchmarks.symbolic_check --only estimate

First part: each workload is traced at micro-batches of 2 and 3 and at sixteen others. What `memory.symbolic` derives
from the two is replayed beside the sixteen: errors of the bytes allocated and reserved, and of the smallest card.
Second part: the seconds of `python -m tuning estimate`, with an empty cache and again, also for a decoder of 1 B
parameters with DoRA, of which there is a configuration and no weights. A line of JSON for each row, a table at the end.
Rows that the file holds already are not run again, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from tuning.config.load import load
from tuning.memory.peaks import peak_of
from tuning.memory.prediction import Peak, Prediction
from tuning.memory.symbolic import between
from tuning.report.estimate_request import question

SOURCES = (2, 3)
SIZES = (1, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
WORKLOADS = ("nli", "pointer", "headpose", "temporal", "signals")
BARS = {"allocated_bytes": 0.002, "reserved_bytes": 0.02}
COLD_S, WARM_S = 60.0, 2.0
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
DECODER = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}


def main() -> int:
    """Returns 0 where every bar is met."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="a .jsonl to write")
    made.add_argument("--only", choices=("symbolic", "estimate"))
    made.add_argument("--workload", choices=WORKLOADS, action="append")
    asked = made.parse_args()
    names = asked.workload or list(WORKLOADS)
    about = provenance("symbolic_check")
    kept = asked.out.read_text().splitlines() if asked.out is not None and asked.out.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in kept]
    for part, cases in (("symbolic", symbolic(names)), ("estimate", estimates(names))):
        for case, measure in cases if asked.only in (None, part) else ():
            key = {"part": part, **case}
            if any(all(row[name] == value for name, value in key.items()) for row in rows if row["part"] == part):
                continue
            rows.append({**key, **measure(), **about})
            publish(rows[-1], asked.out, append=True)
    print(table(rows))
    return 0 if all(row["met"] for row in rows) else 1


def symbolic(names: list[str]) -> Iterator[Case]:
    """Yields each workload, type of autocast and checkpointing, with what measures the largest and the mean error."""
    for name in names:
        about = question(load([f"workload={name}", "card=rtx4060"]), "cuda", [])
        for coupling in about.couplings:
            request = {
                "workload": name,
                "options": dict(about.options),
                "knobs": {**about.knobs, **coupling},
                "kernels": "cuda",
                "capability": list(about.capability),
            }
            yield {"workload": name, **coupling}, functools.partial(compared, request)


def compared(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the errors of one configuration, as shares of what is traced."""
    found = traced(request)
    if not found.traces:
        return {"met": False, "notes": found.notes}
    sources = [trace for trace in found.traces if trace.micro_batch in SOURCES]
    derived = between(*sources)
    if derived is None:
        return {"met": False, "notes": ["the logs of the two sizes differ"]}
    errors: dict[str, list[float]] = {}
    began = time.perf_counter()
    peaks = {trace.micro_batch: peak_of(derived.at(trace.micro_batch)) for trace in found.traces}
    replay_s = time.perf_counter() - began
    for trace in found.traces:
        if trace.micro_batch not in SOURCES:
            direct = peak_of(trace)
            for kind in ("live_bytes", "allocated_bytes", "reserved_bytes", "capacity_bytes"):
                errors.setdefault(kind, []).append(_error(peaks[trace.micro_batch], direct, kind))
    return {
        "sizes": len(next(iter(errors.values()))),
        "events": len(sources[0].events),
        "max_error": {kind: max(values) for kind, values in errors.items()},
        "mean_error": {kind: sum(values) / len(values) for kind, values in errors.items()},
        "trace_s": found.seconds,
        "replay_s": replay_s,
        "met": all(max(errors[kind]) <= bar for kind, bar in BARS.items()),
    }


def traced(request: Mapping[str, Any]) -> Prediction:
    """Returns the traces at all sizes, from the tracer's own process."""
    asked = json.dumps({**request, "micro_batches": sorted({*SOURCES, *SIZES})})
    command = [sys.executable, "-m", "tuning.memory.tracing"]
    done = subprocess.run(command, input=asked + "\n", capture_output=True, text=True, timeout=600, check=True)
    return Prediction.from_json(done.stdout.splitlines()[-1])


def estimates(names: list[str]) -> Iterator[Case]:
    """Yields each workload and the decoder, with what measures the seconds of the command, cold and from its cache."""
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "decoder"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(DECODER))
        decoder = [f"workload.model={model}", "workload.max_length=512", "knobs.micro_batch_size=[1,2,4,8]"]
        decoder += ["knobs.amp_dtype=bf16", "knobs.activation_checkpointing=true", "--timeout", "600"]
        cases = {name: [f"workload={name}"] for name in names}
        for name, settings in {**cases, "1B DoRA": ["workload=nli", *decoder]}.items():
            yield {"workload": name}, functools.partial(seconds, settings, Path(place) / f"cache-{name}")


def seconds(settings: list[str], cache: Path) -> dict[str, Any]:
    """Returns the seconds of `estimate` with an empty cache and again: wall, and of the processor in all processes."""
    before = os.times()
    cold_s, answer = _timed([*settings, "card=rtx3090", "--json"], cache)
    after = os.times()
    warm_s, again = _timed([*settings, "card=rtx3090", "--json"], cache)
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    same = answer["rows"] == again["rows"] and all(row["cells"] for row in answer["rows"])
    return {
        "cold_s": cold_s,
        "cold_cpu_s": cpu_s,
        "warm_s": warm_s,
        "largest": [row["largest"] for row in answer["rows"]],
        "met": cold_s <= COLD_S and warm_s <= WARM_S and same,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as two Markdown tables."""
    lines = ["| workload | dtype | ckpt | sizes | allocated max | reserved max | capacity max | events | met |"]
    lines.append("|" + "---|" * 9)
    for row in rows:
        if row["part"] == "symbolic" and "max_error" in row:
            most = [
                f"{100 * row['max_error'][f'{kind}_bytes']:.3f} %" for kind in ("allocated", "reserved", "capacity")
            ]
            ckpt = "on" if row["activation_checkpointing"] else "off"
            cells = [row["workload"], row["amp_dtype"], ckpt, row["sizes"], *most, row["events"], row["met"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| estimate | cold s | processor s | again s | met |", "|---|---|---|---|---|"]
    for row in rows:
        if row["part"] == "estimate":
            times = f"{row['cold_s']:.1f} | {row['cold_cpu_s']:.1f} | {row['warm_s']:.2f}"
            lines.append(f"| {row['workload']} | {times} | {row['met']} |")
    return "\n".join(lines)


def _timed(settings: list[str], cache: Path) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tuning", "estimate", *settings],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - began, json.loads(done.stdout)


def _error(derived: Peak, direct: Peak, kind: str) -> float:
    truth = getattr(direct, kind)
    return abs(getattr(derived, kind) - truth) / truth if truth else 0.0


if __name__ == "__main__":
    sys.exit(main())
