"""A file is there whole, or as it was; what a dead writer left is removed by the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainables.files import cache_dir, write_whole

SLOW = """
import os, pathlib, sys
from trainables import files
real = os.fsync
def fsync(handle):
    print("draft", flush=True)
    sys.stdin.read()
    real(handle)
os.fsync = fsync
files.write_whole(pathlib.Path(sys.argv[1]), b"late")
"""


def test_the_draft_of_a_killed_writer_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "best[1].yaml"
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
        )
        for _ in range(2)
    ]
    dead, live = writers
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"draft\n"
    assert len(list(tmp_path.iterdir())) == 2
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    write_whole(path, b"now")
    assert path.read_bytes() == b"now"
    assert len(list(tmp_path.iterdir())) == 2  # the file, and the draft of the live writer
    live.communicate(b"")
    assert live.returncode == 0
    assert path.read_bytes() == b"late"
    assert list(tmp_path.iterdir()) == [path]
    for stream in (dead.stdin, dead.stdout):
        assert stream is not None
        stream.close()


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
