"""What was active is read back from torch: each knob, on and off, shows in what the first step ran."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.fakes import Lines, Noisy, Sums, heard
from trainables import loop, precision
from trainables.knobs import Knobs
from trainables.loop import prepare, train
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.stopwatch import Window
from trainables.workload import Config, Split, Workload


class Mixed(nn.Module):
    """Convolution, attention, LSTM and dropout over (batch, channels, height, width), each a block."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__()
        width = knobs.hidden_size
        self.image = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList([Attention(width, knobs.dropout)])
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, images: Tensor) -> Tensor:
        states: Tensor = self.image(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            states = block(states)
        return self.head(self.reader(states)[1][0][0]).squeeze(1)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """One head over (batch, time, width), and a dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        # Without a bias: that of the keys has a gradient of 0 but for rounding, which AdamW makes full steps of.
        self.qkv, self.dropout = nn.Linear(width, 3 * width, bias=False), nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        q, k, v = self.qkv(states).unsqueeze(1).chunk(3, dim=-1)
        return self.dropout(F.scaled_dot_product_attention(q, k, v).squeeze(1))  # type: ignore[no-any-return]


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of 3 x 4 x 4 random numbers with their sum."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(index))
        return image, image.sum()


class Pictures:
    """Learns the sum of an image; every kind of kernel that a knob chooses among is in its model."""

    objectives: ClassVar[dict[str, Any]] = {"error": "min"}
    default_space: ClassVar[dict[str, Any]] = {}

    def model(self, config: Config) -> nn.Module:
        return Mixed(config.knobs)

    def dataset(self, config: Config, split: Split) -> Images:
        return Images()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        return {"error": 0.0}


SMALL = {"batch_size": 8, "micro_batch_size": 4, "hidden_size": 8, "dropout": 0.0, "learning_rate": 0.01}


def active(workload: Workload, device: str = "cpu", **knobs: object) -> dict[str, Any]:
    """Returns what the first step of a run of two steps was seen to run."""
    config = Config(Knobs.of({**SMALL, **knobs}, EVERY), device=device)
    state = prepare(Resident(workload), config, Plan(samples=2 * config.knobs.batch_size, window_s=0.0))
    train(state)
    assert state.witness is None
    assert json.loads(json.dumps(state.active)) == state.active
    return state.active


@functools.cache
def plain() -> dict[str, Any]:
    return active(Pictures())


@pytest.mark.parametrize(("asked", "seen"), [("flash", "flash"), ("math", "math"), ("efficient", "math")])
def test_the_attention_kernel_is_the_one_that_ran(asked: str, seen: str) -> None:
    # Torch has no memory-efficient kernel on the CPU and falls back without a word.
    assert list(active(Pictures(), sdpa_backend=asked)["attention"]) == [seen]


@pytest.mark.parametrize(
    ("asked", "fact", "plainly", "then"),
    [
        ({"fused_optimizer": True}, "optimizer_ops", ["aten.addcdiv_"], ["aten._fused_adamw_"]),
        ({"set_to_none": False}, "grads_after_step", "none", "zero"),
        ({"channels_last": True}, "conv_weights", ["contiguous"], ["channels_last"]),
        ({"sync_every_step": True}, "loss_reads", 0, 2),  # once a micro-batch
        ({"ema_decay": 0.5}, "averaged", False, True),
    ],
    ids=str,
)
def test_a_knob_shows_in_what_the_first_step_ran(asked: dict[str, object], fact: str, plainly: Any, then: Any) -> None:
    assert (plain()[fact], active(Pictures(), **asked)[fact]) == (plainly, then)


def test_eight_bit_moments_are_seen_if_a_tensor_is_large_enough() -> None:
    pytest.importorskip("bitsandbytes")
    large, small = (active(Pictures(), optimizer="adamw8bit", hidden_size=width) for width in (64, 8))
    assert plain()["optimizer_state_dtypes"] == ["float32"]
    assert "uint8" in large["optimizer_state_dtypes"]
    assert "uint8" not in small["optimizer_state_dtypes"]
    assert large["optimizer_ops"][0].startswith("bitsandbytes.optimizer_update")


def test_the_products_of_autocast_and_recomputation_are_seen() -> None:
    assert active(Pictures(), amp_dtype="bf16")["matmul_dtypes"][0] == "bfloat16"
    assert "float16" in active(Pictures(), amp_dtype="fp16")["matmul_dtypes"]
    assert 0 < active(Pictures(), activation_checkpointing=True)["recomputed_frac"] <= 1
    assert "augmented_on" not in active(Sums())


WORKERS = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}


@pytest.mark.parametrize(
    ("workload", "asked", "facts"),
    [
        (Pictures, {"micro_batch_size": 2}, {"batch_size": 8, "micro_batch_size": 2}),
        (Pictures, {"batch_size": 32}, {"batch_size": 16}),  # there are no more
        (Pictures, {}, {"matmul_dtypes": ["float32"], "conv_dtypes": ["float32"], "recomputed_frac": 0}),
        (Pictures, {"amp_dtype": "bf16"}, {"conv_dtypes": ["bfloat16"]}),
        (Pictures, {"weight_decay": 0.25}, {"weight_decays": [0.25]}),
        # What the backward pass of a block of one operator needs is known before the operator runs again.
        (Sums, {"activation_checkpointing": True}, {"recomputed_frac": 0, "workers": 0}),
        (Sums, WORKERS, {"workers": 2, "prefetch_factor": 3, "persistent_workers": True}),
        (Sums, {"num_workers": 1}, {"persistent_workers": False}),
        (Sums, {"batch_size": 32}, {"sorted_by_length": False}),
        (Sums, {"batch_size": 32, "length_bucketing": True}, {"sorted_by_length": True}),
        (Noisy, {}, {"augmented_on": "loader"}),
        (Noisy, {"num_workers": 1}, {"augmented_on": "loader"}),
        (Noisy, {"device_augmentation": True}, {"augmented_on": "cpu"}),
        (Noisy, {"encoder_frac": 0.25}, {"phases": {"first": 0.25, "second": 0.75}}),
    ],
    ids=str,
)
def test_facts_of_the_first_step_are_those_asked_for(
    workload: Any, asked: dict[str, Any], facts: dict[str, Any]
) -> None:
    found = active(workload(), **asked)
    assert {name: found[name] for name in facts} == facts


def test_a_cache_in_ram_reads_every_sample_once() -> None:
    class Counting(Lines):
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            Counting.reads += 1
            return super().__getitem__(index)

    class Counted(Sums):
        def dataset(self, config: Config, split: Split) -> Lines:
            return Counting(64, seed=0)

    reads = {}
    for cached in (False, True):
        Counting.reads = 0
        state = prepare(Resident(Counted()), Config(Knobs.of({**SMALL, "ram_cache": cached}, EVERY)), Plan(samples=192))
        train(state)
        assert state.active["samples_in_ram"] is cached
        reads[cached] = Counting.reads
    assert reads == {False: 192, True: 64}  # three epochs


@pytest.mark.slow
def test_a_compiled_run_is_warm_after_its_second_step() -> None:
    config = Config(Knobs.of({**SMALL, "compile": "default"}, EVERY))
    state = prepare(Resident(Sums()), config, Plan(samples=64, window_s=0.0))
    windows = [w for w in heard(state) if isinstance(w, Window)]
    assert [w.steps for w in windows] == [2, 1, 1, 1, 1, 1, 1]
    assert state.active["compiled_graphs"] >= 1


def test_a_capped_run_on_the_cpu_is_seen_not_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(torch.compile, backend="aot_eager")  # inductor takes 13 s before its first kernel
    monkeypatch.setattr(torch, "compile", quick)
    compiled = {}
    for cap_bytes in (None, 1 << 40):
        plan = Plan(samples=32, cap_bytes=cap_bytes)
        state = prepare(Resident(Sums()), Config(Knobs.of({**SMALL, "compile": "default"}, EVERY)), plan)
        train(state)
        compiled[cap_bytes] = state.active["compiled_graphs"] > 0
    assert compiled == {None: True, 1 << 40: False}


def test_watching_changes_neither_weights_nor_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[Tensor], int]:
        state = prepare(Resident(Pictures()), Config(Knobs.of({**SMALL, "dropout": 0.2}, EVERY)), Plan(samples=32))
        train(state)
        return [p.detach() for p in state.model.parameters()], state.peak_allocated_bytes

    (watched, bytes_watched) = trained()
    monkeypatch.setattr(loop.Witness, "watching", lambda self, part: precision.ExitStack())
    (unwatched, bytes_unwatched) = trained()
    assert all(torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))
    assert bytes_watched == bytes_unwatched


@functools.cache
def weights(device: str = "cpu", **knobs: object) -> list[Tensor]:
    """Returns the weights after four steps on the pictures."""
    config = Config(Knobs.of({**SMALL, **knobs}, EVERY), device=device)
    state = prepare(Resident(Pictures()), config, Plan(samples=4 * config.knobs.batch_size))
    train(state)
    return [p.detach().cpu() for p in state.model.parameters()]


@pytest.mark.parametrize(
    "change",
    [{"channels_last": True}, {"activation_checkpointing": True}, {"sdpa_backend": "math"}, {"sdpa_backend": "flash"}],
    ids=str,
)
def test_kernels_chosen_by_system_knobs_learn_the_same(change: dict[str, object]) -> None:
    # The same sums in another order. AdamW's first steps are the sign of a gradient, so where one is nearly 0 the last
    # bit of it moves a weight: a thousandth of the way the weights have come (4 steps of 0.01).
    for ours, plain_ones in zip(weights(**change), weights(), strict=True):
        assert torch.allclose(ours, plain_ones, rtol=1e-4, atol=4e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 4},
        {"learning_rate": 0.02},
        {"weight_decay": 0.5},
        {"warmup_frac": 0.9},
        {"dropout": 0.5},
        {"amp_dtype": "bf16"},
        {"optimizer": "adamw8bit", "hidden_size": 64},
    ],
    ids=str,
)
def test_learning_knobs_change_what_is_learned(change: dict[str, object]) -> None:
    if "optimizer" in change:
        pytest.importorskip("bitsandbytes")
    width = {"hidden_size": change.get("hidden_size", 8)}
    assert not all(torch.allclose(a, b, 1e-4, 4e-5) for a, b in zip(weights(**change), weights(**width), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"pin_memory": True},
        {"pin_memory": True, "non_blocking": True},
        {"pin_memory": True, "device_prefetch": True},
        {"cudnn_benchmark": True},
        {"channels_last": True},
        {"empty_cache": True},
        {"compile": "default"},
        {"compile": "reduce-overhead"},
    ],
    ids=str,
)
def test_system_knobs_of_a_card_learn_the_same(change: dict[str, object]) -> None:
    for ours, plain_ones in zip(weights("cuda", **change), weights("cuda"), strict=True):
        assert torch.allclose(ours, plain_ones, rtol=1e-3, atol=4e-4)


@pytest.mark.gpu
def test_memory_of_the_allocator_is_handed_back_before_a_run() -> None:
    for released in (False, True):
        torch.empty(1 << 26, device="cuda")  # 256 MB, dropped at once and kept by the allocator
        config = Config(Knobs.of({**SMALL, "empty_cache": released}, EVERY), device="cuda")
        prepare(Resident(Pictures()), config, Plan(samples=8))
        assert (torch.cuda.memory_reserved() < 1 << 28) is released


@pytest.mark.gpu
def test_copies_to_a_card_are_as_asked() -> None:
    asked = {"pin_memory": True, "non_blocking": True}
    none, pinned = active(Pictures(), "cuda"), active(Pictures(), "cuda", **asked)
    beside = active(Pictures(), "cuda", **asked, device_prefetch=True)
    seen = [tuple(found[k] for k in ("pinned", "non_blocking", "side_stream")) for found in (none, pinned, beside)]
    assert seen == [(False, False, False), (True, True, False), (True, True, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("knob", ["tf32", "cudnn_benchmark"])
def test_flags_of_a_card_are_those_inside_the_step(knob: str) -> None:
    for on in (False, True):
        assert active(Pictures(), "cuda", **{knob: on})[knob] is on


@pytest.mark.gpu
def test_kernels_are_seen_in_the_threads_of_a_backward_pass() -> None:
    found = active(Pictures(), "cuda", activation_checkpointing=True, amp_dtype="bf16", sdpa_backend="flash")
    assert 0 < found["recomputed_frac"] <= 1
    assert list(found["attention"]) == ["flash"]
    assert found["optimizer_ops"] == ["aten._foreach_addcdiv_"]
