"""Writes `sample_run/trials.jsonl`: a made-up run with every event and most outcomes, for tests of what prints runs.

    python tests/data/make_sample_run.py

No figure in it was measured; the run says so in its first note. The numbers come from a seeded generator.
"""

from __future__ import annotations

import json
import random
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

START = datetime(2026, 11, 21, 10, 34, 12, tzinfo=UTC).timestamp()
GIB = 2**30
SYNTHETIC = "synthetic: this run was made up by tests/data/make_sample_run.py, nothing in it was measured"

BEFORE = {
    "learning_rate": 5e-4, "batch_size": 4, "micro_batch_size": 4, "num_workers": 4, "prefetch_factor": 2,
    "amp_dtype": "fp32", "sync_every_step": True, "set_to_none": False, "activation_checkpointing": False,
    "fused_optimizer": False, "length_bucketing": False, "ram_cache": False, "adapter": "dora", "adapter_rank": 16,
}  # fmt: skip
AFTER = BEFORE | {
    "batch_size": 12, "micro_batch_size": 12, "num_workers": 8, "prefetch_factor": 4, "amp_dtype": "bf16",
    "sync_every_step": False, "set_to_none": True, "activation_checkpointing": True, "fused_optimizer": True,
}  # fmt: skip
PROBED = AFTER | {"activation_checkpointing": False, "num_workers": 0, "ram_cache": True, "length_bucketing": True}

# micro-batch, workers, dtype -> samples/s, peak GiB; None is an OOM
PROBES: list[tuple[str | None, dict[str, Any], float | None, float]] = [
    ("before", BEFORE, 33.1, 1.9),
    ("after", AFTER, 50.4, 1.4),
    (None, PROBED | {"micro_batch_size": 8, "amp_dtype": "fp32"}, 44.7, 2.6),
    (None, PROBED | {"micro_batch_size": 8}, 61.0, 1.2),
    (None, PROBED | {"micro_batch_size": 16, "num_workers": 1}, 57.6, 2.1),
    (None, PROBED | {"micro_batch_size": 64, "amp_dtype": "fp32"}, None, 24.1),
]
# slot, learning rate, batch, micro-batch, outcome, accuracy, seconds of training
TRIALS: list[tuple[int, float, int, int, str, float | None, float]] = [
    (0, 5e-4, 16, 8, "ok", 0.898, 19.0),
    (1, 2.1e-3, 64, 8, "stopped", 0.741, 5.1),
    (1, 3e-4, 32, 8, "stopped", 0.822, 5.0),
    (1, 9e-4, 16, 8, "ok", 0.912, 19.4),
    (0, 2.9e-3, 16, 8, "diverged", None, 3.2),
    (0, 4e-4, 16, 16, "ok", 0.893, 20.3),
    (1, 1.3e-3, 64, 64, "oom", None, 0.0),
    (1, 6.1e-4, 32, 8, "ok", 0.908, 18.1),
    (0, 2.4e-4, 64, 8, "stopped", 0.702, 5.2),
    (0, 1.0e-3, 12, 8, "ok", 0.915, 21.6),
    (1, 1.6e-3, 32, 8, "stopped", 0.800, 5.3),
]
CONFIRMED = {
    "best": (61.2, {11: 0.905, 12: 0.909, 13: 0.904}),
    "after": (50.6, {11: 0.884}),
    "before": (33.2, {11: 0.887}),
}


