"""Drawn heads as files: what is read back is what was drawn, and is drawn once."""

import numpy as np
import pytest
from PIL import Image

from trainables.data import face_sets, rendered_heads
from trainables.data.faces import pixels


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_written_is_read_as_faces():
    faces = face_sets.read(rendered_heads.folder(30))
    assert len(faces) == 30
    angles = np.array([face.angles_deg for face in faces])
    assert (abs(angles) <= [75.01, 60.01, 50.01]).all()
    assert 30 < angles[:, 0].std() < 60 > 3 * angles[:, 2].std() > 10
    for face in faces:
        with Image.open(face.image) as image:
            width, height = image.size
        left, top, right, bottom = face.box
        assert 0 < (left + right) / 2 < width
        assert 0 < (top + bottom) / 2 < height
        assert pixels(face, 16).std() > 5
    drawn = {(face.image.parent.name, face.image.name): face for face in faces}
    few = face_sets.read(rendered_heads.folder(4))
    assert len(few) == 4
    for one in few:  # a smaller set begins like a larger one
        other = drawn[one.image.parent.name, one.image.name]
        assert one.image.read_bytes() == other.image.read_bytes()
        assert (one.box, one.angles_deg) == (other.box, other.angles_deg)


def test_heads_are_drawn_once(monkeypatch):
    first = rendered_heads.folder(2)
    monkeypatch.setattr(rendered_heads, "draw", None)
    assert rendered_heads.folder(2) == first


def test_another_generator_draws_into_another_folder(monkeypatch):
    first = rendered_heads.folder(2)
    monkeypatch.setattr(rendered_heads, "_generator", lambda: "another")
    assert rendered_heads.folder(2) != first
