"""What is read of the machine: exact differences, None for what it does not tell, never an error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.fakes import Nvml
from tuning.workers.telemetry import MEANS, TelemetryReader

CARD = {*MEANS, "temperature_c"}
SHARES = ("machine_cpu_frac", "steal_frac")


def test_a_cpu_has_no_figures_of_a_card() -> None:
    telemetry = TelemetryReader("cpu")
    telemetry.read()
    found = telemetry.summary()
    assert found["readings"] == 1
    assert not CARD & found.keys()
    assert set(SHARES) <= found.keys()


def test_shares_are_shares() -> None:
    telemetry = TelemetryReader("cpu")
    for _ in range(50):
        telemetry.read()
    found = telemetry.summary()
    assert all(found[name] is None or 0 <= found[name] <= 1 for name in SHARES)


def test_temperature_is_the_highest_power_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    nvml = Nvml(sm=[50, 100], power_mw=[100_000, 300_000], temperature=[60, 55])
    telemetry = TelemetryReader("cuda", nvml=nvml)
    telemetry.read()
    telemetry.read()
    found = telemetry.summary()
    assert (found["temperature_c"], found["wall_s"]) == (60.0, 4.0)
    assert (found["power_w"], found["gpu_sm_frac"]) == (pytest.approx(150), pytest.approx(0.625))


def test_what_was_skipped_is_in_no_reading() -> None:
    counts = iter([0.0, 5.0, 6.0, 6.0])
    telemetry = TelemetryReader("cpu", counters={"counted": lambda: next(counts)})
    telemetry.skip()
    telemetry.read()
    assert telemetry.summary()["counted"] == 1.0
    telemetry.begin()
    assert telemetry.summary() == {}


def test_why_a_card_was_slowed_is_said_and_an_idle_card_is_not_slowed() -> None:
    telemetry = TelemetryReader("cuda", nvml=Nvml(reasons=[0x01, 0x04 | 0x20]))
    telemetry.read()
    assert telemetry.summary()["throttled"] == []
    telemetry.read()
    assert telemetry.summary()["throttled"] == ["heat", "power cap"]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_without_nvml_every_figure_of_the_card_is_none(broken: str) -> None:
    telemetry = TelemetryReader("cuda", nvml=Nvml(broken=(broken,)))
    telemetry.read()
    found = telemetry.summary()
    assert {name: found[name] for name in CARD} == dict.fromkeys(CARD)


def test_what_is_not_supported_is_none() -> None:
    nvml = Nvml(broken=("nvmlDeviceGetPowerUsage",))
    telemetry = TelemetryReader("cuda", nvml=nvml)
    for _ in range(3):
        telemetry.read()
    found = telemetry.summary()
    assert found["power_w"] is None
    assert found["gpu_sm_frac"] is not None


@pytest.mark.parametrize(("known", "asked"), [("GPU-ab", ["GPU-ab"]), ("MIG-ab", ["GPU-ab", "MIG-ab"])])
def test_the_card_is_found_by_its_uuid(known: str, asked: list[str]) -> None:
    nvml = Nvml(uuid=known)
    telemetry = TelemetryReader("cuda", uuid="ab", nvml=nvml)
    assert nvml.asked == asked
    telemetry.read()
    assert telemetry.summary()["gpu_sm_frac"] is not None


def test_counters_of_others_are_differences_too() -> None:
    counts = iter([5.0, 5.0, 8.0, 9.0])
    telemetry = TelemetryReader("cpu", counters={"retries": lambda: next(counts)})
    telemetry.begin()
    telemetry.read()
    telemetry.read()
    assert telemetry.summary()["retries"] == 4.0


@pytest.mark.parametrize(("cpu_s", "queued_s", "wait_frac"), [(0.5, 0.0, 0.75), (0.5, 1.5, 0.0), (0.0, 2.0, None)])
def test_loaders_wait_when_they_neither_compute_nor_queue(
    cpu_s: float, queued_s: float, wait_frac: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    telemetry, written = TelemetryReader("cpu", root=tmp_path), {"self/task/1/children": "2 3", "3/comm": "python"}
    for count in range(3):  # the first only shows the process
        text = f"{int(count * cpu_s * 1e9)} {int(count * queued_s * 1e9)} 7"
        written |= {"2/comm": "pt_data_worker", "2/schedstat": text, "3/schedstat": text}
        written["2/io"] = f"rchar: 9\nread_bytes: {count * 3_000_000}\nwrite_bytes: 5"
        for name, content in written.items():
            (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc" / name).write_text(content)
        clock[0] += 2.0
        telemetry.read()
    found = [telemetry.summary().get(name) for name in ("loaders_wait_frac", "loaders_read_bytes_per_s")]
    assert found == ([None, None] if wait_frac is None else [wait_frac, pytest.approx(1e6)])


def test_the_loader_processes_of_torch_are_found() -> None:
    batches = iter(DataLoader(range(4), num_workers=1))  # type: ignore[arg-type]
    next(batches)
    telemetry = TelemetryReader("cpu")
    telemetry.read()
    assert 0.0 <= telemetry.summary()["loaders_wait_frac"] <= 1.0
