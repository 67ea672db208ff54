"""Random numbers that depend on a sample's key alone, and are the same on every device.

A generator with a state gives a sample other numbers when another worker, another micro-batch or another device draws
them. Here a number is a hash of (key, stream, position), as in counter-based generators (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011); the hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA
2014). Positions count along the last axis first, so a draw of shape (time, channel) begins with the numbers of every
shorter one: padding to another length changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def key(seed: int, epoch: int, index: int) -> int:
    """Returns the key of a sample in an epoch of a run, an int64."""
    mixed = _mix_int(_mix_int(_mix_int(seed & _MASK) + epoch & _MASK) + index & _MASK)
    return _signed(mixed)


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
    # 24 bits are what a float32 below 1 can hold.
    return (_bits(keys, shape, stream) >> 40 & 0xFFFFFF).to(torch.float32) * 2.0**-24


def normal(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns standard normal numbers, float32, shape (batch, *shape) (Box and Muller 1958)."""
    bits = _bits(keys, shape, stream)
    radius = ((bits >> 40 & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24  # never 0, whose logarithm is infinite
    angle = (bits >> 16 & 0xFFFFFF).to(torch.float32) * (2.0**-24 * 2.0 * math.pi)
    return (radius.log() * -2.0).sqrt() * angle.cos()


def _bits(keys: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Returns 64 random bits for each position, as int64, shape (batch, *shape)."""
    count = math.prod(shape)
    start = _mix(keys + _signed(_mix_int((stream + 1) * _GAMMA & _MASK)))
    steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GAMMA)
    return _mix(start[:, None] + steps).view(len(keys), *shape)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap, and a right shift must not copy the sign."""
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
