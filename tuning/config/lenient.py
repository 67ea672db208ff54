"""Values of records as they should be: what an older version or damage left otherwise is passed over, not raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mapping(value: object) -> Mapping[str, Any]:
    """Returns a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def finite(value: object) -> float | None:
    """Returns a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(value: object) -> int | None:
    """Returns the whole part of a finite number, None for anything else."""
    number = finite(value)
    return None if number is None else int(number)


def numbers(value: object) -> dict[str, float]:
    """Returns the entries of a mapping that are finite numbers."""
    return {str(k): number for k, v in mapping(value).items() if (number := finite(v)) is not None}
