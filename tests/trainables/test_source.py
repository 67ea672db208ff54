"""The hash of a workload's code: what the user wrote is in it, wherever it lies, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainables.source import source_hash
from trainables.workload import OwnLoop
from trainables.workload_files import load_own_loop

TEXT = """
import json, torch
from torch import nn
import {helper}
SPACE, OBJECTIVES = {{"learning_rate": 0.1}}, {{"error": "min"}}
def train(run): ...
"""


def written(folder: Path, helper: str = "json") -> OwnLoop:
    """Returns a loop of one's own in a file that imports `helper`."""
    path = folder / "script.py"
    path.write_text(TEXT.format(helper=helper))
    made = {"SPACE": {"learning_rate": 0.1}, "OBJECTIVES": {"error": "min"}, "train": lambda run: None}
    return load_own_loop(str(path), SimpleNamespace(__file__=str(path), **made))


def test_a_file_alone_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    own = written(tmp_path)
    assert source_hash(own) == hashlib.sha256((tmp_path / "script.py").read_bytes()).hexdigest(), "as in older records"
    (tmp_path / "unused.py").write_text("")
    assert source_hash(own) == source_hash(written(tmp_path))


@pytest.mark.parametrize(
    ("helper", "files"),
    [
        ("beside", {"beside.py": "N = 1"}),
        ("beside", {"beside.py": "def later():\n    import further", "further.py": "N = 1"}),
        ("pack.part", {"pack/__init__.py": "", "pack/part.py": "from . import other", "pack/other.py": "N = 1"}),
        ("pack.part", {"pack/part.py": "from .sub.other import N", "pack/sub/other.py": "N = 1"}),
        ("one", {"one.py": "import two", "two.py": "import one\nN = 1"}),
    ],
    ids=["beside", "of a helper", "relative", "without __init__", "in a circle"],
)
def test_what_the_file_imports_of_the_users_own_is_in_it(tmp_path: Path, helper: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = written(tmp_path, helper)
    before = source_hash(own)
    changed = tmp_path / list(files)[-1]
    changed.write_text(changed.read_text().replace("1", "2"))
    assert source_hash(own) != before
    changed.write_text(changed.read_text().replace("2", "1"))
    assert source_hash(own) == before


def test_a_module_elsewhere_on_the_path_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "elsewhere.py").write_text(f"NAME = {name!r}")
        monkeypatch.syspath_prepend(str(tmp_path / name))
        hashes.append(source_hash(written(tmp_path, "elsewhere")))
    assert hashes[0] != hashes[1]


def test_modules_that_cannot_be_parsed_or_found_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def broken(")
    assert source_hash(written(tmp_path, "beside"))
    assert source_hash(written(tmp_path, "nowhere.at_all"))


def test_a_users_package_counts_and_an_installed_name_does_not(tmp_path: Path) -> None:
    inner = tmp_path / "pack" / "inner"
    inner.mkdir(parents=True)
    for folder in (tmp_path / "pack", inner):
        (folder / "__init__.py").write_text("")
    (tmp_path / "pack" / "common.py").write_text("N = 1")
    (tmp_path / "yaml.py").write_text("N = 1")  # called as what is installed
    own = written(inner, "json")
    (inner / "script.py").write_text("from ..common import N\nimport yaml\n")
    before = source_hash(own)
    (tmp_path / "yaml.py").write_text("N = 2")
    assert source_hash(own) == before
    (tmp_path / "pack" / "common.py").write_text("N = 2")
    assert source_hash(own) != before
