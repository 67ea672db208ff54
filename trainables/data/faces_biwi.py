"""The Biwi Kinect Head Pose Database (Fanelli et al., IJCV 2013) as published, its colour images and poses.

    hpdb/01/frame_00003_rgb.png    640 x 480
    hpdb/01/frame_00003_pose.txt   three lines of the rotation matrix, a blank line, the head's centre in mm
    hpdb/01/rgb.cal                three lines of intrinsics, one of distortion, three of rotation, one of translation
                                   (mm): from the depth camera, in whose frame poses are, to the colour camera

Angles are in the order of 300W-LP: yaw, pitch and roll of the transposed matrix, as evaluations after HopeNet (Ruiz et
al., arXiv 1710.00925) take them; an early commit of its code lacks the transpose. HopeNet took boxes from a face
detector, which the database does not hold; here the head's centre is projected into the colour image, and the box is as
large as a head is at that distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.errors import DataError
from trainables.data.faces import Face, square

HEAD_MM = 250.0
"""Side of the box at the head's distance; chin to crown is about 230 mm."""
SAME_PERSON = {"15": "03", "18": "05", "21": "02", "22": "07"}
"""Of the 24 sequences four show a person of another one."""

_Matrix = NDArray[np.float64]


def read(poses: Iterable[Path]) -> list[Face]:
    """Returns the face of each pose file, without those turned beyond the limit; raises DataError."""
    cameras: dict[Path, tuple[_Matrix, _Matrix, _Matrix]] = {}
    faces = []
    for path in poses:
        folder = path.parent
        if folder not in cameras:
            intrinsics, turn, shift = _read(folder / "rgb.cal", {0: (3, 3), 4: (3, 3), 7: (1, 3)})
            cameras[folder] = intrinsics, turn, shift[0]
        face = _face(path, *cameras[folder])
        if face.within_limit:
            faces.append(face)
    return faces


def angles_deg(rotation: _Matrix) -> tuple[float, float, float]:
    """Returns yaw, pitch and roll in degrees of the database's matrix (3, 3): R = Rx(-pitch) Ry(yaw) Rz(roll)."""
    roll = -math.atan2(rotation[0, 1], rotation[0, 0])
    yaw = math.atan2(rotation[0, 2], math.hypot(rotation[1, 2], rotation[2, 2]))
    pitch = math.atan2(rotation[1, 2], rotation[2, 2])
    return math.degrees(yaw), math.degrees(pitch), math.degrees(roll)


def _face(path: Path, intrinsics: _Matrix, turn: _Matrix, shift: _Matrix) -> Face:
    rotation, centre = _read(path, {0: (3, 3), 3: (1, 3)})
    if not np.allclose(rotation @ rotation.T, np.eye(3), atol=0.02) or np.linalg.det(rotation) < 0:
        raise DataError(f"{path}:1: rotation: found rows that are not orthonormal; allowed: a rotation matrix")
    image = path.with_name(path.name.replace("_pose.txt", "_rgb.png"))
    if not image.exists():
        raise DataError(f"{path}: found no image beside it; allowed: one named {image.name}")
    seen = turn @ centre[0] + shift
    if seen[2] <= 0:
        raise DataError(f"{path}:5: centre: found {centre[0].tolist()} mm, behind the camera; allowed: z > 0")
    x, y, _ = (intrinsics @ seen / seen[2]).tolist()
    box = square(path, "centre", (x, y), float(intrinsics[0, 0]) * HEAD_MM / float(seen[2]))
    person = SAME_PERSON.get(path.parent.name, path.parent.name)
    return Face(image, box, angles_deg(rotation), person)


def _read(path: Path, wanted: dict[int, tuple[int, int]]) -> list[_Matrix]:
    """Returns the matrices that begin at the given lines, blank ones not counted; raises DataError."""
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: found {error}; allowed: a text file of numbers") from None
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    least = max(start + rows for start, (rows, _) in wanted.items())
    if len(lines) < least:
        raise DataError(f"{path}: found {len(lines)} lines that are not blank; allowed: at least {least}")
    found = []
    for start, (rows, columns) in wanted.items():
        matrix = []
        for number, cells in lines[start : start + rows]:
            matrix.append([_number(cell) for cell in cells])
            if len(cells) != columns or not np.isfinite(matrix[-1]).all():
                raise DataError(f"{path}:{number}: found {' '.join(cells)!r:.80}; allowed: {columns} numbers")
        found.append(np.array(matrix))
    return found


def _number(text: str) -> float:
    """Returns the number, or NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
