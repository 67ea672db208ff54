"""Random numbers that depend only on a sample's key, and are the same on every device.

With a stateful generator, a sample's numbers depend on the worker, the micro-batch and the device that draw them. Here
a number is a hash of (key, stream, position), as in counter-based generators (Salmon et al., "Parallel
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
    epoch_bits = _mix_int(_mix_int(seed & _MASK) + epoch & _MASK)
    return _mix(index + _signed(epoch_bits + _GAMMA & _MASK))


def beside(key: Tensor, index: Tensor, others: Tensor) -> Tensor:
    """Returns the keys, int64, shape (count,), of samples `others` in the epoch in which sample `index` has `key`.

    `key` and `index` have shape (1,), `others` shape (count,). The result is the same for any sample of an epoch, so
    draws from it do not depend on the micro-batch. An index that no sample has, such as -1, gives a key of the epoch.
    """
    bits = key ^ (key >> 31 & (1 << 33) - 1) ^ (key >> 62 & 3)  # the inverse of SplitMix64's finaliser
    bits = bits * _signed(pow(_MIX_2, -1, 1 << 64))
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1) ^ (bits >> 54 & (1 << 10) - 1)) * _signed(pow(_MIX_1, -1, 1 << 64))
    epoch = (bits ^ (bits >> 30 & (1 << 34) - 1) ^ (bits >> 60 & 15)) - _signed(_GAMMA) - index
    return _mix(epoch + others + _signed(_GAMMA))


def uniform(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns numbers in [0, 1), float32, shape (batch, *shape), on the device of `keys`, int64, shape (batch,).

    `stream` separates the uses of one key: draws of the same stream are equal, of different streams independent.
    """
    return _draw(keys, shape, stream, lambda bits: bits(40).mul_(2.0**-24))  # a float32 below 1 has 24 bits


def normal(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns standard normal numbers, float32, shape (batch, *shape) (Box and Muller 1958)."""

    def transform(bits: Callable[[int], Tensor]) -> Tensor:
        radius = bits(40).add_(0.5).mul_(2.0**-24)  # never 0, whose logarithm is infinite
        angle = bits(16).mul_(2.0**-24 * 2.0 * math.pi)
        return radius.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())

    return _draw(keys, shape, stream, transform)


def _draw(keys: Tensor, shape: Sequence[int], stream: int, make: Callable[[Callable[[int], Tensor]], Tensor]) -> Tensor:
    """Applies `make` to 64 random bits for each position; returns its numbers, shape (batch, *shape).

    `make` gets a function of a bit's place, which returns the 24 bits from there on as whole numbers, float32. On a CPU
    it is called for a few samples at a time, so that their numbers stay in the cache and reuse memory.
    """
    count = math.prod(shape)
    salt = _mix_int((stream + 1) * _GAMMA & _MASK)
    if type(keys) is not Tensor or keys.device.type != "cpu":
        start = _mix(keys + _signed(salt))
        steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GAMMA)
        bits = _mix(start[:, None] + steps)
        return make(lambda place: (bits >> place & 0xFFFFFF).to(torch.float32)).view(len(keys), *shape)
    starts = _mix_in_place(keys.numpy().view(np.uint64) + np.uint64(salt))[:, None]
    multiples = _multiples(1 << max(0, count - 1).bit_length())[:count]
    rows = max(1, _AT_ONCE // max(1, count))
    if len(keys) <= rows:
        return make(_reader(_mix_in_place(starts + multiples))).view(len(keys), *shape)
    numbers = torch.empty(len(keys), count)
    for row in range(0, len(keys), rows):
        numbers[row : row + rows] = make(_reader(_mix_in_place(starts[row : row + rows] + multiples)))
    return numbers.view(len(keys), *shape)


def _reader(bits: NDArray[np.uint64]) -> Callable[[int], Tensor]:
    def read(place: int) -> Tensor:
        moved = np.right_shift(bits, np.uint64(place))
        if place < 40:
            np.bitwise_and(moved, np.uint64(0xFFFFFF), out=moved)
        return torch.from_numpy(moved.view(np.int64)).to(torch.float32)

    return read


@functools.lru_cache(maxsize=4)
def _multiples(count: int) -> NDArray[np.uint64]:
    """Returns the first `count` multiples of `_GAMMA`; cached for several lengths, which vary between batches."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def _mix_in_place(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies SplitMix64's finaliser to `bits` in place, in a third of the time of `_mix`.

    Torch cannot shift unsigned numbers, and its shift of signed 64-bit numbers on a CPU takes several instructions.
    """
    other = np.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        np.right_shift(bits, np.uint64(shift), out=other)
        np.bitwise_xor(bits, other, out=bits)
        if factor != 1:
            np.multiply(bits, np.uint64(factor), out=bits)
    return bits


def _mix(bits: Tensor) -> Tensor:
    """Returns SplitMix64's finaliser of `bits`; int64 products wrap, and a right shift must not copy the sign."""
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(_MIX_1)
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(_MIX_2)
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def _mix_int(bits: int) -> int:
    bits = (bits + _GAMMA) & _MASK
    bits = ((bits ^ bits >> 30) * _MIX_1) & _MASK
    bits = ((bits ^ bits >> 27) * _MIX_2) & _MASK
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
