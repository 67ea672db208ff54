"""Checkpoints: a run that goes on ends where an unbroken one does, and a damaged file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.fakes import Followed, Sums, heard, knobs_of
from trainables import checkpoint
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs
from trainables.loop import State, prepare
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.stopwatch import Window
from trainables.workload import Config, table_of

KNOBS = knobs_of(learning_rate=0.05, batch_size=16, micro_batch_size=4, dropout=0.3)


def begin() -> State:
    return prepare(Resident(Sums()), Config(KNOBS), Plan(samples=256, window_s=0.0))


def evaluated(state: State, until: int) -> list[Evaluation]:
    """Returns the evaluations up to the first window that closes after so many samples."""
    events = heard(state, lambda event: isinstance(event, Window) and state.samples >= until)
    return [event for event in events if isinstance(event, Evaluation)]


def stop_after(state: State, samples: int) -> State:
    evaluated(state, samples)
    return state


def weights(state: State) -> list[float]:
    return [value for p in state.model.parameters() for value in p.detach().flatten().tolist()]


def both(workload: Sums, config: Config, folder: Path, samples: int = 64) -> tuple[State, State]:
    """Returns a run, and the same one saved after so many samples and gone on with."""

    def begun() -> State:
        return prepare(Resident(workload), config, Plan(samples=256, window_s=0.0))

    whole = stop_after(begun(), 10_000)
    checkpoint.save(stop_after(begun(), samples), folder, identity="a")
    resumed = begun()
    checkpoint.load(resumed, folder, identity="a")
    assert resumed.samples == samples
    return whole, stop_after(resumed, 10_000)


class Growing(torch.optim.SGD):
    """Keeps in its group how many steps it took, each larger than the one before; of each weight what `keeps` makes."""

    keeps: Callable[[], object] = staticmethod(lambda: torch.tensor(3))

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] *= group["steps"]
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", self.keeps())
        return super().step(closure)


class Counted(torch.nn.Module):
    """Sums whose forward pass counts itself, and warms up by that."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = torch.nn.Parameter(torch.ones(())), 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return values.sum(dim=1) * self.scale * min(1.0, self.calls / 50)


class Warming(Sums):
    """Sums with a model that counts and an optimiser that does."""

    def model(self, config: Config) -> torch.nn.Module:
        return Counted()

    def optimizer(self, model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
        return Growing(model.parameters(), lr=1e-9, momentum=0.9)


def test_what_a_model_and_an_optimizer_count_in_goes_on(tmp_path: Path) -> None:
    config = Config(Knobs.of({"batch_size": 16, "micro_batch_size": 4}, table_of(Warming())))
    whole, resumed = both(Warming(), config, tmp_path)
    assert resumed.model.calls == whole.model.calls == 64
    assert resumed.optimizer.param_groups[0]["steps"] == whole.optimizer.param_groups[0]["steps"] == 16
    assert {type(own["kept"]) for own in resumed.optimizer.state.values()} == {torch.Tensor}
    assert weights(resumed) == weights(whole)


def test_what_no_checkpoint_holds_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growing, "keeps", staticmethod(dict))
    config = Config(Knobs.of({"batch_size": 16}, table_of(Warming())))
    state = stop_after(prepare(Resident(Warming()), config, Plan(samples=256, window_s=0.0)), 32)
    with pytest.raises(checkpoint.CheckpointError, match=r"Growing keeps a dict, kept"):
        checkpoint.save(state, tmp_path, identity="a")
    assert list(tmp_path.iterdir()) == []


class Wide(Sums):
    """Sums with a weight that is large enough for moments of 8 bits, and another that shares their map."""

    def model(self, config: Config) -> torch.nn.Module:
        return WideSum()


