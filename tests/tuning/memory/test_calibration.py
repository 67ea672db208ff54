"""Constants measured on a card: the file they are kept in, who finds them, and what a prediction makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuning.memory import predictor
from tuning.memory.calibration import Calibration, context_bytes, folder, known, of_card, write
from tuning.memory.predictor import Request, fingerprint

H100 = Calibration("NVIDIA H100", "2.11.0", (9, 0), {"cublas_bytes": 1024.0, "lstm_reserve": 8.0}, "2026-11-21")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder of calibrations, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = folder()
    assert found == tmp_path / "cache" / "cardtune" / "calibrations"
    return found


def test_what_was_written_is_found_by_capability_and_torch(cache: Path) -> None:
    write(H100, cache)
    assert list(known(cache)) == [H100]
    assert of_card((9, 0), torch="2.11.0") == H100
    assert of_card((9, 0), torch="2.13.0") is None
    assert of_card((8, 6), torch="2.11.0") is None


def test_the_latest_of_two_devices_holds_and_one_device_has_one_file(cache: Path) -> None:
    h200 = Calibration("NVIDIA H200", "2.11.0", (9, 0), {}, "2026-11-22")
    for found in (h200, H100, H100):
        write(found, cache)
    assert len(list(cache.iterdir())) == 2
    assert of_card((9, 0), torch="2.11.0") == h200


def test_the_context_is_that_of_the_device_by_its_name(cache: Path) -> None:
    write(Calibration("NVIDIA H100", "2.11.0", (9, 0), {"context_bytes": 5e8}), cache)
    assert context_bytes("NVIDIA H100") == 500_000_000
    assert context_bytes("NVIDIA L4") == 0


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x"}', '{"constants": {"cublas_bytes": "many"}}'])
def test_a_damaged_file_is_passed_over(cache: Path, text: str) -> None:
    write(H100, cache)
    (cache / "other.json").write_text(text, encoding="utf-8")
    assert list(known(cache)) == [H100]


@pytest.mark.parametrize("bad", [{"speed": 1.0}, {"cublas_bytes": -1}, {"cublas_bytes": float("nan")}])
def test_a_constant_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"expected numbers >= 0 named context_bytes, .* got (speed|cublas_bytes)="):
        Calibration("a card", "2.11.0", (9, 0), bad)


def test_a_request_for_a_card_carries_its_constants_and_no_other_does(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    write(H100, cache)

    def asked(kernels: Any, capability: tuple[int, int]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(predictor._wire(Request("mine.py", {}, {}, kernels, capability)))
        return found

    carried = asked("cuda", (9, 0))
    assert carried["constants"] == H100.constants
    assert carried["measured"] == "workspaces as measured on NVIDIA H100 with torch 2.11.0"
    assert "constants" not in asked("cuda", (8, 6))
    assert "constants" not in asked("cpu", (9, 0))


def test_answers_kept_before_do_not_hold_after(cache: Path) -> None:
    before = fingerprint("nli", {})
    write(H100, cache)
    assert fingerprint("nli", {}) != before
