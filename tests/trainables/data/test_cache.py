"""A folder of the cache is complete or not there, whoever writes it and however often."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from trainables.data.cache import kept, written_once
from trainables.data.errors import DataError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own" / "cardtune"


def test_a_folder_is_written_once_and_found_again(home):
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "a").write_text("a")

    for _ in range(2):
        assert written_once("set-1", write) == home / "set-1"
    assert len(written) == 1
    assert [path.relative_to(home).as_posix() for path in home.rglob("*")] == ["set-1", "set-1/a"]


def test_writers_at_once_leave_one_whole_folder(home):
    together = Barrier(4)

    def write(folder: Path) -> None:
        for name in "abc":
            (folder / name).write_text(name)
        together.wait(timeout=30)  # all have written before the first can rename

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: written_once("set-1", write), range(4)))
    assert found == {home / "set-1"}
    assert sorted(path.name for path in home.rglob("*")) == ["a", "b", "c", "set-1"]


def test_what_is_interrupted_leaves_nothing(home):
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written_once("set-1", write)
    assert list(home.iterdir()) == []


def test_says_where_it_cannot_write(tmp_path, home):
    home.parent.write_text("a file in the way")
    with pytest.raises(DataError, match=r"cardtune: found .*; allowed: a folder to write to; set XDG_CACHE_HOME"):
        written_once("set-1", lambda folder: None)


def test_a_kept_value_is_made_again_if_changed_or_damaged(home):
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return [len(made)]

    assert [kept("n", parts, make) for parts in (["a", "b"], ["a", "b"], ["ab"], ["b", "a"])] == [[1], [1], [2], [3]]
    for path in home.glob("n-*.json"):
        path.write_text("{", encoding="utf-8")
    assert kept("n", ["a", "b"], make) == [4]


def test_what_cannot_be_kept_is_made_each_time(home, monkeypatch):
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder should be")
    made = [1, 2]
    assert [kept("n", ["a"], made.pop) for _ in range(2)] == [2, 1]
