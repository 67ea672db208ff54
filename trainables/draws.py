"""Random numbers that depend on a sample's key alone, and are the same on every device.

A generator with a state gives a sample other numbers when another worker, another micro-batch or another device draws
them. Here a number is a hash of (key, stream, position), as in counter-based generators (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011); the hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA
2014). Positions count along the last axis first, so a draw of shape (time, channel) begins with the numbers of every
shorter one: padding to another length changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_AT_ONCE = 32_768
"""Numbers drawn at a time on a CPU: 256 KiB of bits."""


def keys(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Returns the keys, int64, of samples `index`, int64, of the same shape, in an epoch of a run."""
    return _mix(index + _signed(_epoch_bits(seed, epoch) + _GAMMA & _MASK))


def beside(key: Tensor, index: Tensor, others: Tensor) -> Tensor:
    """Returns the keys, int64, shape (count,), that samples `others` have in the epoch in which `index` has `key`.

    `key` and `index` have shape (1,), `others` shape (count,). What is drawn from them is shared by all of an epoch,
    whichever samples stand in the same micro-batch; an index that no sample has, such as -1, gives the epoch's own.
    """
    bits = key ^ (key >> 31 & (1 << 33) - 1) ^ (key >> 62 & 3)  # SplitMix64's finaliser, backwards
    bits = bits * _signed(pow(_MIX_2, -1, 1 << 64))
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1) ^ (bits >> 54 & (1 << 10) - 1)) * _signed(pow(_MIX_1, -1, 1 << 64))
    epoch = (bits ^ (bits >> 30 & (1 << 34) - 1) ^ (bits >> 60 & 15)) - _signed(_GAMMA) - index
    return _mix(epoch + others + _signed(_GAMMA))


def uniform(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns numbers in [0, 1), float32, shape (batch, *shape), on the device of `keys`, int64, shape (batch,).

    `stream` tells apart the uses of one key: two draws of one stream are equal, of two streams independent.
    """
    return _drawn(keys, shape, stream, lambda bits: bits(40).mul_(2.0**-24))  # 24 bits: all a float32 below 1 can hold


def normal(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns standard normal numbers, float32, shape (batch, *shape) (Box and Muller 1958)."""

    def drawn(bits: Callable[[int], Tensor]) -> Tensor:
        radius = bits(40).add_(0.5).mul_(2.0**-24)  # never 0, whose logarithm is infinite
        angle = bits(16).mul_(2.0**-24 * 2.0 * math.pi)
        return radius.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())

    return _drawn(keys, shape, stream, drawn)


def _drawn(
    keys: Tensor, shape: Sequence[int], stream: int, make: Callable[[Callable[[int], Tensor]], Tensor]
) -> Tensor:
    """Returns what `make` makes of each position's 64 random bits, shape (batch, *shape).

    `make` takes a function of a place, which returns the 24 bits from there on as whole numbers, float32. On a CPU it
    is called for a few samples at a time, whose numbers stay in the cache and need no fresh memory.
    """
    count = math.prod(shape)
    salt = _mix_int((stream + 1) * _GAMMA & _MASK)
    if type(keys) is not Tensor or keys.device.type != "cpu":
        start = _mix(keys + _signed(salt))
        steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GAMMA)
        bits = _mix(start[:, None] + steps)
        return make(lambda place: (bits >> place & 0xFFFFFF).to(torch.float32)).view(len(keys), *shape)
    starts = _mix_here(keys.numpy().view(np.uint64) + np.uint64(salt))[:, None]
    multiples = _multiples(1 << max(0, count - 1).bit_length())[:count]
    rows = max(1, _AT_ONCE // max(1, count))
    if len(keys) <= rows:
        return make(_below(_mix_here(starts + multiples))).view(len(keys), *shape)
    found = torch.empty(len(keys), count)
    for row in range(0, len(keys), rows):
        found[row : row + rows] = make(_below(_mix_here(starts[row : row + rows] + multiples)))
    return found.view(len(keys), *shape)


def _below(bits: NDArray[np.uint64]) -> Callable[[int], Tensor]:
    def taken(place: int) -> Tensor:
        moved = np.right_shift(bits, np.uint64(place))
        if place < 40:
            np.bitwise_and(moved, np.uint64(0xFFFFFF), out=moved)
        return torch.from_numpy(moved.view(np.int64)).to(torch.float32)

    return taken


@functools.lru_cache(maxsize=4)
def _multiples(count: int) -> NDArray[np.uint64]:
    """Returns the first `count` multiples of `_GAMMA`, kept: lengths differ from batch to batch."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def _mix_here(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, written over `bits`: a third of the time of `_mix`.

    Torch has no shifts of unsigned numbers, and on a CPU none of signed 64-bit ones that is one instruction.
    """
    other = np.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        np.right_shift(bits, np.uint64(shift), out=other)
        np.bitwise_xor(bits, other, out=bits)
        if factor != 1:
            np.multiply(bits, np.uint64(factor), out=bits)
    return bits


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap, and a right shift must not copy the sign."""
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(_MIX_1)
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(_MIX_2)
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def _epoch_bits(seed: int, epoch: int) -> int:
    return _mix_int(_mix_int(seed & _MASK) + epoch & _MASK)


def _mix_int(bits: int) -> int:
    bits = (bits + _GAMMA) & _MASK
    bits = ((bits ^ bits >> 30) * _MIX_1) & _MASK
    bits = ((bits ^ bits >> 27) * _MIX_2) & _MASK
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
