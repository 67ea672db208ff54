"""Packing: every token once, rows that cannot see each other, and the way back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.packing import Packed, plan

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def padded(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens 1, 2, 3 ... with padding on the right, and the mask, both (rows, longest)."""
    mask = (torch.arange(max(rows))[None] < torch.tensor(rows)[:, None]).long()
    tokens = (mask.flatten().cumsum(0).view_as(mask)) * mask
    return tokens, mask


@settings(max_examples=80)
@given(lengths)
def test_every_token_has_one_place_and_finds_back(rows: list[int]) -> None:
    tokens, mask = padded(rows)
    packing = plan(rows)
    packed = Packed(tokens, mask, packing)
    assert packed.input_ids.shape == (packing.rows, max(rows))
    assert packing.rows <= len(rows)
    found = packed.input_ids[packed.input_ids > 0]
    assert sorted(found.tolist()) == list(range(1, sum(rows) + 1))
    back = packed.unpack(packed.input_ids[..., None].float())[..., 0]
    assert torch.equal(back.long() * mask, tokens)
    assert torch.equal(packed.unpack(packed.position_ids[..., None])[..., 0] * mask, torch.arange(max(rows)) * mask)


@settings(max_examples=40)
@given(lengths, st.booleans(), st.sampled_from([None, 3]))
def test_a_token_sees_its_own_row_only(rows: list[int], causal: bool, window: int | None) -> None:
    tokens, mask = padded(rows)
    packed = Packed(tokens, mask, plan(rows))
    seen = packed.mask(causal=causal, window=window)[:, 0]
    owner = torch.repeat_interleave(torch.arange(1, len(rows) + 1), torch.tensor(rows))
    for number, ids in enumerate(packed.input_ids):
        for at, token in enumerate(ids.tolist()):
            attended = [int(ids[j]) for j in range(len(ids)) if seen[number, at, j]]
            if token == 0:
                assert seen[number, at].any()  # or its softmax were NaN
                continue
            wanted = [t for t in ids.tolist() if t and owner[t - 1] == owner[token - 1] and (t <= token or not causal)]
            assert attended == (wanted[-window:] if causal and window else wanted)


def test_short_rows_share_long_ones() -> None:
    assert plan([8, 4, 4, 2, 2, 2, 2]).rows == 3
    assert plan([5, 5, 5]).rows == 3
