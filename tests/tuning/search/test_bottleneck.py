"""The verdict: shares that fill the time, and a name for each way to lose it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.report.sentences import verdict_sentence
from tuning.search.bottleneck import card_words, judge, shares

fracs = st.floats(0.0, 1.0)


def spans(wait: float = 0.0, move: float = 0.0, passes: float = 0.0, step: float = 0.0, wall_s: float = 2.0) -> Any:
    parts = {"data_wait": wait, "transfer": move, "forward_backward": passes, "optimizer": step}
    return {**{f"{n}_s": frac * wall_s for n, frac in parts.items()}, "wall_s": wall_s, "steps": 10, "micro_steps": 40}


def card(sm: float | None, **more: float) -> dict[str, Any]:
    return {"gpu_sm_frac": sm, **more}


@pytest.mark.parametrize(
    ("parts", "telemetry", "bound", "says"),
    [
        ({"wait": 0.01, "passes": 0.97, "step": 0.02}, {}, "compute", "97 % in forward and backward"),
        ({"wait": 0.31, "passes": 0.6, "step": 0.05}, card(0.43), "loader", "GPU 43 % busy, 31 % waiting"),
        ({"wait": 0.35, "passes": 0.55, "step": 0.10}, {}, "loader", "35 % waiting for data"),
        ({"wait": 0.02, "passes": 0.9}, card(0.3), "launch", "GPU 30 %"),
        ({"wait": 0.02, "move": 0.3, "passes": 0.6}, card(0.65), "transfer", "30 % copying"),
        ({"move": 0.19, "passes": 0.65, "step": 0.15}, {}, "compute", "19 % copying"),
        ({"passes": 0.5, "step": 0.5}, {}, "optimizer", "50 % in the optimiser"),
        ({"wait": 0.1, "passes": 0.9}, card(0.5, allocator_retries=12.0), "memory", "12 allocator retries"),
        ({"passes": 1.0}, {"steal_frac": 0.12}, "compute", "disturbed: 12 % of the processor"),
    ],
)
def test_each_way_to_lose_time_has_its_name(parts: dict[str, float], telemetry: Any, bound: str, says: str) -> None:
    found = judge(spans(**parts), telemetry)
    assert found.bound == bound
    assert says in found.sentence


def test_small_launches_are_memorys_fault_if_no_larger_fits() -> None:
    roomy, full = (judge(spans(passes=0.9), card(0.5), memory_frac=frac) for frac in (0.5, 0.97))
    assert (roomy.bound, full.bound) == ("launch", "memory")
    assert "97 % of the memory taken" in full.sentence
    assert full.remedies[0] == "activation_checkpointing=true"


@given(fracs, fracs, fracs, fracs, st.none() | fracs)
@example(0.0, 0.0, 0.0, 5e-324, 0.75)  # the least number that floats have
def test_shares_fill_the_time(wait: float, move: float, passes: float, step: float, sm: float | None) -> None:
    whole = max(1.0, wait + move + passes + step)
    found = shares(spans(wait / whole, move / whole, passes / whole, step / whole), card(sm))
    parts = (found.compute, found.optimizer, found.loader, found.transfer, found.launch)
    assert all(-1e-9 <= part <= 1 + 1e-9 for part in parts)
    assert sum(parts) == pytest.approx(1.0)


@given(fracs, fracs)
def test_a_busy_card_is_bound_by_computing(sm: float, wait: float) -> None:
    found = judge(spans(wait, passes=1 - wait), card(sm))
    assert (found.bound in ("compute", "optimizer")) == (sm >= 0.8)


@pytest.mark.parametrize(
    ("telemetry", "knobs", "more", "remedies"),
    [
        (card(0.43), {}, {}, ("ram_cache=true", "num_workers=2", "device_augmentation=true")),
        (
            *(card(0.43), {"ram_cache": True, "num_workers": 4}, {"tried": {"num_workers=8"}}),
            ("prefetch_factor=4", "persistent_workers=true", "device_augmentation=true"),
        ),
        (card(0.43), {}, {"asked": ["num_workers", "batch_size"]}, ("num_workers=2",)),  # of a custom loop
        ({"machine_cpu_frac": 0.99}, {}, {}, ("ram_cache=true",)),
        (card(0.43, loaders_wait_frac=0.9, loaders_read_bytes_per_s=0.0), {}, {}, ("ram_cache=true", "num_workers=2")),
    ],
)
def test_remedies_are_those_that_are_not_on_or_tried(
    telemetry: Any, knobs: dict[str, Any], more: dict[str, Any], remedies: tuple[str, ...]
) -> None:
    found = judge(spans(wait=0.31, passes=0.6), telemetry, knobs, EVERY, **more)
    assert found.remedies == remedies


def test_remedy_does_not_change_what_is_learned() -> None:
    found = judge(spans(wait=0.31, passes=0.6), card(0.43), table=KnobTable(kinds={"ram_cache": "both"}))
    assert found.remedies == ("num_workers=2", "device_augmentation=true")


def test_waiting_for_data_is_told_with_what_helps() -> None:
    waiting = {**spans(wait=0.15, passes=0.80, step=0.05), "collate_s": 0.12, "augment_s": 0.18, "read_s": 0.0}
    found = judge(waiting, {"machine_cpu_frac": 0.5}, {"ram_cache": True}, EVERY, tried={"num_workers=2"})
    assert found.bound == "compute"
    assert found.sentence.endswith("15 % waiting for data (collating 6.0 %, augmentation 9.0 %)")
    assert (found.held, found.remedies) == (True, ("inplace_augmentation=true",))
    assert verdict_sentence(found).endswith("; not tried, might help: inplace_augmentation=true")
    all_tried = judge(
        waiting, {"machine_cpu_frac": 1.0}, {"ram_cache": True}, EVERY, tried={"inplace_augmentation=true"}
    )
    assert verdict_sentence(all_tried) == all_tried.sentence
    slower = judge(waiting, {"machine_cpu_frac": 0.5}, {"ram_cache": True}, EVERY, tried={"num_workers=1"})
    assert "num_workers=2" not in slower.remedies, "one was slower than none"


@pytest.mark.parametrize(
    ("wait_frac", "read_bytes_per_s", "says"),
    [(0.1, 5e6, "compute 90 %"), (0.8, 2e6, "wait 80 % of their time, for a disk (2.0 MB/s"), (0.8, 0.0, "no disk")],
)
def test_disks_networks_and_work_are_told_apart(wait_frac: float, read_bytes_per_s: float, says: str) -> None:
    told = {"loaders_wait_frac": wait_frac, "loaders_read_bytes_per_s": read_bytes_per_s}
    found = [judge(spans(wait=wait, passes=1 - wait), told).sentence for wait in (0.6, 0.1)]
    assert [says in sentence for sentence in found] == [True, False], "as it is the bound, and is not"


@pytest.mark.parametrize("old", [{}, {"data_wait_s": 1.0, "forward_backward_s": 2.0}, {"wall_s": 0.0}])
def test_spans_that_say_nothing_have_no_verdict(old: dict[str, float]) -> None:
    assert judge(old) is None


def test_how_the_card_was_doing_is_told_in_a_line() -> None:
    gauges = {"gpu_sm_frac": 0.931, "power_w": 287.4, "temperature_c": 71.0, "sm_clock_mhz": 1395.0}
    assert card_words(gauges) == "93 % busy, 287 W, 71 C, 1,395 MHz"
    slowed = {**gauges, "throttled": ["power cap", "too hot"]}
    assert card_words(slowed) == "93 % busy, 287 W, 71 C, 1,395 MHz; throttled: power cap, too hot"
    assert card_words({"gpu_sm_frac": 0.5, "power_w": None, "throttled": []}) == "50 % busy"
    assert card_words({"machine_cpu_frac": 0.5}) == card_words({}) == ""
