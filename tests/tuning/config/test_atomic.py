"""Files for a person: faults of the place are told from faults of the machine."""

import os

import pytest

from tuning.config import atomic
from tuning.config.errors import ConfigError, StoppedEarly


def test_a_full_disk_ends_the_command_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = atomic.write_text(tmp_path / "a.txt", "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoppedEarly, match=r"a\.txt cannot be written: No space left on device; what it held is safe"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_place_that_cannot_be_written_is_the_users_to_change(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        atomic.write_text(tmp_path / "gone" / "a.txt", "new")


def test_line_ends_are_kept(tmp_path):
    assert atomic.write_text(tmp_path / "a.csv", "a\r\nb\n").read_bytes() == b"a\r\nb\n"
