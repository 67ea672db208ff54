"""Distances as TSPLIB 95 defines them.

| EDGE_WEIGHT_TYPE | distance of two nodes                                                                    |
|------------------|------------------------------------------------------------------------------------------|
| EUC_2D, CEIL_2D  | Euclidean, to the nearest whole number, or the next above                                |
| ATT              | Euclidean divided by the root of 10, to the next whole number above ("pseudo-Euclidean") |
| GEO              | kilometres on a sphere, from DDD.MM (degrees and minutes) of latitude and longitude      |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KINDS = ("EUC_2D", "CEIL_2D", "ATT", "GEO")
EARTH_KM = 6378.388
PI = 3.141592  # TSPLIB's own, to be equal to the last kilometre

Floats = NDArray[np.float64]


def metric(kind: str, a: Floats, b: Floats) -> Floats:
    """Returns the distances between a file's coordinates, (..., 2), as section 2 of the TSPLIB paper defines them."""
    if kind == "GEO":
        a, b = _radians(a), _radians(b)
        q1 = np.cos(a[..., 1] - b[..., 1])
        q2, q3 = np.cos(a[..., 0] - b[..., 0]), np.cos(a[..., 0] + b[..., 0])
        cosine = np.clip(0.5 * ((1.0 + q1) * q2 - (1.0 - q1) * q3), -1.0, 1.0)
        found: Floats = np.floor(EARTH_KM * np.arccos(cosine) + 1.0)
        return found
    length: Floats = np.sqrt(((a - b) ** 2).sum(axis=-1) / (10.0 if kind == "ATT" else 1.0))
    # The nearest whole number by C's (int)(x + 0.5); numpy's own rounds halves to the even number.
    return np.floor(length + 0.5) if kind == "EUC_2D" else np.ceil(length)


def projected(numbers: Floats) -> Floats:
    """Returns x to the east and y to the north in degrees of latitude, around the middle (equirectangular)."""
    latitude, longitude = _degrees(numbers).T
    turned = np.radians(longitude)
    middle = np.degrees(np.arctan2(np.sin(turned).mean(), np.cos(turned).mean()))
    east = (longitude - middle + 180.0) % 360.0 - 180.0  # across the date line, too
    return np.stack([east * np.cos(np.radians(latitude.mean())), latitude], axis=1)


def _degrees(numbers: Floats) -> Floats:
    """Returns DDD.MM as degrees: the whole part is cut off, not rounded as the paper has it (TSPLIB's FAQ)."""
    whole = np.trunc(numbers)
    return whole + 5.0 * (numbers - whole) / 3.0


def _radians(numbers: Floats) -> Floats:
    return PI * _degrees(numbers) / 180.0
