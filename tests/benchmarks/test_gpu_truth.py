"""What a table of measured memory says of its runs, and the two steps that are replayed."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_truth
from tuning.memory.convolutions import ConvolutionKernel
from tuning.memory.trace import EMPTIED, MAY_BE_LESS, Trace

TABLE = """model,batch_size,measured_mib,faketensor_mib
lives,8,5000,3000
lives,16,8000,6000
filled,8,12000,9000
filled,16,22000,18000
filled,32,39500,36000
filled,64,3000,72000
nearly,8,35000,30000
nearly,16,39100,33000
broken,8,2100,1000
broken,16,2100,2000
short,8,5000,3000
short,16,4000,6000
full,8,40300,38000
"""


def test_how_each_run_of_a_table_ended(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    found = {(row.model, row.batch_size): row.measured_mib for row in gpu_truth.read(tmp_path / "table.csv")}
    lived = {("lives", 8): 5000, ("lives", 16): 8000, ("filled", 8): 12000, ("filled", 16): 22000}
    lived |= {("nearly", 8): 35000, ("short", 8): 5000}
    assert found == {**lived, ("filled", 32): None, ("filled", 64): None, ("full", 8): None}


def test_the_draw_is_of_one_half_and_the_halves_are_all() -> None:
    names = [f"model{i}" for i in range(100)]
    judged, fitted = (gpu_truth.drawn(names, part, 100, 7) for part in ("judged", "fitted"))
    assert sorted(judged + fitted) == sorted(names)
    assert gpu_truth.drawn(reversed(names), "judged", 5, 7) == judged[:5]


def test_the_second_step_finds_the_state_made_and_times_nothing() -> None:
    one = ConvolutionKernel("forward", (2, 4, 8, 8), (2, 4, 8, 8), (4, 4, 3, 3), (1, 1))
    kinds = {0: "parameter", 1: "batch", 2: "activation", 3: "workspace", 4: "optimizer", 5: "temporary"}
    events = ((0, 10), (1, 20), (2, 30), (3, 512), (3, -1), (4, 10), (2, -1), (5, 4), (1, -1))
    trace = Trace(2, events, kinds, ((0, "setup"), (2, "forward")), ("a",) * 6)
    found = list(gpu_truth.two_steps(trace, lambda own: [one] if own == 3 else []))
    timed, taken = one.timed_bytes(), one.workspace_bytes()
    first = [(0, 10), (2, 30), MAY_BE_LESS, (19, timed), (19, -1), EMPTIED, (20, taken), (20, -1), (4, 10), (2, -1)]
    assert found == [*first, (5, 4), (8, 30), (21, taken), (21, -1), (8, -1), (11, 4), (5, -1)]


def test_the_loader_has_three_batches_of_floats_and_one_of_bytes() -> None:
    alive: dict[int, int] = {}
    most = 0
    for own, size in gpu_truth.loader(400):
        alive[own] = max(0, size)
        most = max(most, sum(alive.values()))
    assert most == 3 * 400 + 100


def test_a_need_is_no_more_than_a_larger_batch_reports(tmp_path: Path) -> None:
    """The first size reports 9,000 MiB, the second 5,000: a card of 8 GB has what the first needs."""
    rows = [gpu_truth.Row("spiked", size, mib, 1000) for size, mib in ((8, 9_000.0), (16, 5_000.0), (32, None))]
    needs = (5_000.0, 5_000.0, float("inf"))
    p_oom = ({8: 0.0}, {8: 0.3}, {8: 0.9})
    margin = gpu_truth.MARGINS["traced"]
    found = [
        gpu_truth.Predicted(row, 4_500, "convolutional", p, margin, need)
        for row, p, need in zip(rows, p_oom, needs, strict=True)
    ]
    assert gpu_truth._judged(found, 0.5, (8,)) == ((1, 2), (0, 1))
    assert gpu_truth._judged(found, 0.5, (8,), by_need=True) == ((0, 1), (0, 2))
    assert gpu_truth._judged(found, 0.2, (8,), by_need=True) == ((0, 1), (1, 2))
