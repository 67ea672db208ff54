"""Lightning's own Trainer under `run`: its horizon, its schedules, its data; the real package, no stand-in."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainables.test_framework_loops import knobs_of, session_of
from trainables import own_loop
from trainables.plan import Plan
from trainables.workload import WorkloadError

pytest.importorskip("pytorch_lightning")
KNOBS = knobs_of("lightning")
ENDLESS = """class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TRAIN)


class Data("""
FIT = 'trainer.fit(Net(run["learning_rate"]), Data(**run.loader()))'
OWN_FIT = """net = Net(run["learning_rate"])
    net.loader = run.loader()
    trainer.fit(net)"""

OWN_DATA = """class Net(LightningModule):
    def setup(self, stage):
        self.data = TRAIN

    def train_dataloader(self):
        return DataLoader(self.data, shuffle=True, **self.loader)

    def val_dataloader(self):
        return DataLoader(VAL, batch_size=256)
"""


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    return functools.partial(session_of, "lightning", tmp_path)


def test_what_the_micro_batch_changes_is_seen(changed: Any) -> None:
    changes = {"micro_batch_size": 16, "channels_last": True}
    norm = ("nn.Linear(2, 32), nn.ReLU()", "nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU()")
    for session, found in ((changed(), []), (changed(norm), ["micro_batch_size"])):
        session.describe(KNOBS)
        seen = session.kinds(KNOBS, changes)
        assert (list(seen["changed"]), seen["message"]) == (found, "")


def test_a_horizon_within_a_batch_and_passes_of_odd_length(changed: Any) -> None:
    session = changed(("moons(1024, 1)", "moons(100, 1)"))
    found = session.train(KNOBS, Plan(250, (250,)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 264), found["message"]  # whole micro-batches
    assert found["spans"]["steps"] == 9  # behind the first, of passes of four steps
    found = session.train(KNOBS, Plan(216, (216,)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 232), "its last batch is whole"


def test_a_batch_has_the_samples_that_were_drawn(changed: Any) -> None:
    session = changed(
        (
            "DataLoader(TRAIN, shuffle=True, **",
            "DataLoader(TRAIN, shuffle=True, collate_fn=lambda b: tuple(zip(*b)), **",
        ),
        ("points, labels = batch\n        return nn", "points, labels = map(torch.stack, batch)\n        return nn"),
    )
    found = session.train(KNOBS, Plan(1024, (1024,)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 1024), found["message"]
    assert (found["active"]["batch_size"], found["spans"]["steps"]) == (32, 31)


def test_a_schedule_ends_with_the_run(changed: Any) -> None:
    cosine = ("OneCycleLR(optimizer, self.learning_rate, total_steps=steps)", "CosineAnnealingLR(optimizer, steps)")
    session = changed(("moons(1024, 1)", "moons(100, 1)"), cosine)
    resident = session.resident
    assert isinstance(resident, own_loop.OwnResident)
    state = own_loop.prepare(resident, session.config(KNOBS), Plan(300, (300,)))
    list(own_loop.train(state))
    assert state.optimizer is not None
    assert (state.samples, state.optimizer.param_groups[0]["lr"]) == (300, pytest.approx(0.0, abs=1e-9))


SMALLER = ("moons(1024, 1)", "moons(256, 1)")
"""Passes of 8 steps."""
BY_PASSES = (
    ("OneCycleLR(optimizer, self.learning_rate, total_steps=steps)", "CosineAnnealingLR(optimizer, steps)"),
    ("self.trainer.estimated_stepping_batches", "self.trainer.max_epochs"),
    ('"interval": "step"', '"interval": "epoch"'),
)
"""A schedule as it is usual."""


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(("samples", "left"), [(1024, 0.0), (896, 0.01 * (1 - math.cos(math.pi / 4)) / 2)])
def test_a_schedule_by_passes_ends_with_the_run(changed: Any, has_own: bool, samples: int, left: float) -> None:
    own = (("class Net(LightningModule):\n", OWN_DATA), (FIT, OWN_FIT)) if has_own else ()
    session = changed(SMALLER, *BY_PASSES, *own)
    state = own_loop.prepare(session.resident, session.config(KNOBS), Plan(samples, (samples,)))
    list(own_loop.train(state))
    assert state.optimizer is not None
    assert (state.samples, state.optimizer.param_groups[0]["lr"]) == (samples, pytest.approx(left, abs=1e-9))


IN_SETUP = (
    ("self.trainer.estimated_stepping_batches", "self.total"),
    (
        "class Net(LightningModule):\n",
        """class Net(LightningModule):
    def setup(self, stage):
        self.total = int(self.trainer.estimated_stepping_batches)

""",
    ),
)


def test_the_length_is_known_in_the_modules_setup_where_the_data_are_not_its_own(changed: Any) -> None:
    found = changed(*IN_SETUP).train(KNOBS, Plan(2048, (2048,)), 0)  # torch raises where a cycle has too few steps
    assert (found["outcome"], found["samples"]) == ("ok", 2048), found["message"]


@pytest.mark.parametrize("by", [BY_PASSES, ()], ids=["passes", "steps"])
def test_a_pass_that_is_shorter_than_was_said_ends_no_run(changed: Any, by: Any) -> None:
    session = changed(SMALLER, *by, ("trainer_kwargs(run)", "trainer_kwargs(run, pass_samples=512)"))
    found = session.train(KNOBS, Plan(1024, (1024,)), 0)
    assert (found["outcome"], found["samples"], found.get("has_ended")) == ("ok", 1024, None), found["message"]


NOTED = """class Noted(torch.optim.lr_scheduler.ReduceLROnPlateau):
    seen = []

    def step(self, metrics, epoch=None):
        self.seen.append(float(metrics))
        super().step(metrics)


class Data("""


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
def test_a_schedule_on_a_plateau_moves_where_a_report_was_due_and_ends_no_probe(changed: Any) -> None:
    session = changed(
        SMALLER,
        ("class Data(", NOTED),
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)",
            "schedule = Noted(optimizer, mode='max')",
        ),
        ('"interval": "step"', '"monitor": "accuracy"'),
    )
    seen = session.resident.workload.train.__globals__["Noted"].seen
    found = session.probe(KNOBS, time_s=0.3)
    assert (found["outcome"], seen) == ("ok", []), found["message"]
    assert found["spans"]["micro_steps"] > 16, "a pass"
    found = session.train(KNOBS, Plan(1024, (128, 1024)), 0)
    assert found["outcome"] == "ok", found["message"]
    assert 1 <= len(seen) <= 2, "of four passes"


def test_manual_optimisation_steps_by_its_own_lines(changed: Any) -> None:
    own = """
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(points), labels))
        optimizer.step()
