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
"""Four of the 24 sequences show a person of another one."""

_Matrix = NDArray[np.float64]


def read(poses: Iterable[Path]) -> list[Face]:
    """Returns the face of each pose file, without those turned beyond the limit; raises DataError."""
    cameras: dict[Path, tuple[_Matrix, _Matrix, _Matrix]] = {}
    faces = []
    for path in poses:
        folder = path.parent
        if folder not in cameras:
            found = _numbers(folder / "rgb.cal", 25, 27)  # the size of a frame may follow
            cameras[folder] = found[:9].reshape(3, 3), found[13:22].reshape(3, 3), found[22:25]
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
    found = _numbers(path, 12)
    rotation, centre = found[:9].reshape(3, 3), found[9:]
    if not np.allclose(rotation @ rotation.T, np.eye(3), atol=0.02) or np.linalg.det(rotation) < 0:
        raise DataError(f"{path}:1: rotation: found rows that are not orthonormal; allowed: a rotation matrix")
    image = path.with_name(path.name.replace("_pose.txt", "_rgb.png"))
    if not image.exists():
        raise DataError(f"{path}: found no image beside it; allowed: one named {image.name}")
    seen = turn @ centre + shift
    if seen[2] <= 0:
        raise DataError(f"{path}:5: centre: found {centre.tolist()} mm, behind the camera; allowed: z > 0")
    x, y, _ = (intrinsics @ seen / seen[2]).tolist()
    box = square(path, "centre", (x, y), float(intrinsics[0, 0]) * HEAD_MM / float(seen[2]))
    person = SAME_PERSON.get(path.parent.name, path.parent.name)
    return Face(image, box, angles_deg(rotation), person)


def _numbers(path: Path, *counts: int) -> _Matrix:
    """Returns the numbers of a text file, as many as one of `counts`; raises DataError."""
    try:
        found = np.array(path.read_text("ascii").split(), dtype=np.float64)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is one
        raise DataError(f"{path}: found {error}; allowed: a text file of numbers") from None
    if len(found) not in counts or not np.isfinite(found).all():
        allowed = " or ".join(map(str, counts))
        raise DataError(f"{path}: found {len(found)} numbers; allowed: {allowed}, all finite")
    return found
