"""What each knob is worth: configurations one knob apart, and gains that find what a formula hides."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.fakes import FormulaProfiler
from trainables.knobs import Knobs, Scalar
from trainables.our_knobs import EVERY
from tuning.config.schema import ConfirmSection
from tuning.journal.events import AblationRecord
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.report import tables, text
from tuning.search.ablation import BATCHES, AblationResult, changes, raw, results, settled, turns
from tuning.search.confirm import measure_windows

BEFORE = {"batch_size": 32, "micro_batch_size": 8, "amp_dtype": "fp32", "set_to_none": False}
BEST = {**BEFORE, "micro_batch_size": 32, "amp_dtype": "bf16", "set_to_none": True}


class Drifting(FormulaProfiler):
    """The formula on a machine that gets 1 % slower with every window."""

    def window(self, knobs, window_s, seed):
        """Returns the formula's speed, less what the machine has lost."""
        found = super().window(knobs, window_s, seed)
        slower = 0.99 ** len(self.probed)
        return replace(found, samples_per_s=found.samples_per_s and found.samples_per_s * slower)


def measured(profiler: FormulaProfiler, folder: Path, rounds: int = 5, **asked: Scalar) -> tuple[dict, History]:
    """Returns the results of all changes on that profiler, by base and knobs, and the run."""
    changed, _ = changes(BEST, BEFORE, EVERY, asked=asked)
    budget = ConfirmSection.model_construct(windows=rounds, window_s=1.0, seeds=1, top=1)
    with Journal.open(folder / "ablation.jsonl", create=True) as journal:
        journal.append(AblationRecord, best=BEST, changes=raw(changed))
        named = turns({"best": BEST, "before": BEFORE}, changed, EVERY)
        measure_windows(profiler, journal, named, budget, lambda record: None, lambda: math.inf)
    return {(one.base, one.knobs): one for one in results(journal.run)}, journal.run


def test_a_gain_is_the_ratio_whatever_the_machine_does(tmp_path: Path) -> None:
    found, _ = measured(Drifting(), tmp_path)
    assert len(found) == 6
    amp: AblationResult = found["best", "amp_dtype"]
    # bf16 takes two thirds of a micro-step's time, and the optimiser's millisecond stays.
    assert amp.gain.ratio == pytest.approx((0.042 + 0.001) / (0.042 * 2 / 3 + 0.001), rel=0.03)
    assert (amp.gain.is_told, amp.value, amp.instead_of) == (True, "bf16", "fp32")
    assert found["before", "amp_dtype"].gain.ratio > 1.3
    assert not found["best", "set_to_none"].gain.is_told
    assert found["best", "micro_batch_size"].memory_ratio == pytest.approx(420 / 180)


def test_a_knob_that_is_asked_for_is_set_at_the_best(tmp_path: Path) -> None:
    _, run = measured(Drifting(), tmp_path, amp_dtype="fp32", compile="default")
    off, on = (one for one in results(run, BEST) if (one.base, one.knobs) == ("best", "amp_dtype"))
    assert [(one.added, one.value, one.instead_of) for one in (off, on)] == [
        (False, "bf16", "fp32"),
        (True, "fp32", "bf16"),
    ]
    assert on.gain.ratio * off.gain.ratio == pytest.approx(1)
    titles = [grid.head[0] for grid in tables.ablation(results(run, BEST))]
    assert titles == ["of best", "added to best", "added to your settings"]
    _, idle = changes(BEST, BEFORE, EVERY, asked={"prefetch_factor": 4, "amp_dtype": "bf16"})
    assert set(idle) == {"best: prefetch_factor", "best: amp_dtype"}, "without workers, and as the best has it"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    configurations = 2 + 6
    measured(FormulaProfiler(), tmp_path, rounds=2)
    again = FormulaProfiler()
    _, run = measured(again, tmp_path, rounds=3)
    assert len(again.probed) == 2 * configurations  # one that is not counted, and the third round
    assert sorted(window.round for window in run.windows) == sorted([0, 1, 2] * configurations)


def test_what_does_not_fit_is_said_and_not_compared(tmp_path: Path) -> None:
    found, run = measured(FormulaProfiler(cap_bytes=300_000_000), tmp_path)
    assert found["before", "micro_batch_size"].gain is None
    said = [text.ablation_window(note) for note in run.notes]
    assert "there are no alternating timings of before, micro_batch_size=32: oom: no room" in said


def test_an_ablation_of_another_best_is_not_shown(tmp_path: Path) -> None:
    _, run = measured(FormulaProfiler(), tmp_path, rounds=2)
    assert len(results(run, BEST)) == 6
    assert results(run, {**BEST, "batch_size": 64}) == ()
    assert results(History()) == ()


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    _, run = measured(Drifting(), tmp_path)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(*text.ablation(results(run)), sep="\n")
    said = captured.get()
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "intervals hold 1.00: of those no effect was seen" in " ".join(said.split())


def test_each_differing_knob_of_speed_is_changed_at_both_ends() -> None:
    before = {"batch_size": 4, "micro_batch_size": 4, "num_workers": 4, "amp_dtype": "fp32", "learning_rate": 1e-3}
    best = {"batch_size": 32, "micro_batch_size": 16, "num_workers": 0, "amp_dtype": "bf16", "learning_rate": 2e-3}
    found, idle = changes(best, before, EVERY)
    assert {one.label for one in found if one.base == "best"} == {
        "batch_size", "micro_batch_size", "batch_size + micro_batch_size", "num_workers", "amp_dtype",
    }  # fmt: skip
    # A micro-batch of 16 is cut to a batch of 4: nothing to measure there.
    assert set(idle) == {"before: micro_batch_size"}
    amp = next(one for one in found if one.name == "before, amp_dtype=bf16")
    assert (amp.value, amp.instead_of) == ("bf16", "fp32")
    assert {**amp.config, "amp_dtype": "fp32"} == settled(before, EVERY)


values = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([4, 16, 64]),
        "micro_batch_size": st.sampled_from([4, 16, 64]),
        "num_workers": st.sampled_from([0, 2]),
        "prefetch_factor": st.sampled_from([2, 4]),
        "persistent_workers": st.booleans(),
        "fused_optimizer": st.booleans(),
        "optimizer": st.sampled_from(["adamw", "adamw8bit"]),
    }
)


@given(best=values, before=values)
def test_change_is_of_the_named_knobs_and_what_hangs_on_them(best: dict, before: dict) -> None:
    ends = {"best": settled(best, EVERY), "before": settled(before, EVERY)}
    for one in changes(best, before, EVERY)[0]:
        base, changed = Knobs.of(ends[one.base], EVERY).as_dict(), Knobs.of(one.config, EVERY).as_dict()
        for name in set(ends[one.base]) & set(one.config) - set(one.knobs):
            assert base[name] == changed[name] or name in BATCHES  # the micro-batch is cut to the batch
        assert all(EVERY.is_active(name, changed) for name in one.config)
        assert one.config != ends[one.base]
