"""Configurations as points of a cube, so that what lies near can be told from what lies far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.knobs import table
from tuning.config.space import Choice, Parameter, Range, Space

Floats = NDArray[np.float64]


class Coordinates:
    """Places of searched knobs: 0 to 1 along each.

    Logarithmic where its range is; of numbers in a list, the place in it; of words and switches a dimension for each
    value, sqrt(1/2) or 0, so that two different ones are at distance 1. A knob without effect has its default.
    """

    def __init__(self, space: Space, names: Sequence[str]) -> None:
        self._parameters = {name: space.parameters[name] for name in names}
        self.widths = [self._width(p) for p in self._parameters.values()]
        """How many dimensions each of the names has."""
        self._found: dict[tuple[str, Any], list[float]] = {}
        """Of values of lists, which are asked for again and again."""

    def at(self, knobs: Mapping[str, Any]) -> Floats:
        """Returns the point of a configuration, of shape (sum of `widths`,)."""
        found: list[float] = []
        for name, parameter in self._parameters.items():
            value = knobs[name] if name in knobs else table().defaults[name]
            if isinstance(parameter, Range):
                found.append(parameter.place(float(value)))
                continue
            place = self._found.get((name, value))
            if place is None:
                place = self._found[name, value] = _place(parameter, value)
            found += place
        return np.array(found)

    @staticmethod
    def _width(parameter: Parameter) -> int:
        return 1 if isinstance(parameter, Range) or _numeric(parameter) else len(parameter.values)


def _numeric(parameter: Choice) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in parameter.values)


def _place(parameter: Choice, value: Any) -> list[float]:
    if _numeric(parameter):
        return [float(np.interp(float(value), *_ladder(parameter)))]
    return [math.sqrt(0.5) * (value == one) for one in parameter.values]


def _ladder(parameter: Choice) -> tuple[list[float], list[float]]:
    values = sorted(float(v) for v in parameter.values)
    return values, [n / max(1, len(values) - 1) for n in range(len(values))]
