"""A face with a known pose: where its image is, which part of it to look at, and how the head is turned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainables.data.errors import DataError, wrong

LIMIT_DEG = 99.0
"""A head turned further about any axis is left out of every set, as HopeNet does: its bins end there."""
MAX_BOX_PX = 20_000
"""Cropping allocates what it is asked for, and no public image of a face is near this large."""


@dataclass(frozen=True, slots=True)
class Face:
    """An image of one face.

    `box` is the square to look at in pixels of the image (left, top, right, bottom), which may reach over its edges;
    `angles_deg` are yaw (nose to the left of the image), pitch (up) and roll (clockwise); faces of one `group` show
    the same photograph or person, and belong into the same split.
    """

    image: Path
    box: tuple[int, int, int, int]
    angles_deg: tuple[float, float, float]
    group: str

    @property
    def within_limit(self) -> bool:
        """Returns whether no angle is beyond the limit."""
        return max(abs(angle) for angle in self.angles_deg) <= LIMIT_DEG


def square(source: Path, field: str, centre: tuple[float, float], side: float) -> tuple[int, int, int, int]:
    """Returns the square box around a place, in whole pixels; raises DataError where it cannot be one of an image."""
    if not 1.0 <= side <= MAX_BOX_PX or max(map(abs, centre)) > MAX_BOX_PX:
        found = f"a face {side:.6g} px wide at ({centre[0]:.6g}, {centre[1]:.6g})"
        allowed = f"1 to {MAX_BOX_PX} px, at most {MAX_BOX_PX} px from the image's corner"
        raise wrong(source, found, allowed, field=field)
    left, top, whole = round(centre[0] - side / 2), round(centre[1] - side / 2), round(side)
    return left, top, left + whole, top + whole


def pixels(face: Face, size: int) -> NDArray[np.uint8]:
    """Returns the face's box as an image (size, size, 3), black where it reaches over an edge; raises DataError."""
    try:
        with Image.open(face.image) as image:
            part = image.crop(face.box).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{face.image}: found {error}; allowed: an image that can be read to its end") from None
    return np.array(part)