class Script:
    """Collects events on a clock of its own."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.now = START
        self.random = random.Random(7)

    def add(self, event: str, after_s: float = 0.0, **fields: Any) -> None:
        """Appends an event `after_s` seconds later."""
        self.now += after_s
        stamp = datetime.fromtimestamp(self.now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.lines.append({"seq": len(self.lines), "t": stamp, "event": event, **fields})

    def near(self, value: float, frac: float) -> float:
        """Returns `value` with some noise."""
        return round(value * (1 + self.random.gauss(0, frac)), 3)


def study(script: Script) -> None:
    """What is asked for, where it runs, and the note that none of it was measured."""
    named = {"source": "a made-up review", "claims": "40 -> 160 samples/s (4.0x); RTX 3090"}
    script.add(
        "study", id="20261121-103412-3f2a", workload="nli", schema=1, seed=0,
        command="python -m tuning.run workload=nli card=rtx3090",
        versions={"cardtune": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        device={"name": "Example CPU", "type": "cpu", "cores": 2, "threads": 2, "memory_bytes": 16 * GIB},
        card={"name": "rtx3090", "cap_bytes": int(23.2 * GIB), "virtual": True},
        objectives={"accuracy": "max", "samples_per_s": "max"},
        config={"workload": {"ref": "nli", "name": "nli", "options": {"model": None, "layers": 3}}, "named": named},
        baselines={"majority": {"accuracy": 0.5}, "hypothesis-only": {"accuracy": 0.57}},
        train_samples=1200, val_samples=300, horizon_samples=1200, concurrency=2, threads=2,
    )  # fmt: skip
    script.add("note", 0.05, text=SYNTHETIC)
    script.add("stage", 4.4, stage="estimate", state="start")
    script.add(
        "footprint", 2.9, coupling={"amp_dtype": "fp32", "activation_checkpointing": False, "adapter": "dora"},
        parameter_bytes=90_400_000, gradient_bytes=3_100_000, optimizer_bytes=6_200_000, fixed_bytes=99_700_000,
        bytes_per_sample=311_000_000, measured=[[1, 410_000_000], [2, 721_000_000]],
    )  # fmt: skip
    script.add("stage", 0.2, stage="estimate", state="end", wall_s=3.1)


def probes(script: Script) -> None:
    """Six configurations timed, one of which does not fit."""
    script.add("stage", stage="probe", state="start")
    began = script.now
    refused = PROBED | {"micro_batch_size": 128, "amp_dtype": "fp32"}
    script.add(
        "refused", config=refused, predicted_bytes=int(39.9 * GIB), cap_bytes=int(23.2 * GIB),
        reason="predicted peak 39.9 GiB is over the cap of 23.2 GiB", stage="probe",
    )  # fmt: skip
    for name, config, rate, peak_gib in PROBES:
        windows = [script.near(rate, 0.015) for _ in range(4)] if rate else []
        wall_s = 5.6 if rate else 1.1
        script.add(
            "probe", wall_s + 0.15, name=name, config=config, outcome="ok" if rate else "oom",
            samples_per_s=sum(windows) / 4 if windows else None, spread_frac=0.021 if rate else None, windows=windows,
            micro_step_s=0.14, optimizer_step_s=0.01, data_wait_frac=0.21 if name == "before" else 0.01,
            peak_allocated_bytes=int(peak_gib * GIB), wall_s=wall_s,
            message="" if rate else "tried to allocate 2.10 GiB of 23.20 GiB",
        )  # fmt: skip
    script.add("stage", stage="probe", state="end", wall_s=round(script.now - began, 3))


def search(script: Script) -> None:
    """Eleven trials in two slots and one refusal; written in the order in which they end."""
    script.add("stage", 0.3, stage="search", state="start")
    began = script.now
    free_at = [began + 1.2, began + 1.3]
    events: list[tuple[float, str, dict[str, Any]]] = []
    for index, row in enumerate(TRIALS):
        slot, train_s = row[0], row[6]
        first = free_at[slot] + 0.04
        evaluate_s = 0.9 if row[4] in ("ok", "stopped") else 0.0
        end = first + train_s + evaluate_s
        events += trial_events(script, index, row, first, end, evaluate_s)
        free_at[slot] = end
    for at, event, fields in sorted(events, key=lambda e: e[0]):
        script.add(event, max(0.0, at - script.now), **fields)
    script.add(
        "refused", 0.1, config=PROBED | {"batch_size": 64, "micro_batch_size": 64, "amp_dtype": "fp32"},
        predicted_bytes=int(25.3 * GIB), cap_bytes=int(23.2 * GIB),
        reason="predicted peak 25.3 GiB is over the cap of 23.2 GiB", stage="search",
    )  # fmt: skip
    script.add("stage", 0.1, stage="search", state="end", wall_s=round(script.now - began, 3))


def trial_events(
    script: Script, index: int, row: tuple[int, float, int, int, str, float | None, float],
    first: float, end: float, evaluate_s: float,
) -> list[tuple[float, str, dict[str, Any]]]:  # fmt: skip
    """Returns start, rung and end of one trial, each with its time."""
    _, rate, batch, micro, outcome, accuracy, train_s = row
    name = f"t{index:03d}"
    config = PROBED | {"learning_rate": rate, "batch_size": batch, "micro_batch_size": micro}
    speed = {8: 61.0, 16: 57.6, 64: 52.0}[micro] + {12: -4.5, 16: -2.1, 32: 0.0, 64: 1.1}[batch]
    samples = {"ok": 1200, "stopped": 300, "diverged": 190}.get(outcome, 0)
    messages = {"diverged": "loss is nan after 190 samples", "oom": "tried to allocate 2.10 GiB of 23.20 GiB"}
    found: list[tuple[float, str, dict[str, Any]]] = [
        (first - 0.05, "trial_start", {"trial": name, "config": config, "attempt": 1})
    ]
    if accuracy is not None:
        rung = {"trial": name, "samples": 300, "values": {"accuracy": round(accuracy - 0.05, 3)}, "wall_s": 5.0}
        found.append((min(first + 5.0, end), "rung", rung))
    found.append((end, "trial", {
        "trial": name, "config": config, "outcome": outcome, "stopped_at": 300 if outcome == "stopped" else None,
        "samples": samples, "values": {"accuracy": accuracy}, "samples_per_s": speed,
        "measured_samples_per_s": script.near(speed / 1.9, 0.02) if samples else None,
        "spans": {"data_wait_s": 0.1, "transfer_s": 0.0, "forward_backward_s": train_s * 0.9, "optimizer_s": 0.4},
        "train_s": train_s, "evaluate_s": evaluate_s, "setup_s": 0.03, "first_step_at": first if samples else 0.0,
        "last_step_at": first + train_s if samples else 0.0,
        "peak_allocated_bytes": int({8: 1.2, 16: 2.1, 64: 24.0}[micro] * GIB), "message": messages.get(outcome, ""),
        "seed": 0,
    }))  # fmt: skip
    return found


def confirm(script: Script) -> None:
    """Five rounds of windows taken in turn, trainings with other seeds, and the pick."""
    script.add("stage", 0.4, stage="confirm", state="start")
    began = script.now
    for turn in range(5):
        for name, (rate, _) in CONFIRMED.items():
            script.add(
                "window", 1.75, name=name, round=turn, samples_per_s=script.near(rate, 0.012),
                data_wait_frac=0.2 if name == "before" else 0.01, wall_s=1.7,
            )  # fmt: skip
    configs = {
        "best": PROBED | {"learning_rate": 6.1e-4, "batch_size": 32, "micro_batch_size": 8},
        "before": BEFORE, "after": AFTER,
    }  # fmt: skip
    for name, (rate, by_seed) in CONFIRMED.items():
        for number, (seed, accuracy) in enumerate(by_seed.items()):
            trained = round(rate * (1.03 + 0.006 * number), 2)  # whole trainings run a little faster than windows
            script.add(
                "confirmed", 1200 / rate * 0.45 + 0.1, name=name, config=configs[name], seed=seed,
                outcome="ok", values={"accuracy": accuracy}, samples=1200, samples_per_s=trained,
                train_s=round(1200 / rate * 0.45, 2),
            )  # fmt: skip
    script.add(
        "pick", 0.1, best="t007", most_accurate="t009", front=["t007", "t003", "t009"],
        rule="the fastest whose accuracy is within 0.01 of the best seen",
    )  # fmt: skip
    script.add("stage", stage="confirm", state="end", wall_s=round(script.now - began, 3))
    script.add("stage", 0.1, stage="export", state="start")
    script.add("stage", 0.9, stage="export", state="end", wall_s=0.9)


def line(fields: dict[str, Any]) -> str:
    """Returns a line of the journal, with its check sum."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return json.dumps({**fields, "crc": f"{zlib.crc32(text.encode()):08x}"}, ensure_ascii=False, separators=(",", ":"))


def main() -> None:
    """Writes the run beside this file."""
    script = Script()
    for part in (study, probes, search, confirm):
        part(script)
    path = Path(__file__).parent / "sample_run" / "trials.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line(fields) + "\n" for fields in script.lines), encoding="utf-8")


if __name__ == "__main__":
    main()
