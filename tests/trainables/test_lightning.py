"""Lightning's own Trainer under `run`: its horizon, its schedules, its data; the real package, no stand-in."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainables.test_framework_loops import knobs_of, session_of
from trainables import training
from trainables.plan import Plan
from trainables.workload import WorkloadError
from tuning.workers.session import Session

pytest.importorskip("pytorch_lightning")
KNOBS = knobs_of("lightning")
ENDLESS = """class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TRAIN)


class Data("""
FIT = 'trainer.fit(Net(run["learning_rate"]), Data(**run.loader()))'
NET = """class Net(LightningModule):
    def setup(self, stage):
        self.data = TRAIN

    def train_dataloader(self):
        return DataLoader(self.data, shuffle=True, **self.loader)

    def val_dataloader(self):
        return DataLoader(VAL, batch_size=256)
"""
OWN_DATA = (
    ("class Net(LightningModule):\n", NET),
    (FIT, 'net = Net(run["learning_rate"])\n    net.loader = run.loader()\n    trainer.fit(net)'),
)
WITHOUT_LENGTH = ("DataLoader(TRAIN, shuffle=True, ", "DataLoader(Endless(), "), ("class Data(", ENDLESS)


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    return functools.partial(session_of, "lightning", tmp_path)


def test_what_the_micro_batch_changes_is_seen(changed: Any) -> None:
    changes = {"micro_batch_size": 16, "channels_last": True}
    norm = ("nn.Linear(2, 32), nn.ReLU()", "nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU()")
    for session, found in ((changed(), []), (changed(norm), ["micro_batch_size"])):
        session.describe(KNOBS)
        seen = session.kinds(KNOBS, changes)
        assert (list(seen.changed), seen.message) == (found, "")


ODD, SMALLER = ("moons(1024, 1)", "moons(100, 1)"), ("moons(1024, 1)", "moons(256, 1)")
"""Epochs of 4 steps, the last of them shorter; epochs of 8 steps."""
BY_EPOCHS = (
    ("OneCycleLR(optimizer, self.learning_rate, total_steps=steps)", "CosineAnnealingLR(optimizer, steps)"),
    ("self.trainer.estimated_stepping_batches", "self.trainer.max_epochs"),
    ('"interval": "step"', '"interval": "epoch"'),
)
"""A schedule as it is usual."""


@pytest.mark.parametrize("changes", [BY_EPOCHS, (*BY_EPOCHS, *OWN_DATA)], ids=["", "own data"])
@pytest.mark.parametrize(("samples", "left"), [(1024, 0.0), (896, 0.01 * (1 - math.cos(math.pi / 4)) / 2)])
def test_a_schedule_by_epochs_ends_with_the_run(changed: Any, changes: Any, samples: int, left: float) -> None:
    assert trained(changed(SMALLER, *changes), samples) == (samples, pytest.approx(left, abs=1e-9))


def test_a_schedule_by_steps_ends_with_the_run(changed: Any) -> None:
    assert trained(changed(ODD, BY_EPOCHS[0]), 300) == (300, pytest.approx(0.0, abs=1e-9))


def trained(session: Session, samples: int) -> tuple[int, float]:
    """Returns the samples of a whole training, and the learning rate at its end."""
    state = training.prepare(session.resident, session.config(KNOBS), Plan(samples, (samples,)))
    training.train(state)
    return state.samples, state.optimizer.param_groups[0]["lr"]


NOTED = """class Noted(torch.optim.lr_scheduler.ReduceLROnPlateau):
    seen = []

    def step(self, metrics, epoch=None):
        self.seen.append(float(metrics))
        super().step(metrics)


class Data("""


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
def test_a_plateau_schedule_moves_with_reports_and_ends_no_probe(changed: Any) -> None:
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
    assert (found.outcome, seen) == ("ok", []), found.message
    assert found.spans["micro_steps"] > 16, "a pass"
    found = session.train(KNOBS, Plan(1024, (128, 1024)), 0)
    assert found.outcome == "ok", found.message
    assert 1 <= len(seen) <= 2, "of four passes"


TUPLES = (
    ("DataLoader(TRAIN, shuffle=True, **", "DataLoader(TRAIN, shuffle=True, collate_fn=lambda b: tuple(zip(*b)), **"),
    ("points, labels = batch\n        return nn", "points, labels = map(torch.stack, batch)\n        return nn"),
)
SETUP = """class Net(LightningModule):
    def setup(self, stage):
        self.total = int(self.trainer.estimated_stepping_batches)

"""
IN_SETUP = ("self.trainer.estimated_stepping_batches", "self.total"), ("class Net(LightningModule):\n", SETUP)
MANUAL_STEP = """
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(points), labels))
        optimizer.step()
