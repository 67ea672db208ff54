"""Kernels and precision of a step, as far as they show without a card."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes import Sums, heard, knobs_of
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
    with precision.kernels(knobs_of(tf32=on), CUDA):
        assert matmul.allow_tf32 is on
        assert cudnn.allow_tf32 is (on or before)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, before)


@pytest.fixture
def newer_way() -> Iterator[tuple[Any, Any]]:
    """The switches of products and of convolutions, set apart as a user's file may; as they were in the end."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    matmul.fp32_precision, convolution.fp32_precision = "tf32", "ieee"
    yield matmul, convolution
    matmul.fp32_precision, convolution.fp32_precision = before


@pytest.mark.parametrize("on", [False, True])
def test_a_file_that_sets_tf32_the_newer_way_is_left_as_it_was(on: bool, newer_way: tuple[Any, Any]) -> None:
    matmul, convolution = newer_way
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        _ = torch.backends.cudnn.allow_tf32
    with precision.kernels(knobs_of(tf32=on), CUDA):
        assert matmul.fp32_precision == "tf32", "what the file has set holds where the knob is off"
        assert convolution.fp32_precision == ("tf32" if on else "ieee")
    assert (matmul.fp32_precision, convolution.fp32_precision) == ("tf32", "ieee")


@pytest.mark.parametrize(("theirs", "on"), [(False, False), (False, True), (True, False), (True, True)])
def test_cudnns_timing_that_a_file_has_asked_for_is_kept(
    theirs: bool, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", theirs)
    with precision.kernels(knobs_of(cudnn_benchmark=on), CUDA):
        assert torch.backends.cudnn.benchmark is (theirs or on)
    assert torch.backends.cudnn.benchmark is theirs


def test_a_block_checkpointed_twice_is_what_it_was_afterwards() -> None:
    block, own = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs = own.forward = lambda x: x  # type: ignore[method-assign,assignment]  # as some libraries do
    with precision.checkpointed([block, own], True):
        once = block.forward
        with precision.checkpointed([block, own], True):
            assert block.forward is once
        assert block.forward is once
    assert "forward" not in vars(block)
    assert own.forward is theirs


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("flash", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("efficient", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ("math", [SDPBackend.MATH]),
    ],
)
def test_attention_falls_back_to_the_next_best_kernel(asked: str, order: list[SDPBackend]) -> None:
    with precision.kernels(knobs_of(sdpa_backend=asked), CPU):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order


@pytest.mark.parametrize(("micro_batch_size", "kept"), [(4, True), (16, False)])
def test_gradients_that_cuda_graphs_accumulate_stay_in_place(
    micro_batch_size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card there is no graph: the buffers of the first step, which is eager, must never be replaced."""

    def as_it_is(model: nn.Module, knobs: Knobs) -> nn.Module:
        return model

    monkeypatch.setattr(precision, "compiled", as_it_is)
    knobs = knobs_of(compile="reduce-overhead", batch_size=16, micro_batch_size=micro_batch_size, dropout=0.0)
    state = loop.prepare(Resident(Sums()), Config(knobs), Plan(samples=160, window_s=0.0))
    seen: list[Any] = []
    heard(state, lambda _: seen.append([p.grad is not None and p.grad.data_ptr() for p in state.model.parameters()]))
    assert len(seen) > 2
    assert all(pointers == seen[0] for pointers in seen)
    assert all(pointer is not False for pointer in seen[0]) is kept


def test_a_model_is_compiled_in_the_mode_of_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: calls.append(mode) or model)
    model = nn.Linear(2, 2)
    assert precision.compiled(model, knobs_of(compile="default")) is model
    assert precision.compiled(model, knobs_of()) is model
    assert calls == ["default"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_trial_does_not_inherit_the_recompilations_of_another() -> None:
    made: list[int] = []

    def noted(graph: Any, inputs: Any) -> Any:
        made[-1] += 1
        return graph.forward

    error = torch.compile(lambda found, target: (found - target).square().mean(), backend=noted)

    class Compiles(Sums):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            found: torch.Tensor = error(model(batch["values"]), batch["target"])
            return found

    resident, knobs = Resident(Compiles()), knobs_of(batch_size=16, micro_batch_size=8, dropout=0.0)
    for _ in range(2):
        made.append(0)
        loop.train(loop.prepare(resident, Config(knobs), Plan(samples=48)))
    assert made[0] == made[1] > 0


@pytest.mark.parametrize("fused", [True, False])
def test_under_fp16_a_fused_step_does_not_wait_for_the_device(fused: bool) -> None:
    """A host that waits in each step cannot run ahead, and copies of the next batch find nothing to hide behind."""
    read: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            by = {Path(frame.filename).name for frame in traceback.extract_stack()}
            if op is torch.ops.aten._local_scalar_dense.default and "grad_scaler.py" in by:
                read.append(str(op))
            return op(*args, **(kwargs or {}))

    knobs = knobs_of(amp_dtype="fp16", fused_optimizer=fused, batch_size=16, micro_batch_size=16, dropout=0.0)
    state = loop.prepare(Resident(Sums()), Config(knobs), Plan(samples=64, window_s=1e6))
    with contextlib.ExitStack() as stack:  # behind the warm-up, which reads the scale
        heard(state, lambda _: stack.enter_context(Reads()) and False)
    assert bool(read) is not fused