class WideSum(torch.nn.Module):
    """A sum of a batch's values through two layers of 64 x 64 or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values.sum(dim=1, keepdim=True)).mean(dim=1)


def test_frozen_weights_that_a_forward_pass_writes_are_kept(tmp_path: Path) -> None:
    def kept(state: State) -> set[str]:
        return set(checkpoint.trained_tensors(state.model, state.marks))

    student = {f"student.blocks.{n}.weight" for n in range(2)}
    teacher = {f"teacher.blocks.{n}.weight" for n in range(2)}
    begun = prepare(Resident(Followed()), Config(KNOBS), Plan(samples=256))
    assert kept(begun) == {*student, "table"}, "nothing was written yet"
    whole, resumed = both(Followed(), Config(KNOBS), tmp_path)
    assert kept(whole) == {*student, *teacher, "ones", "table"}
    assert weights(resumed) == weights(whole)


def test_only_the_newest_state_is_kept(tmp_path: Path) -> None:
    state = begin()
    for samples in (16, 32):
        checkpoint.save(stop_after(state, samples), tmp_path, identity="a")
    assert [p.name for p in tmp_path.glob("state-*")] == [f"state-{state.samples}.safetensors"]


class Images(Sums):
    """Sums of images, by a convolution, whose weights a knob lays out."""

    def model(self, config: Config) -> torch.nn.Module:
        layers = torch.nn.Unflatten(1, (2, 4, 4)), torch.nn.Conv2d(2, 4, 4), torch.nn.Flatten(), torch.nn.Linear(4, 1)
        return torch.nn.Sequential(*layers, torch.nn.Flatten(0))

    def collate(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = super().collate(samples)
        values = batch["values"][:, :32]
        return {**batch, "values": torch.nn.functional.pad(values, (0, 32 - values.shape[1]))}


@pytest.mark.parametrize(
    ("workload", "samples", "knobs"),
    [
        (Sums, 64, {"fused_optimizer": True}),
        (Sums, 160, {}),
        (Images, 64, {"fused_optimizer": True, "channels_last": True}),
        (Wide, 64, {"optimizer": "adamw8bit", "learning_rate": 0.001}),
        (Images, 160, {"ema_decay": 0.9, "channels_last": True}),
    ],
    ids=["fused", "late", "laid out as the weights are", "eight bits", "averaged"],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(
    tmp_path: Path, workload: type[Sums], samples: int, knobs: dict[str, Any]
) -> None:
    if "optimizer" in knobs:
        pytest.importorskip("bitsandbytes")
    whole, resumed = both(workload(), Config(KNOBS.with_(**knobs)), tmp_path, samples)
    assert weights(resumed) == weights(whole)
    assert bool(resumed.average.means) == ("ema_decay" in knobs)
    for one, other in zip(resumed.average.means, whole.average.means, strict=True):
        assert torch.equal(one, other)
    for kept, unbroken in zip(resumed.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert type(kept["step"]) is type(unbroken["step"])


def test_an_evaluation_that_the_checkpoint_preceded_is_made_first(tmp_path: Path) -> None:
    def begun() -> State:
        plan = Plan(samples=256, milestones=(100, 200, 256), window_s=0.0)
        return prepare(Resident(Sums()), Config(KNOBS.with_(ema_decay=0.9)), plan)

    whole = begun()
    values = [(one.samples, one.values) for one in evaluated(whole, 10_000)]
    assert [samples for samples, _ in values] == [112, 208, 256], "at the ends of batches of 16"
    for stops_at in (112, 128, 208, 256):
        state, resumed = begun(), begun()
        state.evaluations = evaluated(state, stops_at)
        checkpoint.save(state, tmp_path, identity="a")
        checkpoint.load(resumed, tmp_path, identity="a")
        found = [*resumed.evaluations, *evaluated(resumed, 10_000)]
        assert [(one.samples, one.values) for one in found] == values
        assert weights(resumed) == weights(whole)


def test_the_best_weights_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    state = stop_after(begin(), 64)
    state.best_weights = best = checkpoint.weights(state)
    checkpoint.save(stop_after(state, 128), tmp_path, identity="a")
    resumed = begin()
    checkpoint.load(resumed, tmp_path, identity="a")
    assert resumed.best_weights.keys() == best.keys()
    assert all(torch.equal(tensor, best[name]) for name, tensor in resumed.best_weights.items())
    kept = load(checkpoint.exported(resumed, merges=False) or b"")
    assert all(torch.equal(tensor, best[name]) for name, tensor in kept.items())
    assert weights(resumed) == weights(state) != [float(tensor) for tensor in best.values()]


def damage(folder: Path) -> None:
    (path,) = folder.glob("state-*")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def point_outside(folder: Path) -> None:
    pointer = folder / checkpoint.POINTER
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "file": "../x.safetensors"}))


@pytest.mark.parametrize(
    ("change", "identity", "says"),
    [
        (damage, "a", r"is damaged: its sha256"),
        (lambda folder: None, "b", "belongs to another configuration"),
        (point_outside, "a", "outside of its folder"),
    ],
    ids=["damaged", "another run's", "a pointer out of its folder"],
)
def test_a_wrong_checkpoint_is_refused(tmp_path: Path, change: Any, identity: str, says: str) -> None:
    checkpoint.save(stop_after(begin(), 32), tmp_path, identity="a")
    change(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load(begin(), tmp_path, identity=identity)
