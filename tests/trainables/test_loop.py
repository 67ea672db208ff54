"""The loop: what a step means under every cut of the batch, when it looks, and how it ends."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import Adder, Followed, Noisy, Sums, heard, knobs_of
from trainables import loop
from trainables.knobs import Knobs
from trainables.loop import Evaluation, prepare, train
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.stopwatch import Window
from trainables.workload import Config

SMALL = {"learning_rate": 0.05, "dropout": 0.0, "batch_size": 16, "micro_batch_size": 4}


def run(
    plan: Plan, seed: int = 0, workload: type[Sums] = Sums, **knobs: object
) -> tuple[loop.State, list[Window | Evaluation]]:
    """Returns the state after a whole run on the adding workload, and its events."""
    state = prepare(Resident(workload()), Config(Knobs.of({**SMALL, **knobs}, EVERY), seed=seed), plan)
    return state, heard(state)


def windows_of(events: Iterator[Window | Evaluation]) -> Iterator[Window]:
    return (event for event in events if isinstance(event, Window))


def weights(state: loop.State) -> list[float]:
    return [float(p.detach()) for p in state.model.parameters()]


def test_learns_and_evaluates_at_the_milestones() -> None:
    _, events = run(Plan(samples=640, milestones=(160, 640)))
    evaluations = [e for e in events if isinstance(e, Evaluation)]
    assert [e.samples for e in evaluations] == [160, 640]
    assert evaluations[-1].values["error"] < 0.2 < evaluations[0].values["error"]


def test_windows_account_for_every_sample_and_second() -> None:
    _, events = run(Plan(samples=320, window_s=0.0))
    windows = [e for e in events if isinstance(e, Window)]
    assert sum(w.samples for w in windows) == 320
    assert all(w.steps == 1 and w.micro_steps == 4 for w in windows)
    for w in windows:
        spans = w.data_wait_s + w.transfer_s + w.forward_backward_s + w.optimizer_s
        assert 0 < spans <= w.wall_s * 1.001
        assert 0 < w.read_s + w.collate_s + w.augment_s <= w.data_wait_s


def test_the_first_window_is_the_first_step_alone() -> None:
    _, events = run(Plan(samples=320, window_s=1e9))
    windows = [e for e in events if isinstance(e, Window)]
    assert [w.steps for w in windows] == [1, 19]


class Steep(Sums):
    """Gradients that fp16's first scale of 65,536 takes beyond the largest float."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) * 1e35


def steps_and_scales(state: loop.State) -> tuple[list[int], list[float]]:
    """Returns the steps of each window, and the scale of the loss behind it."""
    scales: list[float] = []
    windows = windows_of(heard(state, lambda _: scales.append(state.scaler.get_scale())))
    return [w.steps for w in windows], scales


def test_steps_that_fp16_skips_are_in_the_first_window() -> None:
    for amp_dtype, skips in (("fp16", True), ("fp32", False)):
        config = Config(Knobs.of({**SMALL, "amp_dtype": amp_dtype}, EVERY))
        state = prepare(Resident(Steep()), config, Plan(samples=800, window_s=0.0))
        steps, scales = steps_and_scales(state)
        skipped = round(math.log2(65_536 / scales[0])) if skips else 0
        assert (skipped > 0) is skips
        assert steps[0] == skipped + 1
        assert set(steps[1:]) == {1}
        assert scales[0] == scales[1], "what is timed took its step"


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 5},
        {"fused_optimizer": True},
        {"set_to_none": False},
        {"sync_every_step": True},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
def test_system_knobs_do_not_change_what_is_learned(change: dict[str, object]) -> None:
    # Sums of the same gradients in another order: equal to the last few bits of a float32.
    assert weights(run(Plan(samples=256), **change)[0]) == pytest.approx(plainly_learned(), rel=2e-5)


@functools.cache
def plainly_learned() -> list[float]:
    return weights(run(Plan(samples=256))[0])


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        {"micro_batch_size": 16, "length_bucketing": True, "ram_cache": True},
        {"device_augmentation": True, "num_workers": 1},
        {"device_augmentation": True},
        {"inplace_augmentation": True, "ram_cache": True},
    ],
    ids=str,
)
def test_augmentation_is_the_same_wherever_it_takes_place(change: dict[str, object]) -> None:
    plan = Plan(samples=192)  # three epochs
    assert weights(noisy(plan, **change)[0]) == pytest.approx(plainly_noisy(), rel=2e-5)


noisy = functools.partial(run, workload=Noisy)
"""A run with an augmentation and phases."""


@functools.cache
def plainly_noisy() -> list[float]:
    return weights(noisy(Plan(samples=192))[0])


def test_an_augmentation_changes_what_is_learned_and_0_is_none() -> None:
    plan = Plan(samples=128)
    plain = weights(run(plan)[0])
    assert weights(noisy(plan, augmentation=0.0)[0]) == pytest.approx(plain, rel=1e-6)
    assert weights(noisy(plan)[0]) != pytest.approx(plain, rel=1e-6)


def test_phases_follow_each_other_each_with_its_own_schedule() -> None:
    state, events = noisy(Plan(samples=256, window_s=0.0), encoder_frac=0.5, learning_rate=1e-9, warmup_frac=0.0)
    losses = [e.loss for e in events if isinstance(e, Window)]
    assert min(losses[:8]) > 100 > 10 > max(losses[8:])
    table = loop.Timetable({"first": 0.5, "second": 0.5}, Plan(samples=256), 16)
    assert [table.progress(s) for s in (0, 64, 128, 192, 256)] == [0.0, 0.5, 0.0, 0.5, 1.0]
    assert state.samples == 256


