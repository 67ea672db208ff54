"""Packs several short rows of tokens end to end into one; attention stays within each original row.

A padded batch computes on padding; packed, the same tokens fill fewer rows (Krell et al., "Efficient sequence packing
without cross-contamination", arXiv 2107.02027). Packed rows are as long as the longest row of the batch. They are
filled first fit, the longest row first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """The place of each row of a batch: its packed row and its first position there, both int64, shape (rows,).

    `rows` is the number of packed rows. It is made on the host, where lengths are known without waiting for a device.
    """

    row: Tensor
    start: Tensor
    rows: int


def plan(lengths: Sequence[int]) -> Packing:
    """Returns the packing of rows with these lengths, first fit, the longest first."""
    room: list[int] = []
    row, start = [0] * len(lengths), [0] * len(lengths)
    longest = max(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((p for p, free in enumerate(room) if free >= lengths[index]), len(room))
        if place == len(room):
            room.append(longest)
        row[index], start[index] = place, longest - room[place]
        room[place] -= lengths[index]
    return Packing(torch.tensor(row), torch.tensor(start), len(room))


def attending(segment: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """Returns the attention mask, bool, shape (rows, 1, time, time), True for tokens that are attended to.

    A token attends to tokens of the same segment; `segment` has shape (rows, time). With `causal` it attends only to
    earlier ones, with `window` only to so many of them. Padding attends to padding, to avoid a softmax of NaN.
    """
    same = segment[:, :, None] == segment[:, None, :]
    if causal:
        position = torch.arange(segment.shape[1], device=segment.device)
        distance = position[:, None] - position[None, :]
        same = same & (distance >= 0)
        if window is not None:
            same = same & (distance < window)
    return same[:, None]


class Packed:
    """A padded batch as packed rows: the inputs of a transformer, and the way back from its states."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, packing: Packing) -> None:
        """`input_ids` and `attention_mask` have shape (rows, time), padding on the right."""
        rows, time = input_ids.shape
        position = torch.arange(time, device=input_ids.device).expand(rows, time)
        place = packing.row[:, None] * time + packing.start[:, None] + position
        spare = packing.rows * time  # an extra slot, which takes all padding
        self._place = torch.where(attention_mask.bool(), place, spare)

        def packed(values: Tensor) -> Tensor:
            whole = values.new_zeros(spare + 1)
            return whole.scatter(0, self._place.flatten(), values.flatten())[:spare].view(packing.rows, time)

        self.input_ids = packed(input_ids)
        self.position_ids = packed(position)
        segment = torch.arange(1, rows + 1, device=input_ids.device)[:, None].expand(rows, time)
        self._segment = packed(segment.contiguous())

    def mask(self, *, causal: bool, window: int | None = None) -> Tensor:
        """Returns `attending` of the packed rows: a token attends to tokens of its original row only."""
        return attending(self._segment, causal=causal, window=window)

    def unpack(self, hidden: Tensor) -> Tensor:
        """Returns states of packed rows, (packed rows, time, width), in the order of the batch, (rows, time, width).

        Values at padding have no meaning, as in a padded batch.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        within = self._place.clamp(max=len(flat) - 1)
        return flat[within]
