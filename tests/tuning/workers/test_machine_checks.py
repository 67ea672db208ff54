"""What doctor says of a machine: each finding with a state and what to do, and nothing of what cannot be read."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from tests.tuning.workers.test_doctor import Driver
from trainables.our_knobs import BUILT_IN
from tuning import __main__
from tuning.config.errors import ConfigError
from tuning.workers import doctor, machine_checks, own_workload
from tuning.workers.doctor import Check


class WholeDriver(Driver):
    """A driver of one card that says everything of itself."""

    def __init__(self, cuda: int = 12040) -> None:
        super().__init__(0)
        self._cuda = cuda

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self._cuda


def checks(monkeypatch: pytest.MonkeyPatch, root: Path, **env: str) -> dict[str, Check]:
    """Returns the findings by name."""
    monkeypatch.setattr(machine_checks, "_asked", lambda said, cards: Check("torch", "OK", f"{said}; it sees {cards}"))
    return {check.name: check for check in machine_checks.found(env, root)}


def test_a_machine_that_says_nothing_leaves_out_what_it_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = checks(monkeypatch, tmp_path)
    assert "driver" not in found
    assert {"torch", "cores", "RAM", "threads", "C++ compiler"} <= set(found)


@pytest.mark.parametrize(
    ("built", "cuda", "state", "says"),
    [
        (("2.13.0", "12.8"), 12080, "OK", "built for CUDA 12.8; it sees 1"),
        (("2.13.0", "12.8"), 12020, "OK", "it sees 1"),  # a driver runs every CUDA of its major version
        (("2.13.0+cpu", None), 12080, "FAIL", "built without CUDA, and the driver has 1 card"),
    ],
)
def test_torch_has_to_fit_the_driver(
    built: tuple[str, str | None],
    cuda: int,
    state: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", WholeDriver(cuda))
    monkeypatch.setattr(doctor, "built_for", lambda: built)
    found = checks(monkeypatch, tmp_path)
    assert (found["torch"].state, says in found["torch"].detail) == (state, True)
    assert bool(found["torch"].remedy) == (state == "FAIL")
    assert found["driver"].detail.startswith("550.54.15, CUDA up to 12.")


def test_torch_that_sees_fewer_cards_than_the_driver_is_told() -> None:
    seen = machine_checks._asked("2.13.0", cards=7)  # no machine of ours has so many
    assert (seen.state, "of 7 cards" in seen.detail) == ("FAIL", True)


def test_more_threads_than_cores_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert checks(monkeypatch, tmp_path, OMP_NUM_THREADS="9999")["threads"].state == "WARN"
    assert checks(monkeypatch, tmp_path, OMP_NUM_THREADS="1")["threads"].state == "OK"


@pytest.mark.parametrize("slow", [True, False])
def test_settings_that_slow_trainings_are_told(slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = WholeDriver()
    answers = {"PersistenceMode": int(not slow), "CurrentClocksThrottleReasons": 1 + 2 * slow}
    for name, answer in {**answers, "GraphicsRunningProcesses": [1] * slow}.items():
        setattr(card, f"nvmlDeviceGet{name}", lambda handle, answer=answer: answer)
    monkeypatch.setitem(sys.modules, "pynvml", card)
    governor = tmp_path / "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("powersave" if slow else "performance")
    found = checks(monkeypatch, tmp_path, OMP_NUM_THREADS="0" if slow else "1,2")
    told = {name for name, check in found.items() if check.state == "WARN" and check.remedy}
    assert told - {"cores"} == ({"CPU governor", "persistence mode", "clocks", "desktop", "threads"} if slow else set())


@pytest.mark.parametrize(("workload", "lacking"), [("pointer", "fast-tsp"), ("headpose", "pillow"), ("nli", "peft")])
def test_packages_are_looked_for_that_the_extra_names(
    monkeypatch: pytest.MonkeyPatch, workload: str, lacking: str
) -> None:
    def fails(ref: str) -> None:
        raise ConfigError(f"workload={ref}: {lacking} is not here")

    real = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: () if name == lacking else real(name=name))
    monkeypatch.setattr(own_workload, "declared", lambda ref: None)
    (of_its_data,) = machine_checks.packages(workload)
    assert of_its_data.state == "WARN", "it loads"
    monkeypatch.setattr(own_workload, "declared", fails)
    (of_one,) = machine_checks.packages(workload)
    (of_all,) = machine_checks.packages(None)
    assert (of_one.state, of_all.state) == ("FAIL", "WARN")
    assert of_one.detail == of_all.detail == f"{workload} needs {lacking}"
    assert of_one.remedy == f"pip install '.[{workload}]' in cardtune's folder"
    assert not list(machine_checks.packages("mine.py"))


def test_doctor_checks_the_workload_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["doctor", "workload=nli", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert all(check["state"] in ("OK", "WARN", "FAIL") and check["detail"] for check in found.values())
    assert found["packages"]["detail"] == "those of nli are here"
    assert __main__.main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert (", ".join(sorted(BUILT_IN)[:2]) in told, max(map(len, told.splitlines())) <= 80) == (True, True)
    assert __main__.main(["doctor", "workload=none-such"]) == 2
    assert not list(tmp_path.iterdir())
