"""What is read of the machine: exact differences, None for what it does not tell, never an error."""

from __future__ import annotations

import pytest

from tests.fakes import Nvml
from tuning.workers.telemetry import MEANS, RATES, TelemetryReader

CARD = {*MEANS, "temperature_c", "energy_j"}


def test_a_cpu_has_no_figures_of_a_card() -> None:
    telemetry = TelemetryReader("cpu")
    telemetry.read()
    found = telemetry.summary()
    assert found["readings"] == 1
    assert not CARD & found.keys()
    assert set(RATES) <= found.keys()


def test_shares_are_shares_and_rates_are_not_negative() -> None:
    telemetry = TelemetryReader("cpu")
    for _ in range(50):
        telemetry.read()
    found = telemetry.summary()
    assert all(found[name] is None or found[name] >= 0 for name in RATES)
    assert all(found[name] is None or found[name] <= 1 for name in ("machine_cpu_frac", "steal_frac"))


def test_energy_is_a_sum_of_differences_temperature_the_highest_power_a_mean() -> None:
    nvml = Nvml(sm=[50, 100], power_mw=[100_000, 300_000], temperature=[60, 55], energy_mj=[1_000, 3_500, 9_000])
    telemetry = TelemetryReader("cuda", nvml=nvml)
    first, second = telemetry.read(), telemetry.read()
    found = telemetry.summary()
    assert (first.figures["energy_j"], second.figures["energy_j"]) == (2.5, 5.5)
    assert (found["energy_j"], found["temperature_c"]) == (8.0, 60.0)
    share = first.wall_s / (first.wall_s + second.wall_s)
    assert found["power_w"] == pytest.approx(100 * share + 300 * (1 - share))
    assert found["gpu_sm_frac"] == pytest.approx(0.5 * share + 1.0 * (1 - share))


def test_what_was_skipped_is_in_no_reading() -> None:
    telemetry = TelemetryReader("cuda", nvml=Nvml(energy_mj=[0, 5_000, 6_000]))
    telemetry.skip()
    telemetry.read()
    assert telemetry.summary()["energy_j"] == 1.0
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
    nvml = Nvml(broken=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"))
    telemetry = TelemetryReader("cuda", nvml=nvml)
    for _ in range(3):
        telemetry.read()
    found = telemetry.summary()
    assert found["power_w"] is found["energy_j"] is None
    assert found["gpu_sm_frac"] is not None


@pytest.mark.parametrize(("known", "asked"), [("GPU-ab", ["GPU-ab"]), ("MIG-ab", ["GPU-ab", "MIG-ab"])])
def test_the_card_is_found_by_its_uuid(known: str, asked: list[str]) -> None:
    nvml = Nvml(uuid=known)
    telemetry = TelemetryReader("cuda", uuid="ab", nvml=nvml)
    assert nvml.asked == asked
    assert telemetry.read().figures["gpu_sm_frac"] is not None


def test_counters_of_others_are_differences_too() -> None:
    counts = iter([5.0, 5.0, 8.0, 9.0])
    telemetry = TelemetryReader("cpu", counters={"retries": lambda: next(counts)})
    telemetry.begin()
    telemetry.read()
    telemetry.read()
    assert telemetry.summary()["retries"] == 4.0
