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
METHOD = "    def {name}(self, samples):\n        return samples"


def _load(folder: Path, body: str = "    pass", beside: str = "") -> object:
    path = folder / "slips.py"
    path.write_text(FILE.format(body=body, beside=beside), encoding="utf-8")
    return load(str(path))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("colate", "collate"), ("collate_fn", "collate"), ("lenght", "length"), ("scheduler", "schedule")),
        *(("optimiser", "optimizer"), ("baseline", "baselines"), ("Augment", "augment")),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_one_that_is_meant(tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(WorkloadError, match=f"has {name}, which nobody reads: is it `{meant}`"):
        _load(tmp_path, METHOD.format(name=name))


@pytest.mark.parametrize("name", ["tokens", "read_csv", "datasets", "evaluation", "losses", "_colate", "helper"])
def test_methods_of_ones_own_are_allowed(tmp_path: Path, name: str) -> None:
    assert _load(tmp_path, METHOD.format(name=name))


def test_a_hook_beside_a_helper_of_a_name_like_it_is_allowed(tmp_path: Path) -> None:
    assert _load(tmp_path, "\n".join(METHOD.format(name=name) for name in ("collate", "collate_fn")))


def test_names_that_a_package_gives_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a_trainer.py").write_text("class Trainer:\n    def optimizers(self): ...\n", encoding="utf-8")
    path = tmp_path / "derived.py"
    text = FILE.format(body="    pass", beside="").replace("class Mine(Moons)", "class Mine(Moons, Trainer)")
    path.write_text(f"from a_trainer import Trainer\n{text}", encoding="utf-8")
    assert load(str(path))


def test_a_misspelt_hook_of_a_base_in_the_same_file_is_refused(tmp_path: Path) -> None:
    beside = "class Derived(Mine):\n    pass\n\nMine = Derived"
    with pytest.raises(WorkloadError, match="has colate, which nobody reads: is it `collate`"):
        _load(tmp_path, METHOD.format(name="colate"), beside)


def test_a_misspelt_attribute_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    needs = "\n".join(f"    def {n}(self, *_): ..." for n in ("model", "dataset", "loss", "evaluate"))
    own = "    objectives = {'a': 'max'}\n    default_space = {'batch_size': [8, 16]}\n    option = {'b': 1}"
    path.write_text(f"class Bare:\n{needs}\n{own}\n\nWORKLOAD = Bare\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="has option, which nobody reads: is it `options`"):
        load(str(path))


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ("BASELINES = {'majority': {'accuracy': 0.5}}", "a class says it as a method `baselines"),
        ("OBJECTIVES = {'loss': 'min'}", "OBJECTIVES beside WORKLOAD is not read"),
        ("SPACE = {'batch_size': [8]}", "a class says it as its `default_space`"),
        ("OPTIONS = {'hidden': 8}", "OPTIONS beside WORKLOAD is not read"),
        ("BEFOR = {'batch_size': 8}", "BEFOR is not read: is it BEFORE"),
    ],
)
def test_what_stands_beside_a_class_and_is_ignored_is_refused(tmp_path: Path, beside: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        _load(tmp_path, beside=beside)


@pytest.mark.parametrize(
    "beside",
    [
        "OBJECTIVES = Mine.objectives\nSPACE = Mine.default_space",
        "SPACE = ' '\nSIZES = {'a': 1}\nBEFORE = {'batch_size': 8}",
        "BASELINES = {'majority': {'accuracy': 0.5}}\nMine.baselines = lambda self, config: BASELINES",
    ],
)
def test_what_the_class_itself_reads_may_stand_beside_it(tmp_path: Path, beside: str) -> None:
    assert _load(tmp_path, beside=beside)
