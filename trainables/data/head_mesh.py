"""Heads drawn from a mesh: random faces, a given pose, and the 68 landmarks that belong to it.

The mesh is the head of the MakeHuman base mesh with nine faces to mix and 21 shapes to add (CC0, THIRD_PARTY.md). The
head's own axes are x to its left, y up, z out of its face, in decimetres; unrotated it looks at the camera, so x is to
the right of the image. A head takes 5 ms at 144 x 144 pixels on one core.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import sparse

MESH = Path(__file__).parent / "samples" / "head_mesh_cc0.npz"

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]

# Vertices at the places of the 68 landmarks of 300-W (Sagonas et al., ICCVW 2013), in its order: jaw from the head's
# right to its left (17), brows (10), nose (9), eyes (12), outer (12) and inner lips (8). Picked by eye on the right
# half of the mean face; the left half is its mirror image.
# fmt: off
LANDMARKS = np.array([
    2120, 2003, 2128, 736, 1615, 1673, 1598, 1596, 1546, 3673, 3675, 3745, 3691, 2846, 4192, 4067, 4184, 207, 206,
    204, 208, 209, 2374, 2373, 2369, 2371, 2372, 136, 135, 164, 1429, 364, 305, 307, 2460, 2514, 1376, 7, 1372,
    1397, 47, 41, 3482, 3457, 2181, 3461, 2215, 2221, 424, 1726, 460, 466, 2609, 3795, 2574, 2629, 2631, 492, 486,
    484, 497, 506, 509, 2645, 2636, 2650, 513, 512,
])
# fmt: on


@dataclass(frozen=True)
class Mesh:
    """The parts that every head shares.

    vertices (vertex, 3), relative to the head's centre; faces and shapes, (9 or 21, vertex * 3), offsets from them;
    triangles (triangle, 3); eyes (vertex,), true on the eyeballs; normals_of (vertex, triangle), which triangles meet
    in a vertex.
    """

    vertices: Floats
    faces: Floats
    shapes: Floats
    triangles: Ints
    eyes: NDArray[np.bool_]
    normals_of: sparse.csr_matrix


@dataclass(frozen=True)
class Head:
    """A person: vertices (vertex, 3), their unit normals (vertex, 3), and their colours (vertex, 3), 0 to 255."""

    vertices: Floats
    normals: Floats
    colours: Floats


@dataclass(frozen=True)
class Camera:
    """A parallel projection: pixels a decimetre, where the mesh's centre falls (x, y), and the image's size."""

    scale_px: float
    centre_px: tuple[float, float]
    size_px: tuple[int, int]

    def project(self, points: Floats) -> Floats:
        """Returns pixels (point, 3), x to the right, y down, z towards the camera, of turned points (point, 3)."""
        x, y = self.centre_px
        return points * np.array([1, -1, 1], np.float32) * np.float32(self.scale_px) + np.array([x, y, 0], np.float32)


@functools.cache
def mesh() -> Mesh:
    """Returns the packaged mesh, loaded once a process."""
    with np.load(MESH) as file:
        found = {name: file[name] for name in file.files if file[name].dtype.kind != "U"}
    triangles = found["tri"].astype(np.intp)
    vertices = (found["v"] - found["center"]).astype(np.float32)
    eyes = np.zeros(len(vertices), bool)
    eyes[triangles[found["eye"]]] = True
    ones, owners = np.ones(triangles.size, np.float32), np.repeat(np.arange(len(triangles)), 3)
    meets = sparse.csr_matrix((ones, (triangles.ravel(), owners)), shape=(len(vertices), len(triangles)))
    flat = {name: found[name].astype(np.float32).reshape(len(found[name]), -1) for name in ("macro", "shape")}
    return Mesh(vertices, flat["macro"], flat["shape"], triangles, eyes, meets)


def rotation(yaw_deg: float, pitch_deg: float, roll_deg: float) -> Floats:
    """Returns the rotation (3, 3) of a head, in the convention of 300W-LP: R = Rx(pitch) Ry(yaw) Rz(roll).

    The three are the transposes of the usual matrices (Zhu et al., 3DDFA, arXiv 1511.07212). Yaw turns the nose to the
    left of the image, pitch up, and roll turns the head clockwise in it.
    """
    y, p, r = np.radians([yaw_deg, pitch_deg, roll_deg])
    about_x = np.array([[1, 0, 0], [0, np.cos(p), np.sin(p)], [0, -np.sin(p), np.cos(p)]])
    about_y = np.array([[np.cos(y), 0, -np.sin(y)], [0, 1, 0], [np.sin(y), 0, np.cos(y)]])
    about_z = np.array([[np.cos(r), np.sin(r), 0], [-np.sin(r), np.cos(r), 0], [0, 0, 1]])
    return np.asarray(about_x @ about_y @ about_z, np.float32)


def random_head(rng: np.random.Generator) -> Head:
    """Returns a person: a mixture of the nine faces, some of each shape, a colour of skin, and hair for five in six."""
    m = mesh()
    mixture = rng.dirichlet(np.full(len(m.faces), 0.5)).astype(np.float32)
    amounts = rng.uniform(-0.2, 0.8, len(m.shapes)).astype(np.float32)
    vertices = m.vertices + (mixture @ m.faces + amounts @ m.shapes).reshape(-1, 3)
    corners = vertices[m.triangles]
    normals = m.normals_of @ np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.linalg.norm(normals, axis=1, keepdims=True) + 1e-9
    skin = np.array([242.0, 191.0, 158.0]) * rng.uniform(0.35, 1.0) * rng.uniform(0.9, 1.1, 3)
    colours = np.tile(skin.astype(np.float32), (len(vertices), 1))
    if rng.random() < 5 / 6:
        top = vertices[:, 1] > rng.uniform(0.95, 1.2)
        back = (vertices[:, 2] < -0.1) & (vertices[:, 1] > -0.4)
        colours[top | back] = np.array([89.0, 64.0, 51.0]) * rng.uniform(0.1, 2.0)
    colours[m.eyes] = 242.0
    return Head(vertices, np.asarray(normals, np.float32), np.clip(colours, 0.0, 255.0))


def draw(head: Head, turned: Floats, camera: Camera, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Returns an image (height, width, 3) of the head after the rotation `turned` (3, 3).

    A lamp at a random place before the head, a blurred background of random colours, and noise as a sensor has it.
    """
    width, height = camera.size_px
    blots = Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8))
    image = np.array(blots.resize((width, height), Image.Resampling.BICUBIC), np.float32).reshape(-1, 3)
    lamp = rng.normal(size=3)
    lamp[2] = abs(lamp[2]) + 0.7
    lamp = lamp / np.linalg.norm(lamp)
    light = 0.35 + 0.65 * np.clip(head.normals @ (turned.T @ lamp.astype(np.float32)), 0.0, 1.0)
    triangles = mesh().triangles
    pixels, owners, weights = rasterise(camera.project(head.vertices @ turned.T), triangles, width, height)
    shaded = head.colours * light[:, None]
    image[pixels] = np.einsum("pcx,pc->px", shaded[triangles[owners]], weights)
    image += 4.0 * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(image, 0.0, 255.0).astype(np.uint8).reshape(height, width, 3)


