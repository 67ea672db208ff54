"""Two traces of a step give its trace at any micro-batch size.

Every storage's size is affine in the micro-batch size: what does not depend on it is there once, the rest once for each
sample. So sizes of the same birth in two traces give `once + per_sample x micro_batch`, and the log of the first trace
with these sizes is the log at any other. A line through the *peaks* is no substitute: the peak moves from the optimiser
to the backward pass as the batch grows, and such lines were 5 to 40 % off.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuning.memory.trace import Trace


@dataclass(frozen=True)
class Symbolic:
    """A trace whose births have sizes affine in the micro-batch size: `slopes[i]` is what `span` samples more add.

    That is in bytes, and 0 for a death.
    """

    first: Trace
    slopes: tuple[int, ...]
    span: int

    def at(self, micro_batch: int) -> Trace:
        """Returns the trace at a micro-batch size of 1 or more; sizes between whole bytes are rounded up."""
        more, span = micro_batch - self.first.micro_batch, self.span
        events = tuple(
            (ident, max(0, size - (-slope * more) // span) if slope else size)
            for (ident, size), slope in zip(self.first.events, self.slopes, strict=True)
        )
        return Trace(micro_batch, events, self.first.categories, self.first.marks, self.first.ops)


def between(one: Trace, other: Trace) -> Symbolic | None:
    """Returns what both traces are cases of; None where their births differ, so that the step depends on the size.

    Births are matched by their order and their operators. Deaths may differ in order (autocast drops its cached casts
    in the order of their addresses): the first trace's is kept. Raises ValueError for two traces of one size.
    """
    if one.micro_batch == other.micro_batch:
        raise ValueError(f"expected traces of two micro-batch sizes, got two of {one.micro_batch}")
    first, second = (one, other) if one.micro_batch < other.micro_batch else (other, one)
    if first.ops != second.ops:
        return None
    born, grown = ([size for _, size in trace.events if size >= 0] for trace in (first, second))
    if len(born) != len(grown):
        return None
    larger = iter(grown)
    slopes = tuple(next(larger) - size if size >= 0 else 0 for _, size in first.events)
    return Symbolic(first, slopes, second.micro_batch - first.micro_batch)
