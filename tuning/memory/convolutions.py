"""A model of the memory that cuDNN takes beside the tensors of a convolution, from their shapes alone.

On tensor cores its kernels read and write channels last. Other tensors are copied into a workspace: what the kernel
reads, and in the backward pass also what it writes, since only the forward kernels write channels first by themselves.
Products of single pixels (1 x 1) need no copy, nor do kernels within a channel, which are torch's own. Kernels of
groups take twice the copies in the backward pass and none in the forward pass.

If cuDNN times its kernels at the first use of a shape, torch takes the largest workspace that any of them asks for,
and then hands all that it caches back to the card. The largest are Winograd's and Fourier's, for stride 1.

No card was at hand: these rules were chosen by what nvidia-smi measured of 47 models of timm on an A100, fp32 with
TF32, and judged by others (docs/log/card_memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tuning.memory.trace import EMPTIED, MAY_BE_LESS, Event

TRANSFORMED = 3
"""Images and results, transformed, are so many times as large: only VGG shows it, from 2.25 to 4 by the batch."""
GROUPED = 2
"""So many times the image and the result are what a kernel of groups takes in the backward pass."""


@dataclass(frozen=True)
class ConvolutionKernel:
    """A kernel of a convolution (channels first): its forward pass, or the gradient of its input or of its weight.

    `image` is the shape of the input, (samples, channels, *size), `result` that of the output, `weight` as torch has
    it.
    """

    operation: Literal["forward", "input", "weight"]
    image: tuple[int, ...]
    result: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int = 1
    element_bytes: int = 4

    @property
    def is_within_channels(self) -> bool:
        """Returns whether each channel has a kernel of its own, which torch computes without cuDNN."""
        return self.groups > 1 and self.groups == self.image[1] and self.weight[1] == 1

    @property
    def is_by_pixel(self) -> bool:
        """Returns whether the kernel is a single pixel, so that it is a matrix product."""
        return all(size == 1 for size in self.weight[2:])

    @property
    def copies_bytes(self) -> int:
        """Returns the bytes of the image and the result."""
        return self.element_bytes * (math.prod(self.image) + math.prod(self.result))

    def workspace_bytes(self) -> int:
        """Returns the bytes that the kernel takes while it runs."""
        if self.is_by_pixel or self.is_within_channels:
            return 0
        if self.groups > 1:
            return 0 if self.operation == "forward" else GROUPED * self.copies_bytes
        images_bytes = self.copies_bytes
        if self.operation == "forward":
            images_bytes -= self.element_bytes * math.prod(self.result)
        return images_bytes + self.element_bytes * math.prod(self.weight)

    def timed_bytes(self) -> int:
        """Returns the most bytes that a kernel asks for while cuDNN times all that there are for this shape."""
        if self.is_within_channels:
            return 0
        is_transformed = not self.is_by_pixel and self.groups == 1 and all(step == 1 for step in self.stride)
        return max(self.workspace_bytes(), self.copies_bytes * (TRANSFORMED if is_transformed else 1))


def workspaces_of(each: ConvolutionKernel, timed: set[ConvolutionKernel] | None) -> Iterable[int | Event]:
    """Yields the bytes of the workspaces that it takes one after the other, and marks of the log.

    `timed` are those that cuDNN has timed so far, to which this one is added; None where it times none.
    """
    if timed is not None and each not in timed:
        timed.add(each)
        yield from (MAY_BE_LESS, each.timed_bytes(), EMPTIED)
    yield each.workspace_bytes()
