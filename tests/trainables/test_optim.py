"""Optimisers and schedules: each keeps the state it says, goes down, and gives way to the workload's own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.fakes import Sums
from trainables import Knob, optim
from trainables.evaluation import evaluate
from trainables.knobs import Knobs
from trainables.loop import prepare, train
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, WorkloadError, table_of


def descend(**knobs: object) -> tuple[torch.optim.Optimizer, list[float]]:
    """Returns an optimiser after 60 steps towards 1, and the distance left after each."""
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    knobs = {"weight_decay": 0.0, "learning_rate": 0.03, **knobs}
    found = optim.built_in([{"params": [weight]}], Knobs.of(knobs, EVERY))
    left = []
    for _ in range(60):
        loss = (weight - 1.0).square().sum() / 2
        loss.backward()
        found.step()
        found.zero_grad()
        left.append(float((weight.detach() - 1.0).square().mean()))
    return found, left


def test_eight_bit_moments_take_a_quarter_and_descend_as_far() -> None:
    pytest.importorskip("bitsandbytes")
    (full, plain), (small, packed) = descend(), descend(optimizer="adamw8bit")
    (state,), (full_state,) = small.state.values(), full.state.values()
    moments = [s for s in state.values() if isinstance(s, torch.Tensor) and s.numel() > 4096]
    assert {s.dtype for s in moments} == {torch.uint8}
    assert sum(s.numel() for s in moments) == 2 * 64 * 128  # bytes; 32-bit moments would be four times that
    assert {s.dtype for s in full_state.values()} == {torch.float32}
    assert packed[-1] == pytest.approx(plain[-1], abs=0.01)


def test_sgd_takes_the_steps_of_the_textbook() -> None:
    plain, heavy = descend(optimizer="sgd", momentum=0.0)[1], descend(optimizer="sgd", nesterov=True)[1]
    assert plain == pytest.approx([(1 - 0.03) ** (2 * n) for n in range(1, 61)], rel=1e-4)
    assert descend(optimizer="sgd", momentum=0.0, nesterov=True)[1] == plain, "without momentum there is none of his"
    assert heavy[-1] < descend(optimizer="sgd")[1][-1] < plain[-1]


@pytest.mark.parametrize(
    "knobs",
    [{"optimizer": "adamw"}, {"optimizer": "adamw8bit"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}],
)
def test_the_bytes_of_the_state_are_those_of_the_optimiser(knobs: dict[str, Any]) -> None:
    """A floor of memory above what is needed refuses what fits: AdamW of 8 bits was charged for moments of 32."""
    if knobs["optimizer"] == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(torch.nn.Linear(100, 90), torch.nn.Linear(90, 10))
    model[1].bias.requires_grad_(False)
    own = optim.built_in([{"params": [p for p in model.parameters() if p.requires_grad]}], Knobs.of(knobs, EVERY))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    own.step()
    tensors = {id(s): s for state in own.state.values() for s in state.values() if isinstance(s, torch.Tensor)}
    held = sum(s.nbytes for s in tensors.values() if s.dim() > 0)
    assert optim.state_bytes(model, Knobs.of(knobs, EVERY)) == held
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert optim.state_bytes(model, Knobs.of({**knobs, "ema_decay": 0.9}, EVERY)) == held + trained


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["linear", "cosine", "constant"]))
def test_a_rate_rises_to_its_peak_and_never_again(progress: float, warmup_frac: float, then: str) -> None:
    here = optim.warmed_up(progress, warmup_frac, then)
    assert 0 <= here <= 1
    later = optim.warmed_up(min(1.0, progress + 0.01), warmup_frac, then)
    if progress >= warmup_frac:
        assert later <= here + 1e-9
        assert then != "constant" or here == 1


def test_schedules_end_where_they_say() -> None:
    ends = {then: optim.warmed_up(1.0, 0.1, then) for then in ("linear", "cosine", "constant")}
    assert ends == {"linear": 0.0, "cosine": 0.0, "constant": 1.0}
    assert optim.warmed_up(0.55, 0.1, "cosine") == pytest.approx(0.5)
    assert optim.warmed_up(0.325, 0.1, "cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def trained(workload: Any, **knobs: object) -> tuple[list[torch.Tensor], Any]:
    """Returns the weights after 64 samples in batches of 16, and the state."""
    rows = table_of(workload)
    config = Config(Knobs.of({"batch_size": 16, "micro_batch_size": 16, "learning_rate": 0.02, **knobs}, rows))
    state = prepare(Resident(workload), config, Plan(samples=64))
    train(state)
    return [p.detach().clone() for p in state.model.parameters()], state


def test_gradients_are_held_to_a_norm_whatever_the_micro_batch() -> None:
    """Of the whole batch: clipped by micro-batch, the sum of four could be four times as long."""
    sgd: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "warmup_frac": 0.0}
    sgd |= {"dropout": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.01}
    whole, _ = trained(Sums(), **sgd)
    first = [p.detach() for p in Resident(Sums()).model(Config(Knobs.of(sgd, table_of(Sums())))).parameters()]
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, first, strict=True)))
    assert 0 < moved <= 4 * 0.02 * 0.01 * 1.0001, "four steps of at most rate times norm"
    for micro in (2, 4):
        parts, _ = trained(Sums(), **sgd, micro_batch_size=micro)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parts, strict=True))
    assert trained(Sums(), **{**sgd, "max_grad_norm": 1e9})[1].active["gradient_norms"]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0.0, 0.999))
def test_an_average_is_the_plain_mean_until_decay_forgets_less(values: list[float], decay: float) -> None:
    layer = nn.Linear(1, 1, bias=False)
    average, expected = optim.Average(layer.parameters(), decay), 0.0
    for steps, value in enumerate(values, start=1):
        nn.init.constant_(layer.weight, value)
        average.follow(steps)
        own = min(decay, (steps - 1) / steps)
        expected = own * expected + (1 - own) * value
        if decay >= (steps - 1) / steps:
            assert expected == pytest.approx(sum(values[:steps]) / steps, abs=1e-6)
        assert float(average.means[0]) == pytest.approx(expected, abs=1e-4)
    with average.shown():
        assert torch.equal(layer.weight, average.means[0])
    assert torch.equal(layer.weight, torch.full((1, 1), values[-1]))


def test_averaging_changes_what_is_evaluated_and_no_step() -> None:
    plain, averaged = (trained(Sums(), ema_decay=decay, dropout=0.0)[1] for decay in (0.0, 0.9))
    assert all(map(torch.equal, plain.model.parameters(), averaged.model.parameters()))
    values = [evaluate(state, state.model).values["error"] for state in (plain, averaged)]
    for weight, mean in zip(plain.model.parameters(), averaged.average.means, strict=True):
        weight.data.copy_(mean)
    assert values[0] != values[1] == evaluate(plain, plain.model).values["error"]


def test_an_average_of_weights_of_few_bits_has_more() -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(layer.weight, 1.0)
    average = optim.Average(layer.parameters(), 0.999)
    for steps in range(1, 401):
        nn.init.constant_(layer.weight, 1.0 if steps <= 200 else 2.0)
        average.follow(steps)
    assert average.means[0].dtype is torch.float32
    assert float(average.means[0]) == pytest.approx(1.5, abs=1e-3)


def test_an_fp16_scale_is_taken_out_before_clipping() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum() * 3.0).backward()
    optim.hold_gradients(optimizer, scaler, Knobs(), 0.5)
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(0.5)
    scaler.step(optimizer)
    assert float(weight.detach()) == pytest.approx(0.5)


class Own(Sums):
    """Sums with an optimiser and a schedule of its own."""

    knobs: ClassVar = {**Sums.knobs, "momentum": Knob(0.5, "learning", low=0.0, high=0.9)}
    seen: ClassVar[list[float]] = []

    def optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        return torch.optim.RMSprop(groups, lr=config.knobs.learning_rate, momentum=config.knobs.momentum)

    def schedule(self, progress: float, config: Config) -> float:
        self.seen.append(progress)
        return 1.0 if progress < 0.5 else 0.5


def test_a_workload_brings_its_optimiser_and_its_schedule() -> None:
    Own.seen.clear()
    _, state = trained(Own(), momentum=0.25)
    assert type(state.optimizer) is torch.optim.RMSprop
    assert [g["momentum"] for g in state.optimizer.param_groups] == [0.25, 0.25]
    assert [g["lr"] for g in state.optimizer.param_groups] == pytest.approx([0.05, 0.01]), "half of each group's peak"
    assert Own.seen == pytest.approx([0.125, 0.375, 0.625, 0.875])
    rows = table_of(Own())
    assert not {"optimizer", "fused_optimizer", "nesterov", "schedule", "warmup_frac"} & set(rows)
    assert rows["momentum"].default == 0.5
    assert optim.state_bytes(state.model, state.config.knobs) == 0, "not known before it has stepped"


def test_what_is_no_optimiser_is_refused_by_name() -> None:
    class Wrong(Sums):
        def optimizer(self, model: nn.Module, config: Config) -> Any:
            return None

    with pytest.raises(WorkloadError, match=r"optimizer\(\) returned NoneType"):
        trained(Wrong())
