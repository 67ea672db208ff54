"""What travels to a cluster's nodes: our packages, the workload's file and what it reads beside itself; no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuning.config.errors import ConfigError
from tuning.workers import shipped

FILE = """
from beside import WIDTH
from pathlib import Path

ROWS = (Path(__file__).parent / "rows.csv").read_text()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a workload's file, what it needs, and what it does not."""
    folder = tmp_path / "own"
    for name in ("mine.py", "beside.py", "rows.csv", ".env", ".git/x", "runs/mine/one/trials.jsonl", "below/y.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FILE if name == "mine.py" else "WIDTH = 3")
    for name in ("env/pyvenv.cfg", "env/lib.py", "__pycache__/z.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_file_travels_with_what_lies_beside_it_and_without_secrets_runs_and_environments(
    own: Path, tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    assert shipped.stage(str(own / "mine.py"), stage, own / "runs") == "shipped_workload/mine.py"
    assert {p.name for p in stage.iterdir()} == {"tuning", "trainables", "search_spaces", "shipped_workload"}
    assert files(stage / "shipped_workload") == {"mine.py", "beside.py", "rows.csv", "below/y.txt"}
    assert not list(stage.rglob("*.pyc"))


def test_a_module_travels_with_its_package_and_what_is_installed_or_ours_does_not(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for ref, more in (
        ("own.mine", {"own"}),
        ("nli", set()),
        ("yaml.nodes", set()),
        ("trainables.workloads.nli", set()),
    ):
        stage = tmp_path / f"stage of {ref}"
        stage.mkdir()
        assert shipped.stage(ref, stage, own / "runs") == ref
        assert {p.name for p in stage.iterdir()} == {"tuning", "trainables", "search_spaces", *more}


def test_data_beside_a_file_is_refused_by_name(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "MOST_BYTES", 8 * 2**20)
    with (own / "below" / "images.bin").open("wb") as file:
        file.truncate(9 * 2**20)
    with pytest.raises(ConfigError, match=r"holds 9 MiB; most of it is below/images\.bin") as failed:
        shipped.stage(str(own / "mine.py"), tmp_path, own / "runs")
    assert "workload.data=PATH" in failed.value.remedy
