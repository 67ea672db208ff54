"""What a study decides on machines that are not here: device, space, checks, limits, slots; by fakes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import study_of
from trainables import knob_columns
from tuning.config.cards import CONTEXT_BYTES
from tuning.config.load import load
from tuning.config.schema import StudyConfig
from tuning.config.space import values_of
from tuning.journal.events import ProbeRecord
from tuning.journal.records import Journal
from tuning.study import setup
from tuning.study.limits import Limits
from tuning.workers import doctor, executors, machine, nvml
from tuning.workers.nvml import Gpu

GIB = 2**30
CONTEXT_GIB = CONTEXT_BYTES / GIB
RTX3090, RTX4060 = Gpu("RTX 3090", 24 * GIB, 0, (8, 6)), Gpu("RTX 4060", 8 * GIB, 0, (8, 9))
T4, P100, H200 = Gpu("T4", 15 * GIB, 0, (7, 5)), Gpu("P100", 16 * GIB, 0, (6, 0)), Gpu("H200", 141 * GIB, 0, (9, 0))
UNKNOWN = Gpu("A card", 24 * GIB)
IDLE, BUSY = {"gpu_sm_frac": 0.2}, {"gpu_sm_frac": 0.97}


@dataclass(frozen=True)
class Simulated:
    """A machine: its cards, cores, torch, the newest CUDA of its driver, and what a probe saw there."""

    gpus: tuple[Gpu, ...] = ()
    typed: str = ""
    cores: int = 16
    torch: tuple[str, str | None] = ("2.13.0", "12.8")
    driver: str = "12.8"
    probe: dict[str, Any] = field(default_factory=dict)


def held(gpu: Gpu, gib: float) -> Gpu:
    """Returns the card with so much of it held by others."""
    return Gpu(gpu.name, gpu.memory_bytes, round(gib * GIB), gpu.capability)


def probed(telemetry: dict[str, float], gib: float, workers: int = 2) -> dict[str, Any]:
    """Returns what the fastest probe was: how busy the card, its peak, its workers."""
    return {"config": {"num_workers": workers}, "telemetry": telemetry, "peak_allocated_bytes": round(gib * GIB)}


def set_up(monkeypatch: pytest.MonkeyPatch, here: Simulated, tmp_path: Path) -> StudyConfig:
    """Returns the configuration that a study on the machine completes."""
    least = min((gpu.capability for gpu in here.gpus if gpu.capability), default=None)
    monkeypatch.setattr(nvml, "gpus", lambda: list(here.gpus))
    monkeypatch.setattr(nvml, "driver", lambda: nvml.Driver("570.1", here.driver, len(here.gpus), least))
    monkeypatch.setattr(doctor, "built_for", lambda: here.torch)
    monkeypatch.setattr(machine, "cores", lambda: here.cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx2"}))
    return setup.prepare_config(load(["workload=nli", f"runs_dir={tmp_path / 'runs'}", *here.typed.split()]))[1]


def decided(monkeypatch: pytest.MonkeyPatch, here: Simulated, tmp_path: Path) -> dict[str, Any]:
    """Returns every decision: what the configuration is, what preflight says, what a trial may take, who runs it."""
    config = set_up(monkeypatch, here, tmp_path)
    cuda = config.card.device == "cuda"
    found = {
        "device": config.card.device,
        "types": " ".join(map(str, values_of(config.space.given("amp_dtype")))),
        "tf32": len(values_of(config.space.given("tf32"))) == 2,
        "workers": max(values_of(config.space.given("num_workers"))),
        "batch": max(values_of(config.space.given("batch_size"))),
    }
    checks = {c.name: c for c in doctor.preflight(config, config.card.device)}
    found |= {name: f"{c.state} {c.detail}" for name, c in checks.items()}
    found.setdefault("concurrency", "none")
    found["dirty"] = checks["card memory"].state if "card memory" in checks else ""
    free_bytes = min(map(doctor.free_bytes, here.gpus)) if cuda else None
    facts = {
        "device": {"memory_bytes": here.gpus[0].memory_bytes if cuda else 32 * GIB, "name": "x"},
        **{"parameters": {"total": 10**6}, "train_samples": 100},
    }
    devices = executors.devices(config)
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        if here.probe:
            journal.append(ProbeRecord, outcome="ok", samples_per_s=10.0, **here.probe)
        limits = Limits(config, study_of(facts), journal, time.monotonic(), free_bytes, devices)
        plan = limits.plan()
        found |= {"cap_gib": limits.cap_bytes() / GIB if cuda or config.card.cap_bytes else None}
    found |= {"devices": devices, "slots": plan.concurrency, "threads": plan.threads}
    found["slot_gib"] = None if plan.cap_bytes is None else plan.cap_bytes / GIB
    found["ray"] = plan.concurrency > 1
    return found


THREE, OLD = "fp32 bf16 fp16", "fp32 fp16"
CASES: list[tuple[str, Simulated, dict[str, Any]]] = [
    # configuration
    ("no card", Simulated(cores=2), {"device": "cpu", "types": "fp32", "tf32": False, "workers": 2, "batch": 64}),
    ("3090", Simulated((RTX3090,)), {"device": "cuda", "types": THREE, "tf32": True, "workers": 16, "batch": 64}),
    ("4060", Simulated((RTX4060,), cores=8), {"device": "cuda", "types": THREE, "workers": 8}),
    ("T4", Simulated((T4,), cores=4), {"device": "cuda", "types": OLD, "tf32": False, "workers": 4}),
    ("H200", Simulated((H200,), cores=64), {"types": THREE, "tf32": True, "workers": 16}),
    ("P100", Simulated((P100,)), {"types": OLD, "tf32": False, "torch": "OK 2.13.0, built for CUDA 12.8"}),
    ("two 3090", Simulated((RTX3090, RTX3090)), {"types": THREE, "workers": 8, "devices": 2}),
    ("3090 and T4", Simulated((RTX3090, T4)), {"types": OLD, "tf32": False, "cap_gib": 15 - CONTEXT_GIB}),
    ("three cards, 4 cores", Simulated((RTX3090,) * 3, cores=4), {"workers": 1, "devices": 3, "slots": 3}),
    ("a driver that does not say", Simulated((UNKNOWN,)), {"types": THREE, "tf32": True}),
    ("a CPU beside a card", Simulated((RTX3090,), "card=cpu"), {"device": "cpu", "card": "OK the CPU", "tf32": False}),
    ("more than a card", Simulated((RTX3090,), "card.memory_gib=32"), {"card": "FAIL card=auto has 32 GiB and"}),
    ("less of a card", Simulated((RTX3090,), "card.memory_gib=8"), {"card": "OK RTX 3090", "cap_gib": 8.0}),
    # another card than is here
    (
        "4060 on a 3090",
        Simulated((RTX3090,), "card=rtx4060"),
        {"device": "cuda", "card": "WARN rtx4060 is emulated on RTX 3090", "cap_gib": 7.3},
    ),
    (
        "3090 on a 4060",
        Simulated((RTX4060,), "card=rtx3090"),
        {"card": "FAIL card=rtx3090 has 24 GiB and RTX 4060 less", "cap_gib": 8 - CONTEXT_GIB},
    ),
    (
        "3090 on a CPU",
        Simulated(cores=2, typed="card=rtx3090"),
        {"device": "cpu", "card": "WARN rtx3090 is emulated on the CPU", "cap_gib": 23.2, "tf32": False},
    ),
    (
        "one by its memory on a CPU",
        Simulated(cores=2, typed="card=auto card.memory_gib=12"),
        {"device": "cpu", "card": "WARN unlisted-12-gib is emulated on the CPU", "cap_gib": 12 - CONTEXT_GIB},
    ),
    (
        "a CPU held to less",
        Simulated(cores=2, typed="card=cpu card.memory_gib=12"),
        {"device": "cpu", "card": "OK the CPU", "cap_gib": 12.0},
    ),
    ("3090 asked for beside a 4060", Simulated((RTX3090, RTX4060), "card=rtx3090"), {"card": "FAIL card=rtx3090"}),
    ("the card itself", Simulated((RTX3090,), "card=rtx3090"), {"card": "OK RTX 3090", "cap_gib": 23.2}),
    ("a T4 that reports 15 GiB", Simulated((T4,), "card=t4"), {"card": "OK T4", "cap_gib": 15 - CONTEXT_GIB}),
    # torch and the driver
    (
        "an old driver",
        Simulated((RTX3090,), torch=("2.13.0", "13.0")),
        {"torch": "FAIL 2.13.0, built for CUDA 13.0, and the driver can run CUDA 12.8 at most"},
    ),
    ("a build without CUDA", Simulated((RTX3090,), torch=("2.13.0+cpu", None)), {"torch": "FAIL 2.13.0+cpu, built"}),
    (
        "P100 and CUDA 13",
        Simulated((P100,), torch=("2.13.0", "13.0"), driver="13.0"),
        {"torch": "FAIL 2.13.0, built for CUDA 13.0, which has no code below compute capability 7.5"},
    ),
    ("more concurrency than cores", Simulated((RTX3090,), "concurrency=32"), {"concurrency": "FAIL concurrency=32"}),
    # memory that others hold
    ("a desktop", Simulated((held(RTX3090, 0.1),)), {"dirty": "", "cap_gib": 23.9 - CONTEXT_GIB}),
    ("another training", Simulated((held(RTX3090, 10),)), {"dirty": "WARN", "cap_gib": 14 - CONTEXT_GIB}),
    ("a full card", Simulated((held(RTX3090, 23),)), {"dirty": "FAIL"}),
    (
        "the second of two is in use",
        Simulated((RTX3090, held(RTX3090, 20))),
        {"dirty": "WARN", "cap_gib": 4 - CONTEXT_GIB, "slots": 2},
    ),
    # slots
    (
        "an idle card",
        Simulated((RTX3090,), "card=rtx3090", probe=probed(IDLE, 3)),
        {"slots": 4, "slot_gib": (23.2 - 3 * CONTEXT_GIB) / 4, "ray": True, "threads": 4},
    ),
    ("a busy card", Simulated((RTX3090,), probe=probed(BUSY, 3)), {"slots": 1, "slot_gib": None, "ray": False}),
    ("an idle card, large trials", Simulated((RTX3090,), probe=probed(IDLE, 15)), {"slots": 1, "ray": False}),
    ("an idle card, 4 cores", Simulated((RTX3090,), cores=4, probe=probed(IDLE, 3)), {"slots": 1}),
    ("two busy cards", Simulated((RTX3090,) * 2, probe=probed(BUSY, 3)), {"slots": 2, "slot_gib": None, "threads": 8}),
    ("two idle cards", Simulated((RTX3090,) * 2, probe=probed(IDLE, 3, workers=1)), {"slots": 8, "devices": 2}),
    ("one trial on two cards", Simulated((RTX3090,) * 2, "concurrency=1", probe=probed(BUSY, 3)), {"slots": 1}),
    (
        "three trials on two cards",
        Simulated((RTX3090,) * 2, "concurrency=3", probe=probed(BUSY, 3)),
        {"slots": 3, "slot_gib": (24 - 2 * CONTEXT_GIB) / 2},
    ),
    (
        "five at once on four cards and cores",
        Simulated((RTX3090,) * 4, "concurrency=5", cores=4),
        {"slots": 4, "concurrency": "none"},
    ),
    # trials of several cards
    (
        "two cards a trial",
        Simulated((RTX3090,) * 4, "devices_per_trial=2", probe=probed(IDLE, 3)),
        {"devices": 2, "slots": 2, "threads": 4, "workers": 4, "slot_gib": None, "ray": True},
    ),
    ("two of three cards", Simulated((RTX3090,) * 3, "devices_per_trial=2"), {"devices": 1, "slots": 1, "ray": False}),
    (
        "four processes of a CPU",
        Simulated(typed="devices_per_trial=4"),
        {"device": "cpu", "devices": 1, "slots": 1, "threads": 4},
    ),
]


@pytest.mark.parametrize(("here", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_decided_on_a_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Simulated, wanted: dict[str, Any]
) -> None:
    found = decided(monkeypatch, here, tmp_path)
    for name, value in wanted.items():
        if isinstance(value, str) and " " in value and name != "types":
            assert str(found[name]).startswith(value)
        else:
            assert found[name] == (pytest.approx(value, abs=0.01) if isinstance(value, float) else value), name


def test_predicting_has_at_most_a_quarter_of_the_time_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for typed, startup_s, wanted in (
        ("search.max_time=null", 5.0, 70.0),
        ("search.max_time=null", 120.0, 300.0),
        ("search.max_time=4m", 120.0, 59.25),
    ):
        config = set_up(monkeypatch, Simulated((RTX3090,), typed), tmp_path)
        with Journal.open(tmp_path / "none.jsonl", create=True) as journal:
            limits = Limits(config, study_of({"startup_s": startup_s}), journal, time.monotonic())
            assert limits.predict_s() == pytest.approx(wanted, abs=0.5)


def test_an_allocator_that_was_set_otherwise_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    said = "PYTORCH_ALLOC_CONF=expandable_segments:True is obeyed; memory is predicted as if it were not set"
    for gpus in ((RTX3090,), ()):
        config = set_up(monkeypatch, Simulated(gpus), tmp_path)
        assert (said in setup.cautions(config, study_of({"train_samples": 1000, "val_samples": 100}))) == bool(gpus)
