"""The initial design: what a search trains first, before anything is modelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from trainables.knobs import Scalar, table
from tuning.config.space import Range, Space, values_of
from tuning.search.throughput import Probed, suits


def initial_design(
    space: Space,
    names: Sequence[str],
    start: Mapping[str, Scalar],
    probes: Sequence[Probed],
    fits: Callable[[Mapping[str, Scalar]], bool],
) -> list[dict[str, Scalar]]:
    """Returns the values of the searched `names` at `start`, and of the fastest configuration that was probed and fits.

    The second has the learning knobs of the start; its learning rate goes with the square root of the batch, as suits
    Adam (Malladi et al. 2022, arXiv 2205.10287), as far as its range lets it. Without probes, or with a range of batch
    sizes, there is only the first.
    """
    first = {n: start[n] for n in names if n in start}
    probes = [p for p in probes if suits(space, p)]  # a configuration named beside the search need not be of it
    given = space.given("batch_size")
    sizes = [] if isinstance(given, Range) else [int(v) for v in values_of(given)]
    rates = {
        (n, size): rate
        for n, probe in enumerate(probes)
        for size in sizes
        if (rate := probe.at_batch_size(size)) is not None and fits({**probe.knobs, "batch_size": size})
    }
    if not rates:
        return [first]
    n, size = max(rates, key=lambda pair: rates[pair])
    fastest = {**first, **{name: v for name, v in probes[n].knobs.items() if name in table().both and name in names}}
    if "batch_size" in names:
        fastest["batch_size"] = size
    parameter = space.parameters.get("learning_rate")
    if isinstance(parameter, Range) and "learning_rate" in first:
        rate, batch_size = float(first["learning_rate"]), int(start.get("batch_size", size))
        fastest["learning_rate"] = rate_at(size, rate, batch_size, parameter)
    return [first, fastest] if fastest != first else [first]


def rate_at(size: int, rate: float, batch_size: int, within: Range) -> float:
    """Returns the learning rate for a batch of `size` where `rate` is that of a batch of `batch_size`."""
    return min(max(float(f"{rate * math.sqrt(size / batch_size):.5g}"), within.low), within.high)