"""
    session = changed(
        ("        return nn.functional.cross_entropy(self(points), labels)\n", own),
        (
            "        super().__init__()\n        self.learning",
            "        super().__init__()\n        self.automatic_optimization = False\n        self.learning",
        ),
        ("**run.loader()", 'batch_size=run["batch_size"]'),
    )
    found = session.train(KNOBS, Plan(1024, (1024,)), 0)
    assert (found["outcome"], found["spans"]["steps"]) == ("ok", 31), found["message"]  # the first is watched


def callback(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the changes that give a Trainer a callback of Lightning's."""
    imported = "import nn", f"import nn\nfrom pytorch_lightning.callbacks import {name}"
    return imported, ("trainer_kwargs(run)", f"trainer_kwargs(run, callbacks=[{name}()])")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((('self.log("accuracy"', 'self.log("right"'),), r"validation logged \['right'\], without accuracy"),
        (
            (("def validation_step", "def unused_step"), ("def val_dataloader", "def unused")),
            "no validation that logs accuracy",
        ),
        ((("trainer_kwargs(run)", "trainer_kwargs(run, max_epochs=3)"),), r"max_epochs=3\): run sets it"),
        (callback("ModelCheckpoint"), r"callbacks=\[ModelCheckpoint\(.*needs enable_checkpointing, which is off"),
        (callback("LearningRateMonitor"), r"callbacks=\[LearningRateMonitor\(.*trainer_kwargs\(run, logger=True\)"),
        (callback("TQDMProgressBar"), r"needs enable_progress_bar, which is off"),
        ((("DataLoader(TRAIN, shuffle=True, ", "DataLoader(Endless(), "), ("class Data(", ENDLESS)), "pass_samples=N"),
    ],
)
def test_what_a_module_gets_wrong_is_said(changed: Any, changes: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        changed(*changes).describe(KNOBS)


def test_data_without_a_length(changed: Any) -> None:
    session = changed(
        ("DataLoader(TRAIN, shuffle=True, ", "DataLoader(Endless(), "),
        ("class Data(", ENDLESS),
        ("trainer_kwargs(run)", "trainer_kwargs(run, pass_samples=1024)"),
    )
    found = session.train(KNOBS, Plan(1536, (512, 1536)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 1536), found["message"]


LOADERS = "DataLoader(TRAIN, shuffle=True, **run.loader()), DataLoader(VAL, batch_size=256)"


def test_data_that_are_given_to_fit(changed: Any) -> None:
    found = changed(("Data(**run.loader())", LOADERS)).train(KNOBS, Plan(1536, (512, 1536)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 1536), found["message"]


def test_a_schedule_of_a_module_with_its_own_data_ends_with_the_run(changed: Any) -> None:
    session = changed(
        ("moons(1024, 1)", "moons(100, 1)"),
        ("class Net(LightningModule):\n", OWN_DATA),
        (FIT, OWN_FIT),
    )
    found = session.train(KNOBS, Plan(300, (300,)), 0)  # torch raises where a cycle has too few steps
    assert (found["outcome"], found["samples"], found["spans"]["steps"]) == ("ok", 300, 11), found["message"]


def test_what_is_ones_own_stays(changed: Any, tmp_path: Path) -> None:
    own = """trainer_kwargs(
        run,
        callbacks=ModelCheckpoint(dirpath=PLACE, save_last=True),
        enable_checkpointing=True,
        gradient_clip_val=1.0,
    )"""
    session = changed(
        ("trainer_kwargs(run)", own.replace("PLACE", repr(str(tmp_path / "kept")))),
        ("from torch import nn", "from pytorch_lightning.callbacks import ModelCheckpoint\nfrom torch import nn"),
    )
    resident = session.resident
    assert isinstance(resident, own_loop.OwnResident)
    list(own_loop.train(own_loop.prepare(resident, session.config(KNOBS), Plan(1024, (1024,)))))  # as `train --from`
    assert (tmp_path / "kept" / "last.ckpt").exists()


def test_a_loader_that_is_made_late_has_its_micro_batches_added_up(changed: Any) -> None:
    lazy = OWN_DATA.replace("**self.loader", "**self.run.loader()")
    fit = """net = Net(run["learning_rate"])
    net.run = run
    trainer.fit(net)"""
    session = changed(("class Net(LightningModule):\n", lazy), (FIT, fit))
    found = session.probe(KNOBS, time_s=0.5)  # the first of its process, which is never begun again
    assert (found["outcome"], found["spans"]["micro_steps"]) == ("ok", 2 * found["spans"]["steps"]), found["message"]