@pytest.mark.parametrize(
    ("rounds", "samples", "phases", "seen"),
    [(2, 256, "ffffssss" * 2, 2), (4, 256, "ffss" * 4, 4), (9, 256, "fs" * 8, 8), (3, 32, "fs", 1), (2, 16, "f", 1)],
)
def test_phases_come_again_in_each_round(rounds: int, samples: int, phases: str, seen: int) -> None:
    asked = {"encoder_frac": 0.5, "phase_rounds": rounds, "learning_rate": 1e-9, "warmup_frac": 0.0}
    state, events = noisy(Plan(samples=samples, window_s=0.0), **asked)
    losses = [e.loss for e in events if isinstance(e, Window)]
    assert "".join("f" if loss > 100 else "s" for loss in losses) == phases
    assert state.active["phase_rounds"] == seen
    table = loop.Timetable({"first": 0.5, "second": 0.5}, Plan(samples=240), 16, rounds=3)
    assert [table.progress(s) for s in (0, 20, 40, 80, 100, 240)] == pytest.approx([0, 0.5, 0, 0, 0.5, 1])


def test_mixed_phases_come_as_often_as_their_shares() -> None:
    _, events = noisy(
        Plan(samples=1600, window_s=0.0, mixed_phases=True), encoder_frac=0.3, learning_rate=1e-9, warmup_frac=0.0
    )
    first = [e.loss > 100 for e in events if isinstance(e, Window)]
    assert sum(first) == pytest.approx(0.3 * len(first), abs=2)
    assert any(first[:10])
    assert not all(first[:10])


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    plan = Plan(samples=128)
    first, second, other = (run(plan, seed=s)[0] for s in (1, 1, 2))
    assert weights(first) == weights(second) != weights(other)


def test_a_model_that_changes_itself_begins_anew_in_every_trial() -> None:
    resident, config = Resident(Followed()), Config(knobs_of(learning_rate=0.05, dropout=0.0))
    results = []
    for _ in range(3):
        state = prepare(resident, config, Plan(samples=128))
        train(state)
        results.append((weights(state), sorted(name for name, _ in state.model.named_buffers())))
    assert results[0] == results[1] == results[2]
    first = Resident(Followed()).model(config)
    assert all(map(torch.equal, resident.model(config).parameters(), first.parameters()))


class Keeper(Adder):
    """An Adder whose forward pass changes what it keeps in plain attributes."""

    def __init__(self, kept: str) -> None:
        super().__init__(0.0)
        self.kept, self.center, self.scale, self.step = kept, None, torch.ones(()), 0
        self.seen, self.sums = list[int](), {"all": 0.0}

    def forward(self, values: Tensor) -> Tensor:
        if self.kept == "center" and self.center is None:
            self.center = values.mean()
        elif self.kept == "scale":
            self.scale = 0.9 * self.scale
        elif self.kept == "seen":
            self.seen.append(len(values))
        elif self.kept == "sums":
            self.sums["all"] += 0.1
        elif self.kept == "step":
            self.step += self.training
        found = super().forward(values) * self.scale + len(self.seen) + self.sums["all"] + self.step
        return found if self.center is None else found - self.center


@pytest.mark.parametrize(
    ("kept", "is_used_again"),
    [("center", False), ("scale", False), ("seen", False), ("sums", False), ("step", True), ("", True)],
)
def test_a_modules_plain_attributes_begin_anew_in_every_trial(kept: str, is_used_again: bool) -> None:
    class Keeping(Sums):
        def model(self, config: Config) -> nn.Module:
            return Keeper(kept)

    resident, config = Resident(Keeping()), Config(knobs_of(learning_rate=0.05, dropout=0.0))
    found = []
    for _ in range(3):
        state = prepare(resident, config, Plan(samples=128))
        train(state)
        found.append((weights(state), state.model))
    assert found[0][0] == found[1][0] == found[2][0]
    assert (found[0][1] is found[2][1]) is is_used_again


def test_a_smaller_last_batch_counts_fully() -> None:
    state, events = run(Plan(samples=64, window_s=0.0), batch_size=24, micro_batch_size=10)
    steps = [e.samples for e in events if isinstance(e, Window)]
    assert steps == [24, 24, 16]
    assert state.samples == 64


def test_an_objective_that_is_not_returned_is_named() -> None:
    class Silent(Sums):
        def evaluate(self, model: nn.Module, batches: Iterator[object]) -> dict[str, float]:
            return {"other": 1.0}

    state = prepare(Resident(Silent()), Config(knobs_of()), Plan(samples=32, milestones=(32,)))
    with pytest.raises(KeyError, match=r"returned \['other'\], without error"):
        train(state)


def test_a_cap_raises_as_a_card_does_and_harms_no_later_run() -> None:
    resident, config = Resident(Sums()), Config(knobs_of(learning_rate=0.05))
    free = prepare(resident, config, Plan(samples=64))
    train(free)
    peak = free.peak_allocated_bytes
    assert peak > 0
    capped = prepare(resident, config, Plan(samples=64, cap_bytes=peak // 2))
    with pytest.raises(torch.OutOfMemoryError, match="virtual card out of memory") as caught:
        train(capped)
    traceback.clear_frames(caught.tb)  # they hold what the failed step made
    again = prepare(resident, config, Plan(samples=64, cap_bytes=2 * peak))
    assert heard(again)
    assert weights(again) == weights(free)
