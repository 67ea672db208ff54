"""The ablation: turns, no repeats, and receipts that find what a formula hides."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes import FormulaProfiler
from tuning.journal.records import Journal
from tuning.report import text
from tuning.report.ablation_results import ablation_results
from tuning.search.ablation import measure, pairs

BEFORE = {"batch_size": 32, "micro_batch_size": 8, "amp_dtype": "fp32", "set_to_none": False}
BEST = {**BEFORE, "micro_batch_size": 32, "amp_dtype": "bf16", "set_to_none": True}


class Drifting(FormulaProfiler):
    """The formula on a machine that gets 5 % slower with every window."""

    def window(self, knobs, window_s, seed):
        """Returns the formula's speed, less what the machine has lost."""
        found = super().window(knobs, window_s, seed)
        slower = 0.95 ** len(self.probed)
        return {**found, "samples_per_s": found["samples_per_s"] and found["samples_per_s"] * slower}


def measured(profiler: FormulaProfiler, folder: Path, rounds: int = 4):
    """Returns the results of all pairs on that profiler."""
    with Journal.open(folder / "receipts.jsonl", create=True) as journal:
        measure(profiler, journal, pairs(BEST, BEFORE)[0], rounds, 1.0, lambda record: None)
        results = ablation_results(journal.records)
        return {(one.base, one.knobs): one for one in results}, journal.records


def test_receipt_is_the_ratio_whatever_the_machine_does(tmp_path: Path) -> None:
    found, _ = measured(Drifting(), tmp_path)
    amp = found["best", "amp_dtype"]
    assert amp.gain is not None
    # bf16 takes two thirds of a micro-step's time, and the optimiser's millisecond stays.
    assert amp.gain.ratio == pytest.approx((0.042 + 0.001) / (0.042 * 2 / 3 + 0.001), rel=0.03)
    assert (amp.verdict, amp.value, amp.instead_of) == ("faster", "bf16", "fp32")
    idle = found["best", "set_to_none"]
    assert idle.verdict == "nothing that the rounds can tell"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    measured(FormulaProfiler(), tmp_path, rounds=2)
    again = FormulaProfiler()
    _, records = measured(again, tmp_path, rounds=3)
    assert len(again.probed) == 2 * 6
    assert [r["round"] for r in records if r.event == "receipt"].count(0) == 6


def test_a_side_that_does_not_fit_is_said_and_not_compared(tmp_path: Path) -> None:
    found, _ = measured(FormulaProfiler(cap_bytes=300_000_000), tmp_path)
    assert found["before", "micro_batch_size"].verdict == "oom"


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    found, records = measured(Drifting(), tmp_path)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(*text.ablation(ablation_results(records)), sep="\n")
    said = captured.get()
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "those knobs bought nothing here that can be told" in " ".join(said.split())
    assert len(found) == 6


@pytest.mark.parametrize("other", [{"best": {**BEST, "amp_dtype": "fp32"}}, {"window_s": 5.0}, {"device": "another"}])
def test_receipts_are_of_what_was_ablated_last(tmp_path: Path, other: dict[str, object]) -> None:
    of = {"best": BEST, "before": BEFORE, "window_s": 1.0, "device": "this"}
    with Journal.open(tmp_path / "receipts.jsonl", create=True) as journal:

        def made(own: dict[str, object]) -> int:
            journal.append("ablation", of=own)
            profiler = FormulaProfiler()
            measure(profiler, journal, pairs(BEST, BEFORE)[0], 2, 1.0, lambda record: None)
            return len(profiler.probed)

        assert (made(of), made(of), made({**of, **other}), made(of)) == (24, 0, 24, 0)
        assert len(ablation_results(journal.records, BEST)) == 6
        assert ablation_results(journal.records, {**BEST, "batch_size": 64}) == ()
