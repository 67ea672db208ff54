"""What our workloads refuse: options that mean nothing, and to run without the packages they need."""

import importlib
import sys
from typing import Any

import pytest

from trainables.workload import Config, WorkloadError
from trainables.workload_files import load


@pytest.mark.parametrize(
    ("ref", "option", "allowed"),
    [
        ("nli", {"layers": 0}, "layers=0: expected a whole number >= "),
        ("nli", {"max_length": 7}, "max_length=7: expected a whole number >= "),
        ("pointer", {"nodes": 21}, "nodes=21: expected a whole number >= 5 and <= 20"),
        ("headpose", {"image_size": 8}, "image_size=8: expected a whole number >= 16"),
        ("temporal", {"label": "up"}, "label=up: expected one of volatility, direction"),
        ("signals", {"val_frac": 0.0}, r"val_frac=0\.0: expected a number > 0 and <= 0\.9"),
    ],
)
def test_options_that_mean_nothing_are_refused(ref, option, allowed):
    workload: Any = load(ref)
    with pytest.raises(WorkloadError, match=rf"workload\.{allowed}"):
        workload.dataset(Config(options=option), "val")


@pytest.mark.parametrize(("ref", "package"), [("nli", "peft"), ("pointer", "fast_tsp"), ("headpose", "scipy")])
def test_the_extra_that_is_not_installed_is_named(monkeypatch, ref, package):
    load(ref)  # with all that it imports, which is put back behind the test
    for name in list(sys.modules):
        if name.startswith((f"trainables.workloads.{ref}", "trainables.data", f"{package}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WorkloadError, match=rf"workload {ref} needs: pip install 'cardtune\[{ref}\]' \(.*{package}"):
        importlib.import_module(f"trainables.workloads.{ref}")
