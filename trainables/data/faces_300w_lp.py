"""300W-LP (Zhu et al., arXiv 1511.07212) as published.

    300W_LP/AFW/AFW_134212_1_0.jpg  and  .mat beside it, which holds
        Pose_Para (1, 7)   pitch, yaw, roll in radians, then translation and scale
        pt2d (2, 68)       landmarks in pixels, x over y
    300W_LP/AFW_Flip/...   the same mirrored, with poses and landmarks to match; likewise HELEN, IBUG, LFPW

The last number of a name in 300W-LP counts the turned views made of one face. In AFW, HELEN and IBUG the number before
it counts the faces of one photograph; LFPW has one face of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
from numpy.typing import NDArray

from trainables.data.errors import OTHER_LAYOUTS, wrong
from trainables.data.faces import Face, square

CROP_K = 0.35
"""HopeNet's margin (Ruiz et al., arXiv 1710.00925): 0.6 k of the width beside the landmarks, 2 k of the height above
them and 0.6 k below. Here both sides get the same, so that a mirrored face has the mirrored box."""
_FACE_AND_VIEW = re.compile(r"(?<=\d)_\d+_\d+$|_\d+$")
"""The numbers of face and view, or of the view alone, in a name: one before both is the photograph's."""


def read(mats: Iterable[Path]) -> list[Face]:
    """Returns the face of each .mat file, without those turned beyond the limit; raises DataError."""
    return [face for face in map(_face, mats) if face.within_limit]


def box_of(source: Path, landmarks: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """Returns the square box around landmarks (2, count), in pixels; raises DataError where it is none of an image."""
    (left, top), (right, bottom) = landmarks.min(axis=1).tolist(), landmarks.max(axis=1).tolist()
    width, height = right - left, bottom - top
    top, bottom = top - 2.0 * CROP_K * height, bottom + 0.6 * CROP_K * height
    # A square holds all of it: without it a face seen from the side would be stretched, and look turned to the front.
    side = max(width * (1.0 + 1.2 * CROP_K), bottom - top)
    return square(source, "landmarks", ((left + right) / 2, (top + bottom) / 2), side)


def _face(path: Path) -> Face:
    try:
        found = dict(scipy.io.loadmat(path, variable_names=["Pose_Para", "pt2d"]))
    except Exception as error:  # in a torn file scipy meets, and raises, about anything
        why = f"{type(error).__name__}: {error}"
        raise wrong(path, why, "a MATLAB file of version 4 to 7.2 (save with -v7)") from None
    pitch, yaw, roll = np.degrees(_numbers(path, found, "Pose_Para", (1, 7))[0, :3]).tolist()
    box = box_of(path, _numbers(path, found, "pt2d", (2, 68)))
    image = path.with_suffix(".jpg")
    if not image.exists():
        raise wrong(path, "no image beside it", f"one named {image.name}")
    group = f"{path.parent.name.removesuffix('_Flip')}/{_FACE_AND_VIEW.sub('', path.stem)}"
    return Face(image, box, (yaw, pitch, roll), group)


def _numbers(path: Path, found: dict[str, Any], field: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    value = found.get(field)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.shape != shape:
        what = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else "no such field"
        raise wrong(path, what, f"numbers of shape {shape}", field=field, remedy=OTHER_LAYOUTS)
    if not np.isfinite(value).all():
        raise wrong(path, "a value that is not finite", "finite numbers", field=field)
    return value.astype(np.float64)
