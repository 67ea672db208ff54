"""Drawing heads: the rasteriser against a plain one, the signs of a pose, and where landmarks fall."""

import numpy as np
import pytest

from trainables.data.head_mesh import Camera, Head, landmarks, mesh, random_head, rasterise, rotation

CAMERA = Camera(33.0, (72.0, 80.0), (144, 144))
NOSE_TIP, CHIN, BETWEEN_EYES, RIGHT_EYE, LEFT_EYE = 30, 8, 27, 36, 45


def mean_face() -> Head:
    """Returns the mean of the nine faces, bald and grey; it is symmetric."""
    m = mesh()
    vertices = m.vertices + m.faces.mean(axis=0).reshape(-1, 3)
    return Head(vertices, np.zeros_like(vertices), np.full_like(vertices, 128.0))


def plainly(points: np.ndarray, triangles: np.ndarray, width: int, height: int) -> dict[int, int]:
    """Returns the triangle each pixel sees, pixel by pixel and triangle by triangle."""
    seen: dict[int, tuple[float, int]] = {}
    for number, (a, b, c) in enumerate(points[triangles].astype(float)):
        sides = np.array([b - a, c - a])[:, :2].T
        if np.linalg.det(sides) >= 0:
            continue
        for y in range(height):
            for x in range(width):
                second, third = np.linalg.solve(sides, [x + 0.5 - a[0], y + 0.5 - a[1]])
                if min(second, third, 1 - second - third) >= 0:
                    depth = a[2] + second * (b - a)[2] + third * (c - a)[2]
                    seen[y * width + x] = max(seen.get(y * width + x, (-np.inf, -1)), (depth, number))
    return {pixel: number for pixel, (_, number) in seen.items()}


@pytest.mark.parametrize("spread_px", [1.5, 6.0, 30.0])
def test_rasterise_sees_what_a_plain_rasteriser_sees(spread_px):
    rng = np.random.default_rng(0)
    middles = rng.uniform(-4, 20, (12, 1, 3))
    points = (middles + rng.normal(0, spread_px, (12, 3, 3))).reshape(-1, 3).astype(np.float32)
    triangles = np.arange(36).reshape(12, 3)
    pixels, owners, weights = rasterise(points, triangles, 16, 13)
    assert dict(zip(pixels.tolist(), owners.tolist(), strict=True)) == plainly(points, triangles, 16, 13)
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(pixels)), abs=1e-5)
    placed = (points[triangles[owners]] * weights[:, :, None]).sum(axis=1)
    assert placed[:, 0] == pytest.approx(pixels % 16 + 0.5, abs=1e-3)
    assert placed[:, 1] == pytest.approx(pixels // 16 + 0.5, abs=1e-3)


@pytest.mark.parametrize(("angles", "axis"), [((30, 0, 0), 0), ((0, 20, 0), 1)], ids=["yaw: left", "pitch: up"])
def test_the_nose_goes_where_yaw_and_pitch_say(angles, axis):
    straight, turned = (landmarks(mean_face(), rotation(*a), CAMERA)[:, NOSE_TIP] for a in ((0, 0, 0), angles))
    moved = turned - straight
    assert moved[axis] < -5
    assert abs(moved[1 - axis]) < 0.5 * abs(moved[axis])


def test_roll_turns_the_head_clockwise():
    found = landmarks(mean_face(), rotation(0, 0, 30), CAMERA)
    up = found[:, BETWEEN_EYES] - found[:, CHIN]
    assert np.degrees(np.arctan2(up[0], -up[1])) == pytest.approx(30, abs=1)


def test_landmarks_are_symmetric_and_in_the_order_of_300_w():
    found = landmarks(mean_face(), rotation(0, 0, 0), Camera(100.0, (0.0, 0.0), (1, 1)))
    assert found[0, :17] == pytest.approx(-found[0, 16::-1], abs=0.5)  # the jaw, from side to side
    assert found[1, :17] == pytest.approx(found[1, 16::-1], abs=0.5)
    assert found[0, RIGHT_EYE] < -20 < 20 < found[0, LEFT_EYE]  # the head's right is the image's left
    assert found[1, CHIN] == pytest.approx(found[1].max(), abs=1)
    assert found[1, 17:27].max() < found[1, 27:].min()  # brows over all else but the jaw's ends


def test_a_head_covers_the_image_where_its_landmarks_are():
    rng = np.random.default_rng(3)
    head = random_head(rng)
    turned = rotation(20, 10, 5)
    pixels, _, _ = rasterise(CAMERA.project(head.vertices @ turned.T), mesh().triangles, 144, 144)
    covered = np.zeros((144, 144), bool)
    covered.flat[pixels] = True
    x, y = np.round(landmarks(head, turned, CAMERA)[:, 17:] - 0.5).astype(int)  # the jaw's may be at the outline
    assert covered[y, x].mean() > 0.95
    assert 0.1 < covered.mean() < 0.6
