"""Sets of faces with known poses: which layout a folder has, and which of its faces are held out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from trainables.data import faces_300w_lp, faces_biwi
from trainables.data.cache import kept
from trainables.data.errors import OTHER_LAYOUTS, wrong
from trainables.data.faces import Face

NOT_FACES = ("landmarks", "Code")
"""Folders of 300W-LP with .mat files of another kind."""
INDEXED_FILES = 1000
"""Sets of fewer files are read in a second or two."""
INDEX = 4
"""The version of a face's fields; another number makes every kept index anew."""


def read(folder: Path) -> list[Face]:
    """Returns the faces of a folder in the layout of 300W-LP or BIWI, in the order of their paths.

    The layout is told by the files: 300W-LP has .mat, BIWI frame_*_pose.txt. Raises DataError.
    """
    mats, poses = [], []
    if not folder.is_dir():
        raise wrong(folder, "no such folder", "one of 300W-LP or BIWI")
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in NOT_FACES)
        paths = [Path(where, name) for name in sorted(files) if not name.startswith(".")]
        mats += [path for path in paths if path.suffix == ".mat"]
        poses += [path for path in paths if path.match("frame_*_pose.txt")]
    if mats and poses:
        raise wrong(folder, f"{mats[0].name} and {poses[0].name}", "one set of faces; give its folder")
    faces = _indexed("biwi", poses, faces_biwi.read) if poses else _indexed("mat", mats, faces_300w_lp.read)
    if not faces:
        allowed = "NAME.mat (300W-LP) or frame_*_pose.txt (BIWI)"
        raise wrong(folder, "no face with a pose", allowed, remedy=OTHER_LAYOUTS)
    return faces


def _indexed(kind: str, files: list[Path], read: Callable[[list[Path]], list[Face]]) -> list[Face]:
    """Returns what `read` makes of the files; of a large set it is kept in the user's cache until one of them changes.

    Every process of a study reads the set, and 122,450 .mat files are opened one by one.
    """
    if len(files) < INDEXED_FILES:
        return read(files)
    states = [(path, path.stat()) for path in files]
    made_of = [f"{INDEX} {kind}", *(f"{path.absolute()} {s.st_size} {s.st_mtime_ns}" for path, s in states)]
    rows = kept("faces", made_of, lambda: [(str(f.image), f.box, f.angles_deg, f.group) for f in read(files)])
    return [Face(Path(image), tuple(box), tuple(angles), group) for image, box, angles, group in rows]


def split(faces: list[Face], val_frac: float, seed: int) -> tuple[list[Face], list[Face]]:
    """Returns the faces to train on and those to validate on; no photograph or person is in both.

    `val_frac` is the share of the groups held out, at least one. The split depends on the faces and `seed` alone.
    Raises DataError where there is one group.
    """
    groups = sorted({face.group for face in faces})
    if len(groups) < 2:
        raise wrong(faces[0].image.parent, f"faces of {groups[0]} alone", "two groups to split, or val_data")
    random.Random(seed).shuffle(groups)
    held_out = set(groups[: min(len(groups) - 1, max(1, round(val_frac * len(groups))))])
    return [f for f in faces if f.group not in held_out], [f for f in faces if f.group in held_out]
