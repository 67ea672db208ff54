"""The set that needs no download: drawn heads, written once into a cache folder in the layout of a public set.

    $XDG_CACHE_HOME/cardtune/heads-300w_lp-2300-0123456789ab/...      $XDG_CACHE_HOME is ~/.cache where it is not set

so that the same readers serve them and the public sets. The hash is of the generator's source and its mesh: what
another version drew lies in another folder.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np
import scipy.io
from numpy.typing import NDArray
from PIL import Image

from trainables.data import head_mesh
from trainables.data.cache import written_once
from trainables.data.faces_biwi import SAME_PERSON
from trainables.data.head_mesh import Camera, Floats, Head, draw, landmarks, random_head, rotation

LAYOUTS = ("300w_lp", "biwi")
SIZE_PX = 144
"""Of an image in the layout of 300W-LP, whose own are 450; the face's box is about 90 of them wide."""
FRAME_PX = (160, 120)
"""Of an image in the layout of BIWI, whose own are (640, 480), with a longer lens: the box is as wide."""
FOCAL_PX = 324.0
SHIFT_MM = np.array([-24.0, 6.0, -13.0])
"""From the depth camera to the colour camera, about that of a Kinect."""
MIDDLE_DM = np.array([0.0, 0.35, 0.2])
"""Between chin, crown, face and neck, from the mesh's own centre, which is where the neck bends."""
SEQUENCES = 24


def folder(count: int, layout: str) -> Path:
    """Returns the folder with so many heads, drawn first where it does not exist: 2,300 take 15 s.

    Head number i is the same whatever the count. Two processes may do this at once: each draws into a folder of its
    own, and the first to finish gives it its name. Raises DataError where nothing can be written.
    """
    return written_once(f"heads-{layout}-{count}-{_generator()}", lambda root: _write(root, count, layout))


@functools.cache
def _generator() -> str:
    """Returns a hash of what is drawn with."""
    parts = (Path(__file__), Path(head_mesh.__file__), head_mesh.MESH)
    return hashlib.sha256(b"".join(hashlib.sha256(part.read_bytes()).digest() for part in parts)).hexdigest()[:12]


def _write(root: Path, count: int, layout: str) -> None:
    if layout == "300w_lp":
        (root / "HEADS").mkdir()
        for index in range(count):
            _write_300w_lp(root / "HEADS" / f"HEADS_{index:05d}_0", np.random.default_rng([index, 0]))
        return
    names = [f"{number:02d}" for number in range(1, SEQUENCES + 1)]
    people = {name: random_head(np.random.default_rng([int(SAME_PERSON.get(name, name)), 1])) for name in names}
    for name in names[:count]:
        (root / "hpdb" / name).mkdir(parents=True)
        (root / "hpdb" / name / "rgb.cal").write_text(_calibration())
    for index in range(count):
        name = names[index % SEQUENCES]
        frame = root / "hpdb" / name / f"frame_{3 + index // SEQUENCES:05d}"
        _write_biwi(frame, people[name], np.random.default_rng([index, 2]))


def _write_300w_lp(stem: Path, rng: np.random.Generator) -> None:
    head, (yaw, pitch, roll) = random_head(rng), _random_angles_deg(rng)
    turned = rotation(yaw, pitch, roll)
    camera = _camera(33.0 * rng.uniform(0.9, 1.1), SIZE_PX / 2 + rng.normal(0.0, 3.0, 2), turned, (SIZE_PX, SIZE_PX))
    Image.fromarray(draw(head, turned, camera, rng)).save(stem.with_suffix(".jpg"), quality=92)
    pose = [*np.radians([pitch, yaw, roll]), *camera.centre_px, 0.0, camera.scale_px]
    points = landmarks(head, turned, camera)
    scipy.io.savemat(stem.with_suffix(".mat"), {"Pose_Para": np.array([pose]), "pt2d": points.astype(np.float64)})


def _write_biwi(stem: Path, person: Head, rng: np.random.Generator) -> None:
    yaw, pitch, roll = _random_angles_deg(rng)
    turned = rotation(yaw, pitch, roll)
    middle = np.array([*rng.normal(0.0, (40.0, 25.0)), rng.uniform(800.0, 1000.0)])  # in the depth camera's frame
    x, y, z = middle + SHIFT_MM
    at = np.array([x, y]) * FOCAL_PX / z + np.array(FRAME_PX) / 2
    camera = _camera(FOCAL_PX * 100.0 / z, at, turned, FRAME_PX)
    Image.fromarray(draw(person, turned, camera, rng)).save(f"{stem}_rgb.png", compress_level=1)
    axes = np.diag([1.0, -1.0, -1.0])  # BIWI's: x right, y down, z away from the camera
    rows = [" ".join(f"{value:.8f}" for value in row) + " \n" for row in [*(axes @ turned @ axes), middle]]
    Path(f"{stem}_pose.txt").write_text("".join([*rows[:3], "\n", rows[3]]))


def _camera(scale_px: float, at_px: NDArray[np.float64], turned: Floats, size_px: tuple[int, int]) -> Camera:
    """Returns the camera that sees the middle of the turned head at a place of the image."""
    aside = (turned @ MIDDLE_DM) * scale_px
    return Camera(scale_px, (float(at_px[0] - aside[0]), float(at_px[1] + aside[1])), size_px)


def _calibration() -> str:
    """Returns rgb.cal: intrinsics, no distortion, no rotation from the depth camera, the shift from it, frame size."""
    (width, height), shift = FRAME_PX, " ".join(f"{value:g}" for value in SHIFT_MM)
    lens = f"{FOCAL_PX:g} 0 {width / 2:g}\n0 {FOCAL_PX:g} {height / 2:g}\n0 0 1\n"
    return f"{lens}\n0 0 0 0\n\n1 0 0\n0 1 0\n0 0 1\n\n{shift}\n\n{width} {height}\n"


def _random_angles_deg(rng: np.random.Generator) -> tuple[float, float, float]:
    """Returns yaw, pitch and roll: yaw even over the range of BIWI, the others as upright people hold their heads."""
    pitch, roll = np.clip(rng.normal(0.0, (20.0, 15.0)), (-60.0, -50.0), (60.0, 50.0))
    return float(rng.uniform(-75.0, 75.0)), float(pitch), float(roll)
