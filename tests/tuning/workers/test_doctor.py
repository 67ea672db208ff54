"""What preflight says of a card whose memory others hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.study import setup
from tuning.workers import doctor, nvml
from tuning.workers.nvml import Gpu

GIB = 2**30


class Driver:
    """The part of `pynvml` that doctor asks: one card of 24 GiB, of which the driver keeps half a gibibyte."""

    NVMLError = RuntimeError
    nvmlMemory_v2 = 2
    names: Sequence[str] = ("NVIDIA Test",)

    def __init__(self, held_bytes: int, *, old: bool = False) -> None:
        self._held_bytes, self._old = held_bytes, old

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[min(handle, len(self.names) - 1)]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        """Returns its memory; the first version counts what the driver keeps as used."""
        if version is None:
            return SimpleNamespace(total=24 * GIB, used=self._held_bytes + GIB // 2)
        if self._old:
            raise self.NVMLError("Function Not Found")
        return SimpleNamespace(total=24 * GIB, reserved=GIB // 2, used=self._held_bytes)


class Absent(RuntimeError):
    """What `pynvml` raises where there is no driver."""


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("version mismatch"), "version mismatch"), (Absent("none"), "")]
)
def test_a_driver_that_does_not_answer_is_told_and_one_that_is_not_there_is_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    class Broken(Driver):
        NVMLError_LibraryNotFound = Absent

        def nvmlInit(self) -> None:
            raise error

    monkeypatch.setitem(sys.modules, "pynvml", Broken(0))
    assert nvml.gpus() == []
    assert nvml.fault() == said


def test_a_card_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing(Driver):
        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
            raise self.NVMLError("Insufficient Permissions")

    monkeypatch.setitem(sys.modules, "pynvml", Refusing(0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvml.gpus() == []
    checks = doctor.preflight(load(["workload=signals", f"runs_dir={tmp_path}"]), "cpu")
    (driver,) = (check for check in checks if check.name == "driver")
    assert (driver.state, driver.detail) == ("WARN", "it does not tell its cards: Insufficient Permissions")


def found(monkeypatch: pytest.MonkeyPatch, held_bytes: int, *, old: bool = False) -> Gpu:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(held_bytes, old=old))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = nvml.gpus()
    return gpu


def test_what_others_hold_is_told_apart_from_what_the_driver_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, 0) == Gpu("NVIDIA Test", 47 * GIB // 2, 0)
    assert found(monkeypatch, 3 * GIB) == Gpu("NVIDIA Test", 47 * GIB // 2, 3 * GIB)
    assert found(monkeypatch, 3 * GIB, old=True) == Gpu("NVIDIA Test", 24 * GIB, 0)  # neither is known


def test_a_study_on_a_card_asks_first_whether_torch_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, 0)
    monkeypatch.setattr(nvml, "driver", lambda: nvml.Driver("570.1", "12.8", 1, (8, 6)))
    monkeypatch.setattr(doctor, "built_for", lambda: None)
    config = load(["workload=signals", f"runs_dir={tmp_path}"])
    (check,) = (check for check in doctor.preflight(config, "cuda") if check.name == "torch")
    assert (check.state, check.detail) == ("FAIL", "not installed")
    assert "torch" not in {check.name for check in doctor.preflight(config, "cpu")}


def test_trials_at_once_are_not_counted_by_the_cores_of_the_head_of_a_cluster(tmp_path: Path) -> None:
    def states(*more: str) -> set[str]:
        config = load(["workload=signals", "card=cpu", f"runs_dir={tmp_path}", "concurrency=256", *more])
        return {check.state for check in doctor.preflight(config, "cpu") if check.name == "concurrency"}

    assert states() == {"FAIL"}
    assert states("cluster=auto") == set()


def test_a_card_older_than_turing_has_no_code_in_a_build_for_cuda_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "built_for", lambda: ("2.13.0", "13.0"))
    for capability, state in (((6, 0), "FAIL"), ((7, 0), "FAIL"), ((7, 5), "OK"), (None, "OK")):
        assert doctor.torch_check(nvml.Driver("580.1", "13.0", 1, capability)).state == state


def test_a_card_that_others_hold_memory_of_is_told_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, 2 * GIB)
    checks = doctor.preflight(load(["workload=signals", "card=rtx3090", f"runs_dir={tmp_path}"]), "cuda")
    (dirty,) = (check for check in checks if check.name == "card memory")
    said = "other processes hold 2.0 GiB of NVIDIA Test, so that 20.9 GiB are left of 23.2 asked for"
    assert (dirty.state, dirty.detail) == ("WARN", said)


class Two(Driver):
    """A driver of two cards, with names and UUIDs."""

    names = "ab"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'ab'[handle]}000"


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "ab"), ("", ""), ("-1", ""), ("1", "b"), ("1,0", "ba"), ("0,7", "a"), ("GPU-b000", "b"), ("GPU-b,0", "ba")],
)
def test_cards_are_those_that_are_visible_in_their_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Two(0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.name for gpu in nvml.gpus()) == names


def test_a_card_that_nobody_asks_for_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Two):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index:
                raise self.NVMLError("GPU is lost")
            return 0

    monkeypatch.setitem(sys.modules, "pynvml", Lost(0))
    for visible in ("0", "GPU-a"):
        monkeypatch.setenv(nvml.VISIBLE, visible)
        assert ([gpu.name for gpu in nvml.gpus()], nvml.fault()) == (["a"], "")
    monkeypatch.setenv(nvml.VISIBLE, "1")
    assert (nvml.gpus(), nvml.fault()) == ([], "GPU is lost")


@pytest.mark.parametrize(
    ("before", "asked", "visible"),
    [
        (None, "all", None),
        (None, "1", "GPU-b000"),
        (None, "1,0", "GPU-b000,GPU-a000"),
        (None, "GPU-b", "GPU-b000"),
        ("1", "0", "GPU-b000"),
        ("1", "all", "1"),
    ],
)
def test_the_cards_asked_for_are_visible_from_then_on_by_uuid(
    monkeypatch: pytest.MonkeyPatch, before: str | None, asked: str, visible: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Two(0))
    monkeypatch.setattr(nvml, "_visible_before", [])
    monkeypatch.setenv(nvml.VISIBLE, before or "")
    if before is None:
        monkeypatch.delenv(nvml.VISIBLE)
    for _ in range(2):
        nvml.choose(asked)
        assert os.environ.get(nvml.VISIBLE) == visible
    nvml.choose("all")
    assert os.environ.get(nvml.VISIBLE) == before, "another study of this process may have all"


@pytest.mark.parametrize(
    ("asked", "says"),
    [("2", "2 is no card here"), ("GPU-c", "GPU-c is no"), ("GPU-", "more than one"), ("0,GPU-a", "twice")],
)
def test_a_card_that_is_not_there_is_one_error_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Two(0))
    monkeypatch.setattr(nvml, "_visible_before", [])
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    with pytest.raises(ConfigError, match=says) as raised:
        setup.prepare_config(load(["workload=nli", f"devices={asked}", f"runs_dir={tmp_path / 'runs'}"]))
    assert "0 (a, GPU-a000), 1 (b, GPU-b000)" in str(raised.value)
    assert not (tmp_path / "runs").exists()


class Sliced(Driver):
    """A driver of two cards; the first is in MIG mode, has two slices and says nothing of its memory."""

    UUIDS: ClassVar = {0: "GPU-a", 1: "GPU-b", 10: "MIG-a0", 12: "MIG-a2"}
    names = "ab"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        """Returns the mode now and after the next start of the card."""
        return [self._of({0: 1}, handle, "Not Supported")] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        return self._of({0: 10, 2: 12}, index, "Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.UUIDS[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self._of({u: handle for handle, u in self.UUIDS.items()}, uuid, "Not Found")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        self._of({1: 1, 10: 1, 12: 1}, handle, "Insufficient Permissions")
        return super().nvmlDeviceGetMemoryInfo(handle, version)

    def _of(self, known: dict[Any, int], asked: Any, error: str) -> int:
        if asked not in known:
            raise self.NVMLError(error)
        return known[asked]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, ["MIG-a0"]), ("0", ["MIG-a0"]), ("1", ["GPU-b"]), ("GPU-a", ["MIG-a0"]), ("MIG-a2", ["MIG-a2"])],
)
def test_a_card_in_mig_mode_is_its_first_slice_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Sliced(0))
    monkeypatch.setenv(nvml.VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(nvml.VISIBLE)
    assert [gpu.uuid for gpu in nvml.gpus()] == uuids
    assert nvml.fault() == ""


@pytest.mark.parametrize(
    ("asked", "visible"), [("MIG-a2", "MIG-a2"), ("0", "MIG-a0"), ("1", "GPU-b"), ("MIG-a2,MIG-a0", "MIG-a2,MIG-a0")]
)
def test_a_slice_is_chosen_by_its_uuid_and_cards_by_number(
    monkeypatch: pytest.MonkeyPatch, asked: str, visible: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Sliced(0))
    monkeypatch.setattr(nvml, "_visible_before", [])
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    nvml.choose(asked)
    assert os.environ[nvml.VISIBLE] == visible
    assert [gpu.uuid for gpu in nvml.gpus()] == visible.split(",")
    with pytest.raises(ConfigError, match="MIG- is more than one card"):
        nvml.choose("MIG-")


@pytest.mark.parametrize("beside", ["card=cpu", "cluster=head:6379"])
def test_no_card_is_chosen_where_none_is_used_or_ray_gives_them_away(tmp_path: Path, beside: str) -> None:
    with pytest.raises(ConfigError, match=f"devices=0 beside {beside}"):
        setup.prepare_config(load(["workload=nli", "devices=0", beside, f"runs_dir={tmp_path / 'runs'}"]))


def test_cuda_counts_cards_as_their_driver_does() -> None:
    code = "import os, tuning.workers; print(os.environ['CUDA_DEVICE_ORDER'])"
    environment = {n: v for n, v in os.environ.items() if n != "CUDA_DEVICE_ORDER"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "PCI_BUS_ID\n"
