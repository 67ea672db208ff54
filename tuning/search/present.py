"""`before`, the configuration that the user has today, as the trial that a search begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainables.knobs import Scalar, kind_of, table
from tuning.config.space import Choice, Range, Space


@dataclass(frozen=True)
class Present:
    """The knobs that `before` is trained with, and whether the space has them: else it is beside the search.

    What is beside the search is no candidate for the pick, and neither sampler nor pruner hears of it.
    """

    knobs: Mapping[str, Scalar]
    is_inside: bool

    def is_of(self, knobs: Mapping[str, Scalar]) -> bool:
        """Returns whether a trial with these knobs is that of `before`."""
        return all(knobs.get(name) == value for name, value in self.knobs.items())


def present(before: Mapping[str, Scalar], space: Space, *, staged: bool) -> Present:
    """Returns `before` as it is trained, with defaults for what it does not name.

    A staged search leaves out its system knobs: those that were probed make it faster, and no other.
    """
    defaults, given = table().defaults, {**space.fixed, **space.parameters}
    names = [n for n in table() if n in before or n in given]
    own = {n: before.get(n, defaults[n]) for n in names if not staged or kind_of(n) != "system"}
    learned = space.complete(own)

    def has(name: str) -> bool:
        """Returns whether the space has this value of it, or one that comes to the same: a micro-batch cut to it."""
        searched = space.parameters.get(name)
        if searched is not None and own[name] in searched:
            return True
        given = space.fixed.get(name, defaults[name]) if searched is None else searched
        values = given.values if isinstance(given, Choice) else [given.high if isinstance(given, Range) else given]
        return any(space.complete({**own, name: value}).get(name) == learned.get(name) for value in values)

    return Present({n: v for n, v in learned.items() if n in own}, all(map(has, own)))
