"""Names in a workload's file that nobody reads are refused when it is loaded, and names of one's own are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainables.workload import WorkloadError
from trainables.workload_files import load

FILE = """
from tests.data.mine import Moons

class Mine(Moons):
{body}

{beside}
WORKLOAD = Mine()
"""
SLIPS = {
    **{"colate": "collate", "collate_fn": "collate", "lenght": "length", "scheduler": "schedule"},
    **{"optimiser": "optimizer", "baseline": "baselines", "Augment": "augment"},
}
MAJORITY = "BASELINES = {'majority': {'accuracy': 0.5}}"


def methods(*names: str) -> str:
    return "\n".join(f"    def {name}(self, samples):\n        return samples" for name in names)


def loaded(folder: Path, body: str = "    pass", beside: str = "") -> object:
    path = folder / "slips.py"
    path.write_text(FILE.format(body=body, beside=beside), encoding="utf-8")
    return load(str(path))


@pytest.mark.parametrize(
    ("body", "beside", "says"),
    [
        *((methods(name), "", f"has {name}, which nobody reads: is it `{meant}`") for name, meant in SLIPS.items()),
        (methods("colate"), "class Derived(Mine):\n    pass\n\nMine = Derived", "has colate, .* is it `collate`"),
        ("    pass", MAJORITY, "a method `baselines"),
        ("    pass", "OBJECTIVES = {'loss': 'min'}", "OBJECTIVES beside WORKLOAD"),
        ("    pass", "SPACE = {'batch_size': [8]}", "its `default_space`"),
        ("    pass", "OPTIONS = {'hidden': 8}", "OPTIONS beside WORKLOAD"),
        ("    pass", "BEFOR = {'batch_size': 8}", "BEFOR is not read: is it BEFORE"),
    ],
)
def test_a_name_that_nobody_reads_is_refused(tmp_path: Path, body: str, beside: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        loaded(tmp_path, body, beside)


@pytest.mark.parametrize(
    ("body", "beside"),
    [
        *((methods(name), "") for name in ("tokens", "read_csv", "datasets", "evaluation", "losses", "_colate")),
        (methods("collate", "collate_fn"), ""),
        ("    pass", "OBJECTIVES = Mine.objectives\nSPACE = Mine.default_space"),
        ("    pass", "SPACE = ' '\nSIZES = {'a': 1}\nBEFORE = {'batch_size': 8}"),
        ("    pass", f"{MAJORITY}\nMine.baselines = lambda self, config: BASELINES"),
    ],
)
def test_a_name_of_ones_own_or_that_is_read_is_allowed(tmp_path: Path, body: str, beside: str) -> None:
    assert loaded(tmp_path, body, beside)


def test_names_that_a_package_gives_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a_trainer.py").write_text("class Trainer:\n    def optimizers(self): ...\n", encoding="utf-8")
    path = tmp_path / "derived.py"
    text = FILE.format(body="    pass", beside="").replace("class Mine(Moons)", "class Mine(Moons, Trainer)")
    path.write_text(f"from a_trainer import Trainer\n{text}", encoding="utf-8")
    assert load(str(path))


def test_a_misspelt_attribute_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    needs = "\n".join(f"    def {n}(self, *_): ..." for n in ("model", "dataset", "loss", "evaluate"))
    own = "    objectives = {'a': 'max'}\n    default_space = {'batch_size': [8, 16]}\n    option = {'b': 1}"
    path.write_text(f"class Bare:\n{needs}\n{own}\n\nWORKLOAD = Bare\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="has option, which nobody reads: is it `options`"):
        load(str(path))
