"""A file is there whole, or as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainables.files import cache_dir, write_whole


def test_writers_at_once_leave_one_of_their_files_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    payloads = [bytes([n]) * 100_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda payload: write_whole(path, payload), payloads * 4))
    assert path.read_bytes() in payloads
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_private_unless_it_is_to_be_shared(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "a", b"").stat().st_mode & 0o777 == 0o600


def test_the_cache_follows_the_xdg_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == tmp_path / ".cache" / "cardtune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own" / "cardtune"