"""
INIT = "        super().__init__()\n"
MANUAL = (
    ("        return nn.functional.cross_entropy(self(points), labels)\n", MANUAL_STEP),
    (f"{INIT}        self.learning", f"{INIT}        self.automatic_optimization = False\n        self.learning"),
    ("**run.loader()", 'batch_size=run["batch_size"]'),
)
GIVEN = ("Data(**run.loader())", "DataLoader(TRAIN, shuffle=True, **run.loader()), DataLoader(VAL, batch_size=256)")


def epochs_of(samples: int) -> tuple[str, str]:
    return "trainer_kwargs(run)", f"trainer_kwargs(run, pass_samples={samples})"


@pytest.mark.parametrize(
    ("changes", "milestones", "samples", "steps"),
    [
        pytest.param((ODD,), (250,), 264, 9, id="a horizon within a batch: whole micro-batches"),
        pytest.param((ODD,), (216,), 232, None, id="the last batch is whole"),
        pytest.param(TUPLES, (1024,), 1024, 31, id="a batch of tuples"),
        pytest.param(IN_SETUP, (2048,), 2048, None, id="the length asked for in setup"),
        pytest.param((SMALLER, *BY_EPOCHS, epochs_of(512)), (1024,), 1024, None, id="shorter epochs than was said"),
        pytest.param((SMALLER, epochs_of(512)), (1024,), 1024, None, id="the same, by steps"),
        pytest.param((*WITHOUT_LENGTH, epochs_of(1024)), (512, 1536), 1536, None, id="data without a length"),
        pytest.param((GIVEN,), (512, 1536), 1536, None, id="data given to fit"),
        pytest.param((ODD, *OWN_DATA), (300,), 300, 11, id="a module with its own data"),
        pytest.param(MANUAL, (1024,), 1024, 31, id="manual optimisation"),
    ],
)
def test_a_run_has_its_samples_and_steps(
    changed: Any, changes: Any, milestones: tuple[int, ...], samples: int, steps: int | None
) -> None:
    """Steps are those after the first, which is watched. Torch raises if a one-cycle schedule has too few steps."""
    found = changed(*changes).train(KNOBS, Plan(milestones[-1], milestones), 0)
    assert (found.outcome, found.samples, found.has_ended) == ("ok", samples, False), found.message
    assert steps in (None, found.spans["steps"])


def callback(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the changes that give a Trainer a callback of Lightning's."""
    imported = "import nn", f"import nn\nfrom pytorch_lightning.callbacks import {name}"
    return imported, ("trainer_kwargs(run)", f"trainer_kwargs(run, callbacks=[{name}()])")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((('self.log("accuracy"', 'self.log("right"'),), r"logged \['right'\], without accuracy"),
        ((("def validation_step", "def unused_step"), ("def val_dataloader", "def unused")), "no validation that logs"),
        ((("trainer_kwargs(run)", "trainer_kwargs(run, max_epochs=3)"),), r"max_epochs=3\): run sets it"),
        (callback("ModelCheckpoint"), r"callbacks=\[ModelCheckpoint\(.*needs enable_checkpointing"),
        (callback("LearningRateMonitor"), r"callbacks=\[LearningRateMonitor\(.*logger=True"),
        (callback("TQDMProgressBar"), r"needs enable_progress_bar"),
        (WITHOUT_LENGTH, "pass_samples=N"),
    ],
)
def test_what_a_module_gets_wrong_is_said(changed: Any, changes: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        changed(*changes).describe(KNOBS)


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
    training.train(training.prepare(session.resident, session.config(KNOBS), Plan(1024, (1024,))))  # as `train --from`
    assert (tmp_path / "kept" / "last.ckpt").exists()


def test_a_loader_that_is_made_late_accumulates(changed: Any) -> None:
    lazy = NET.replace("**self.loader", "**self.run.loader()")
    fit = 'net = Net(run["learning_rate"])\n    net.run = run\n    trainer.fit(net)'
    session = changed(("class Net(LightningModule):\n", lazy), (FIT, fit))
    found = session.probe(KNOBS, time_s=0.5)  # the first of its process, which is never begun again
    assert (found.outcome, found.spans["micro_steps"]) == ("ok", 2 * found.spans["steps"]), found.message
