"""Kernels and precision of a step, as far as they show without a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from tests.fakes import Sums
from trainables import loop, precision
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_tf32_leaves_convolutions_as_torch_has_them(on: bool, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    monkeypatch.setattr(cudnn, "allow_tf32", before)
    with precision.kernels(Knobs(tf32=on), CUDA):
        assert matmul.allow_tf32 is on
        assert cudnn.allow_tf32 is (on or before)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, before)


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("flash", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("efficient", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("math", [SDPBackend.MATH]),
    ],
)
def test_attention_falls_back_to_the_next_best_kernel(asked: str, order: list[SDPBackend]) -> None:
    with precision.kernels(Knobs(sdpa_backend=asked), CPU):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order


@pytest.mark.parametrize(("micro_batch_size", "kept"), [(4, True), (16, False)])
def test_gradients_that_cuda_graphs_accumulate_stay_in_place(
    micro_batch_size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card there is no graph: the buffers of the first step, which is eager, must never be replaced."""

    def as_it_is(model: nn.Module, knobs: Knobs) -> nn.Module:
        return model

    monkeypatch.setattr(precision, "compiled", as_it_is)
    knobs = Knobs(compile="reduce-overhead", batch_size=16, micro_batch_size=micro_batch_size, dropout=0.0)
    state = loop.prepare(Resident(Sums()), Config(knobs), Plan(samples=160, window_s=0.0))
    seen: list[Any] = [
        [p.grad is not None and p.grad.data_ptr() for p in state.model.parameters()] for _ in loop.train(state)
    ]
    assert len(seen) > 2
    assert all(pointers == seen[0] for pointers in seen)
    assert all(pointer is not False for pointer in seen[0]) is kept


def test_a_trial_does_not_inherit_the_recompilations_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, mode: calls.append(mode) or model)
    model = nn.Linear(2, 2)
    assert precision.compiled(model, Knobs(compile="default")) is model
    assert precision.compiled(model, Knobs()) is model
    assert calls == ["reset", "default"]
