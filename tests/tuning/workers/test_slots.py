"""How many trials share a card, and in what slots: the caps of what runs at once never sum to more than the card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.config.cards import CONTEXT_BYTES
from tuning.workers.slots import MARGIN, alone_bytes, on_card, over_cards, share_bytes

GIB = 2**30


@given(st.integers(2**28, 2**38), st.integers(1, 16), st.integers(0, 2**33))
def test_slots_and_contexts_fit_the_card_and_a_trial_alone_has_at_least_a_slot(
    card: int, count: int, model: int
) -> None:
    slot = share_bytes(card, count)
    assert slot * count + (count - 1) * CONTEXT_BYTES <= card or slot == 0
    assert alone_bytes(card, 1, model) == card
    if model <= slot:  # a process keeps its model in its slot
        assert alone_bytes(card, count, model) >= slot


@pytest.mark.parametrize(
    ("need_gib", "busy", "cores", "workers", "count"),
    [
        (2, 0.2, 16, 0, 4),
        (2, 0.5, 16, 0, 2),
        (2, 0.7, 16, 0, 1),
        (2, None, 16, 0, 1),
        (9, 0.2, 16, 0, 2),
        (20, 0.2, 16, 0, 1),
        (2, 0.2, 4, 1, 2),
        (2, 0.2, 1, 0, 1),
    ],
)
def test_on_a_card_it_takes_idle_time_cores_and_room(
    need_gib: int, busy: float | None, cores: int, workers: int, count: int
) -> None:
    assert on_card(24 * GIB, [need_gib * GIB] * 3, busy, cores, workers) == count


def test_half_of_the_needs_must_fit_a_slot_with_a_margin() -> None:
    slot = share_bytes(24 * GIB, 4)
    assert on_card(24 * GIB, [int(slot / MARGIN)], 0.1, 16, 0) == 4
    assert on_card(24 * GIB, [slot], 0.1, 16, 0) == 2
    assert on_card(24 * GIB, [], 0.1, 16, 0) == 1


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (3, 3), (4, 4), (5, 4), (6, 4), (7, 7), (8, 8), (9, 8), (10, 10)])
def test_slots_that_would_leave_one_of_four_cards_idle_are_fewer(asked: int, taken: int) -> None:
    """Ray fills a card before the next: seven are 2, 2, 2 and 1, nine 3, 3, 3 and none."""
    assert over_cards(asked, 4) == taken


@given(st.integers(1, 64), st.integers(1, 16))
def test_no_card_is_idle_where_there_are_slots_for_all_and_no_more_slots_than_asked(asked: int, cards: int) -> None:
    taken = over_cards(asked, cards)
    assert min(asked, cards) <= taken <= asked
    assert -(-taken // -(-taken // cards)) == min(cards, taken)
