"""A file is there whole, or as it was."""

import os

import pytest

from tuning.config import atomic
from tuning.config.errors import ConfigError


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = atomic.write_text(tmp_path / "a.txt", "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"a\.txt cannot be written: No space left on device"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_line_ends_are_kept(tmp_path):
    assert atomic.write_text(tmp_path / "a.csv", "a\r\nb\n").read_bytes() == b"a\r\nb\n"
