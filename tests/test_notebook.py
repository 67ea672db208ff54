"""The notebook of docs/: what is stored of it, and that its cells run one after the other, without Jupyter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "kaggle_t4.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_short_and_holds_no_outputs() -> None:
    assert len(NOTEBOOK["cells"]) <= 12
    assert {(cell.get("execution_count"), str(cell.get("outputs", []))) for cell in NOTEBOOK["cells"]} == {(None, "[]")}


@pytest.mark.workload
@pytest.mark.timeout(300)
def test_the_cells_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert sum('TIME = "4m"' in cell for cell in CODE) == 1
    names: dict[str, Any] = {}
    for cell in CODE:
        exec(cell.replace('TIME = "4m"', 'TIME = "15s"'), names)  # noqa: S102
    said = capsys.readouterr().out
    assert len(names["results"]) == 3
    assert all(result.best is not None for result in names["results"].values())
    assert all(network in said for network in ("lstm", "transformer", "mlp"))
    assert (names["pick"].folder / "train" / "model.safetensors").is_file()
    assert Path("trained.zip").is_file()