def landmarks(head: Head, turned: Floats, camera: Camera) -> Floats:
    """Returns the landmarks in pixels of the image, (2, 68); hidden ones too, as in 300W-LP."""
    return camera.project(head.vertices[LANDMARKS] @ turned.T)[:, :2].T


def rasterise(points: Floats, triangles: Ints, width: int, height: int) -> tuple[Ints, Ints, Floats]:
    """Returns which pixels see a triangle, y * width + x, which triangle it is, and its corners' weights (pixel, 3).

    `points` (point, 3) are in pixels, z towards the camera; triangles that run clockwise in the image are seen from
    behind and left out. A pixel sees the nearest triangle at its middle. All triangles of like extent are tried at
    once, each on the square of pixels it may cover; most of a head's cover four pixels or fewer.
    """
    x, y, z = (points.T[axis][triangles.T] for axis in range(3))  # (3, triangle) each: one row a corner
    along_x, along_y = x[1:] - x[0], y[1:] - y[0]
    area = along_x[0] * along_y[1] - along_y[0] * along_x[1]
    facing = np.flatnonzero(area < 0.0)  # y points down, so what faces the camera runs the other way round
    (left, right), (top, bottom) = (_middles(c[:, facing], size) for c, size in ((x, width), (y, height)))
    extent = np.maximum(right - left, bottom - top) + 1
    extent[(right < left) | (bottom < top)] = 0
    found: list[tuple[Ints, Ints, Floats, Floats]] = []
    smallest = 0
    while smallest < extent.max(initial=0):
        largest = smallest + max(1, smallest // 2)
        some = np.flatnonzero((extent > smallest) & (extent <= largest))
        smallest = largest
        owner = facing[some]
        columns, rows = (start[some, None] + np.arange(largest) for start in (left, top))
        dx = (columns.astype(np.float32) + 0.5 - x[0, owner, None])[:, None, :]
        dy = (rows.astype(np.float32) + 0.5 - y[0, owner, None])[:, :, None]
        sides = np.stack([along_x, along_y])[:, :, owner, None, None] / area[owner, None, None]
        second = dx * sides[1, 1] - dy * sides[0, 1]
        third = dy * sides[0, 0] - dx * sides[1, 0]
        inside = (second >= 0.0) & (third >= 0.0) & (second + third <= 1.0)
        inside &= (columns <= right[some, None])[:, None, :] & (rows <= bottom[some, None])[:, :, None]
        which, row, column = np.nonzero(inside)
        found.append((rows[which, row] * width + columns[which, column], owner[which], second[inside], third[inside]))
    if not found:
        return np.empty(0, np.intp), np.empty(0, np.intp), np.empty((0, 3), np.float32)
    pixel, owner, second, third = (np.concatenate(part) for part in zip(*found, strict=True))
    weights = np.stack([1.0 - second - third, second, third], axis=1)
    depth = np.einsum("cp,pc->p", z[:, owner], weights)
    order = np.argsort(depth, kind="stable")
    nearest = np.full(width * height, -1)
    nearest[pixel[order]] = order  # of what is assigned to one place several times, the last remains: the nearest
    seen = np.flatnonzero(nearest >= 0)
    return seen, owner[nearest[seen]], weights[nearest[seen]].astype(np.float32)


def _middles(corners: Floats, size: int) -> tuple[Ints, Ints]:
    """Returns each triangle's first and last pixel whose middle its corners (3, triangle) span, inside the image."""
    a, b, c = corners - np.float32(0.5)
    low = np.ceil(np.maximum(np.minimum(np.minimum(a, b), c), 0.0))
    high = np.floor(np.minimum(np.maximum(np.maximum(a, b), c), size - 1.0))
    return low.astype(np.intp), high.astype(np.intp)
