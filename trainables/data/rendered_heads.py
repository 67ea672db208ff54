"""The set that needs no download: drawn heads, written once into a cache folder in the layout of 300W-LP.

    $XDG_CACHE_HOME/cardtune/heads-2300-0123456789ab/...              $XDG_CACHE_HOME is ~/.cache where it is not set

so that the same reader serves them and the public set. The hash is of the generator's source and its mesh: what
another version drew lies in another folder.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from trainables.data import head_mesh
from trainables.data.cache import written_once
from trainables.data.head_mesh import Camera, draw, landmarks, random_head, rotation

SIZE_PX = 144
"""The pixels of an image; those of 300W-LP have 450. The face's box is about 90 of them wide."""
MIDDLE_DM = np.array([0.0, 0.35, 0.2])
"""Between chin, crown, face and neck, from the mesh's own centre, which is where the neck bends."""


def folder(count: int) -> Path:
    """Returns the folder with so many heads, drawn first where it does not exist: 2,300 take 15 s.

    Head number i is the same whatever the count. Two processes may do this at once: each draws into a folder of its
    own, and the first to finish gives it its name. Raises DataError where nothing can be written.
    """
    return written_once(f"heads-{count}-{_generator()}", lambda root: _write(root, count))


@functools.cache
def _generator() -> str:
    """Returns a hash of what is drawn with."""
    parts = (Path(__file__), Path(head_mesh.__file__), head_mesh.MESH)
    return hashlib.sha256(b"".join(hashlib.sha256(part.read_bytes()).digest() for part in parts)).hexdigest()[:12]


def _write(root: Path, count: int) -> None:
    (root / "HEADS").mkdir()
    for index in range(count):
        stem, rng = root / "HEADS" / f"HEADS_{index:05d}_0", np.random.default_rng([index, 0])
        head = random_head(rng)
        # Pitch and roll as upright people hold their heads, yaw even over the range of BIWI.
        pitch, roll = np.clip(rng.normal(0.0, (20.0, 15.0)), (-60.0, -50.0), (60.0, 50.0)).tolist()
        yaw = float(rng.uniform(-75.0, 75.0))
        turned = rotation(yaw, pitch, roll)
        # The camera sees the middle of the turned head near that of the image.
        scale_px, at_px = 33.0 * rng.uniform(0.9, 1.1), SIZE_PX / 2 + rng.normal(0.0, 3.0, 2)
        aside = (turned @ MIDDLE_DM) * scale_px
        centre_px = (float(at_px[0] - aside[0]), float(at_px[1] + aside[1]))
        camera = Camera(scale_px, centre_px, (SIZE_PX, SIZE_PX))
        Image.fromarray(draw(head, turned, camera, rng)).save(stem.with_suffix(".jpg"), quality=92)
        pose = [*np.radians([pitch, yaw, roll]), *centre_px, 0.0, scale_px]
        points = landmarks(head, turned, camera)
        scipy.io.savemat(stem.with_suffix(".mat"), {"Pose_Para": np.array([pose]), "pt2d": points.astype(np.float64)})
