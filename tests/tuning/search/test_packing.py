"""Sharing a card: no sum of caps above it, every need in the narrowest share that holds it, nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.search.packing import CONTEXT_BYTES, MARGIN, Ledger, Slots, on_card, on_cpu, share_bytes

GIB = 2**30
CARD = Slots(4, threads=1, slot_bytes=2 * GIB)


@pytest.mark.parametrize(
    ("need", "width"),
    [(0, 1), (GIB, 1), (int(2 * GIB / MARGIN), 1), (2 * GIB, 2), (3 * GIB, 2), (5 * GIB, 4), (100 * GIB, 4), (None, 4)],
)
def test_a_trial_takes_the_narrowest_share_that_holds_it_with_a_margin(need: int | None, width: int) -> None:
    assert CARD.width(need) == width


@pytest.mark.parametrize(("count", "widths"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4])])
def test_widths_are_few_so_that_shares_are(count: int, widths: list[int]) -> None:
    slots = Slots(count, slot_bytes=GIB)
    seen = [1]
    while slots.wider(seen[-1]) > seen[-1]:
        seen.append(slots.wider(seen[-1]))
    assert seen == widths


def test_a_wide_trial_leaves_room_for_what_the_processes_of_its_slots_keep() -> None:
    slots = Slots(2, slot_bytes=4 * GIB, idle_bytes=GIB)
    assert [slots.cap_bytes(w) for w in (1, 2)] == [4 * GIB, 7 * GIB]
    assert Slots(2, slot_bytes=4 * GIB, enforced=False).cap_bytes(1) is None
    assert Slots(2, slot_bytes=GIB, enforced=False).width(None) == 1
    assert Slots(2).width(None) == 1, "where nothing is known of the card, trials are placed by cores alone"
    assert Slots(2).cap_bytes(2) is None


@given(st.integers(1, 8), st.lists(st.one_of(st.none(), st.integers(0, 20 * GIB)), max_size=30), st.randoms())
def test_the_caps_of_what_runs_never_sum_to_more_than_the_card_and_every_trial_gets_its_turn(
    count: int, needs: list[int | None], chance: object
) -> None:
    card = 8 * GIB
    ledger = Ledger(Slots(count, slot_bytes=card // count))
    running: list[tuple[str, int]] = []
    for number, need in enumerate(needs):
        width = ledger.width(need)
        while not ledger.room(width):
            assert running, "a trial waits although nothing runs"
            name, held = running.pop(chance.randrange(len(running)))  # type: ignore[attr-defined]
            assert ledger.leave(name) == held
        ledger.enter(f"t{number}", width)
        running.append((f"t{number}", width))
        assert sum(ledger.slots.cap_bytes(w) or 0 for _, w in running) <= card
        cap = ledger.slots.cap_bytes(width)
        assert cap is not None
        assert need is None or need * MARGIN <= cap or width == count


def test_more_than_is_free_is_refused_and_leaving_twice_is_harmless() -> None:
    ledger = Ledger(CARD)
    ledger.enter("a", 3)
    with pytest.raises(ValueError, match="b asks for 2 slots; of 4"):
        ledger.enter("b", 2)
    assert [ledger.leave("a"), ledger.leave("a")] == [3, 0]
    assert ledger.room(4)


@pytest.mark.parametrize(
    ("held", "waiting", "draining", "place"),
    [
        (0, [4, 1], False, 0),
        (1, [4, 1], False, 1),  # a wide one is overtaken
        (1, [4, 1], True, None),  # until it is its turn
        (3, [2, 2, 1], False, 2),
        (4, [1], False, None),
        (2, [2, 4], True, 0),
        (0, [], False, None),
    ],
)
def test_a_wide_trial_is_overtaken_until_it_is_time_to_drain(
    held: int, waiting: list[int], draining: bool, place: int | None
) -> None:
    ledger = Ledger(CARD)
    if held:
        ledger.enter("other", held)
    assert ledger.start(waiting, draining) == place


def test_a_need_that_ran_out_of_memory_in_a_share_gets_a_wider_one_and_so_does_every_larger() -> None:
    ledger = Ledger(CARD)
    assert ledger.width(GIB) == 1
    ledger.too_narrow(GIB, 1)
    assert [ledger.width(n) for n in (GIB - 1, GIB, GIB + 1, 5 * GIB)] == [1, 2, 2, 4]
    ledger.too_narrow(GIB, 2)
    assert [ledger.width(n) for n in (GIB - 1, GIB)] == [1, 4]
    ledger.too_narrow(None, 1)
    assert ledger.width(GIB // 2) == 1


@pytest.mark.parametrize(
    ("busy", "needs", "cores", "workers", "count"),
    [
        (0.25, [GIB], 16, 2, 4),
        (0.5, [GIB], 16, 2, 2),
        (0.3, [GIB], 16, 4, 2),  # four of them would want 20 cores
        (0.95, [GIB], 16, 0, 1),  # it keeps the card busy alone
        (0.3, [9 * GIB, 9 * GIB, GIB], 64, 2, 2),
        (0.3, [20 * GIB], 64, 2, 1),
        (0.3, [GIB], 2, 2, 1),
        (None, [GIB], 64, 0, 1),
        (0.3, [], 64, 0, 1),
    ],
)
def test_a_card_is_shared_where_it_is_idle_and_cores_and_bytes_allow(
    busy: float | None, needs: list[int], cores: int, workers: int, count: int
) -> None:
    assert on_card(23 * GIB, needs, busy, cores, workers) == count
    assert on_card(23 * GIB, needs, busy, cores, workers, asked=3) == 3


def test_every_further_process_takes_its_context_from_the_card() -> None:
    assert share_bytes(8 * GIB, 1) == 8 * GIB
    assert share_bytes(8 * GIB, 2) == (8 * GIB - CONTEXT_BYTES) // 2
    assert share_bytes(8 * GIB, 2, context_bytes=0) == 4 * GIB
    assert share_bytes(GIB, 4) == 0


@pytest.mark.parametrize(("cores", "asked", "count"), [(1, None, 1), (2, None, 2), (64, None, 4), (64, 8, 8)])
def test_without_a_card_it_is_one_a_core(cores: int, asked: int | None, count: int) -> None:
    assert on_cpu(cores, asked) == count
