"""Two traces of a step give its trace at any micro-batch size.

Every storage's size is affine in the micro-batch size: what does not depend on it is there once, the rest once for each
sample. So sizes of the same birth in two traces give `once + per_sample x micro_batch`, and the log of the first trace
with these sizes is the log at any other. A line through the *peaks* is no substitute: the peak moves from the optimiser
to the backward pass as the batch grows, and such lines were 5 to 40 % off.
"""

from __future__ import annotations

from tuning.memory.trace import Trace


def between(first: Trace, second: Trace, micro_batch: int) -> Trace | None:
    """Returns the trace at a micro-batch size of 1 or more from two, the first of the smaller size.

    None where their births differ, so that the step depends on the size. Births are matched by their order and their
    operators. Deaths may differ in order (autocast drops its cached casts in the order of their addresses): the first
    trace's is kept. Sizes between whole bytes are rounded up.
    """
    if first.ops != second.ops:
        return None
    more, span = micro_batch - first.micro_batch, second.micro_batch - first.micro_batch
    larger = (size for _, size in second.events if size >= 0)
    events = []
    for ident, size in first.events:
        if size >= 0:
            slope = next(larger) - size  # the bytes that `span` samples add
            size = max(0, size - (-slope * more) // span)
        events.append((ident, size))
    return Trace(micro_batch, tuple(events), first.categories, first.marks, first.ops)
