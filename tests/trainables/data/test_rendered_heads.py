"""Drawn heads as files: what is read back is what was drawn, and the cache survives what may happen to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainables.data import face_sets, rendered_heads
from trainables.data.errors import DataError
from trainables.data.faces import pixels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cardtune"


@pytest.mark.parametrize("layout", rendered_heads.LAYOUTS)
def test_what_is_written_is_read_as_faces(layout: str) -> None:
    faces = face_sets.read(rendered_heads.folder(30, layout))
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


@pytest.mark.parametrize("layout", rendered_heads.LAYOUTS)
def test_a_smaller_set_begins_like_a_larger_one(layout: str) -> None:
    few, many = (face_sets.read(rendered_heads.folder(count, layout)) for count in (4, 6))
    assert [f.image.name for f in few] == [f.image.name for f in many[:4]]
    for one, other in zip(few, many[:4], strict=True):
        assert one.image.read_bytes() == other.image.read_bytes()
        assert (one.box, one.angles_deg) == (other.box, other.angles_deg)


def test_in_the_layout_of_biwi_two_sequences_of_one_person_show_one_person() -> None:
    faces = face_sets.read(rendered_heads.folder(24, "biwi"))
    assert len({face.image.parent for face in faces}) == 24
    assert len({face.group for face in faces}) == 20


def test_heads_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rendered_heads.folder(2, "300w_lp")
    monkeypatch.setattr(rendered_heads, "draw", None)
    assert rendered_heads.folder(2, "300w_lp") == first


def test_another_generator_draws_into_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rendered_heads.folder(2, "300w_lp")
    monkeypatch.setattr(rendered_heads, "_generator", lambda: "another")
    assert rendered_heads.folder(2, "300w_lp") != first


def test_two_at_once_end_with_one_whole_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)  # both have looked for the folder before either has written it
    write = rendered_heads._write

    def together(*args: object) -> None:
        both.wait()
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rendered_heads, "_write", together)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(rendered_heads.folder(3, "300w_lp"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 2
    assert [p.name for p in cache.iterdir()] == [found[0].name]
    assert len(face_sets.read(found[0])) == 3


def test_what_was_cut_off_is_not_taken_for_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(rendered_heads, "_write_300w_lp", full)
        with pytest.raises(
            DataError, match=r"No space left on device; allowed: a folder to write to; set XDG_CACHE_HOME"
        ):
            rendered_heads.folder(2, "300w_lp")
    assert not list(cache.iterdir())
    assert len(face_sets.read(rendered_heads.folder(2, "300w_lp"))) == 2
