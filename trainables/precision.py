"""Arithmetic and kernels of a step: autocast, GradScaler, TF32, attention kernels, checkpointed blocks, compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trainables.knob_columns import AMPERE
from trainables.knob_readers import AUTOCAST
from trainables.knobs import Knobs

_AUTOCAST = {name: getattr(torch, called) for name, called in AUTOCAST.items()}
_SDPA = {
    # What flash has no kernel for, fp32 or any mask on CUDA, efficient attention has; math keeps the whole matrix.
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


def autocast(knobs: Knobs, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of a forward pass: autocast to amp_dtype, nothing for fp32."""
    if knobs.amp_dtype not in _AUTOCAST and not torch.is_autocast_enabled(device.type):
        return _Off()  # torch makes and enters one that is off, too, in every step
    return torch.autocast(device.type, dtype=_AUTOCAST.get(knobs.amp_dtype), enabled=knobs.amp_dtype in _AUTOCAST)


class _Off(nullcontext[None], ContextDecorator):
    """No autocast, as a block or around a function."""


@contextmanager
def kernels(knobs: Knobs, device: torch.device) -> Iterator[None]:
    """Sets inside the block what tf32, cudnn_benchmark and sdpa_backend say, and restores the process's settings.

    In the packaged loop it is around forward and backward pass and evaluation, in a loop of one's own around all. It
    has to be around forward *and* backward pass: products of the backward pass are two thirds of all, and a
    checkpointed block must be recomputed with the kernels it was computed with.
    """
    with ExitStack() as stack:
        if knobs.sdpa_backend in _SDPA:
            stack.enter_context(sdpa_kernel(_SDPA[knobs.sdpa_backend], set_priority=True))
        if device.type == "cuda":
            # Where the knob is off, what the user's file has set holds. Torch allows convolutions TF32 by default.
            allowed, cudnn = knobs.tf32 or None, torch.backends.cudnn
            stack.enter_context(tf32_kept(matmul=allowed, convolutions=allowed))
            stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = cudnn.benchmark or knobs.cudnn_benchmark
        yield


def kernel_facts(device: torch.device) -> dict[str, Any]:
    """Returns what `kernels` has set at this moment, as a first step tells it."""
    if device.type != "cuda":
        return {}
    able = torch.cuda.get_device_capability(device) >= AMPERE
    allowed = able and cast(Any, torch.backends.cuda.matmul).fp32_precision == "tf32"
    return {"tf32": allowed, "cudnn_benchmark": torch.backends.cudnn.benchmark}


@contextmanager
def tf32_kept(*, matmul: bool | None = None, convolutions: bool | None = None) -> Iterator[None]:
    """Allows TensorFloat-32 inside the block, or not, and brings back what was set before; None leaves it as it is.

    Torch has two ways to say so. Once a user's file has used the newer, `fp32_precision`, the older cannot be read
    where the two differ; setting the older sets both.
    """
    products, cudnn = cast(Any, torch.backends.cuda.matmul), cast(Any, torch.backends.cudnn)
    older, newer = ((products, matmul), (cudnn, convolutions)), (products, cudnn.conv, cudnn.rnn)
    precisions = [one.fp32_precision for one in newer]
    flags = [_allowed(one) for one, _ in older]
    for one, allowed in older:
        if allowed is not None:
            one.allow_tf32 = allowed
    try:
        yield
    finally:
        for (one, allowed), flag in zip(older, flags, strict=True):
            if allowed is not None and flag is not None:
                one.allow_tf32 = flag
        for one, precision in zip(newer, precisions, strict=True):
            one.fp32_precision = precision


def _allowed(backend: Any) -> bool | None:
    """Returns the older flag, None where it cannot be read."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return None


def set_memory_format(model: nn.Module, knobs: Knobs) -> None:
    """Lays out the weights of two-dimensional convolutions as the knob says; the same model serves many trials."""
    if any(p.dim() == 4 for p in model.parameters()):
        # Activations follow the weights: a convolution whose weight is NHWC computes and returns NHWC.
        wanted = torch.channels_last if knobs.channels_last else torch.contiguous_format
        cast(Any, model).to(memory_format=wanted)


@contextmanager
def laid_out(model: nn.Module, knobs: Knobs) -> Iterator[None]:
    """Sets the memory format that the knob asks for, and restores it afterwards: a script may keep its model."""
    before = {name: p.is_contiguous() for name, p in model.named_parameters() if p.dim() == 4}
    set_memory_format(model, knobs)
    yield
    if any(before.values()):
        set_memory_format(model, knobs.with_(channels_last=False))


def grad_scaler(knobs: Knobs, device: torch.device) -> torch.amp.GradScaler:
    """Returns the loss scaler: at work for fp16, passing everything through otherwise."""
    return torch.amp.GradScaler(device.type, enabled=knobs.amp_dtype == "fp16")


@contextmanager
def checkpointed(modules: Sequence[nn.Module], on: bool) -> Iterator[None]:
    """Inside the block each module recomputes its activations in the backward pass (Chen et al., arXiv 1604.06174)."""
    with ExitStack() as stack:
        for module in modules if on else ():
            own = vars(module).get("forward")
            if _is_wrapped(own):  # a block may be used twice
                continue
            if own is None:
                stack.callback(delattr, module, "forward")
            else:
                stack.callback(setattr, module, "forward", own)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # shadows the class's
        yield


def _is_wrapped(forward: object) -> bool:
    return isinstance(forward, functools.partial) and forward.func is checkpoint


def compiled(model: nn.Module, knobs: Knobs) -> nn.Module:
    """Returns the model to call in the step: compiled in the knob's mode, or itself when the knob is off."""
    if knobs.compile == "off":
        return model
    return cast(nn.Module, cast(Any, torch.compile)(model, mode=knobs.compile))


def graphs_made() -> int:
    """Returns how many graphs this process has compiled so far, at whoever's wish."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # which is there once anything may have been compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def forget_graphs() -> None:
    """Forgets what was compiled: the limit of recompilations is the process's, and an earlier trial's count into it."""
    if graphs_made():
        torch.compiler.reset()


def keeps_gradients(knobs: Knobs) -> bool:
    """Returns whether gradients stay in place from step to step, whatever `set_to_none` says.

    A gradient that is born inside a CUDA graph is overwritten by the graph's next run: accumulated over micro-batches
    it would be wrong, and torch raises. Those of the first step, which is not compiled, are outside of any graph.
    """
    return knobs.compile == "reduce-overhead" and knobs.micro_batch_size < knobs.batch_size


def compiled_graphs(loss: Tensor) -> int:
    """Returns how many compiled graphs made the loss: 0 where every operator of it ran uncompiled.

    A graph that torch.compile made is one node of the backward graph; an uncompiled operator is a node of its own.
    """
    count, seen, left = 0, set[object](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += node.name().startswith("CompiledFunction")
        left += [following for following, _ in node.next_functions]
    return count
