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

from trainables.knob_columns import AMPERE, Seen
from trainables.knob_readers import AUTOCAST
from trainables.knobs import Knobs

_AUTOCAST = {name: getattr(torch, called) for name, called in AUTOCAST.items()}
_SDPA = {
    # In order of preference. Flash has no kernel for fp32 or for masks on CUDA, efficient attention has one; math has
    # one for everything, and keeps the whole matrix.
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


def autocast(knobs: Knobs, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of a forward pass: autocast to amp_dtype, nothing for fp32."""
    if knobs.amp_dtype not in _AUTOCAST and not torch.is_autocast_enabled(device.type):
        return _Off()  # a disabled torch.autocast would cost time in every step
    return torch.autocast(device.type, dtype=_AUTOCAST.get(knobs.amp_dtype), enabled=knobs.amp_dtype in _AUTOCAST)


class _Off(nullcontext[None], ContextDecorator):
    """No autocast; a context or a decorator, as torch's."""


@contextmanager
def kernels(knobs: Knobs, device: torch.device) -> Iterator[None]:
    """Applies tf32, cudnn_benchmark and sdpa_backend inside the block, and restores the process's settings after it.

    Our loop uses it around forward and backward pass and around evaluation, a custom loop around everything. It must
    include the backward pass: two thirds of all products are there, and a checkpointed block must be recomputed with
    the kernels of its forward pass.
    """
    with ExitStack() as stack:
        if knobs.sdpa_backend in _SDPA:
            stack.enter_context(sdpa_kernel(_SDPA[knobs.sdpa_backend], set_priority=True))
        if device.type == "cuda":
            # If the knob is off, the setting of the user's file holds. Torch allows TF32 for convolutions by default.
            allowed, cudnn = knobs.tf32 or None, torch.backends.cudnn
            stack.enter_context(tf32_kept(matmul=allowed, convolutions=allowed))
            stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = cudnn.benchmark or knobs.cudnn_benchmark
        yield


def kernel_facts(device: torch.device) -> Seen:
    """Returns the settings of `kernels` at this moment, as facts of a first step."""
    if device.type != "cuda":
        return {}
    able = torch.cuda.get_device_capability(device) >= AMPERE
    allowed = able and cast(Any, torch.backends.cuda.matmul).fp32_precision == "tf32"
    return {"tf32": allowed, "cudnn_benchmark": torch.backends.cudnn.benchmark}


@contextmanager
def tf32_kept(*, matmul: bool | None = None, convolutions: bool | None = None) -> Iterator[None]:
    """Allows or forbids TensorFloat-32 inside the block, and restores the setting after it; None changes nothing.

    Torch has two settings, `allow_tf32` and the newer `fp32_precision`. Setting the older sets both. Once a user's file
    has set the newer, the older cannot be read if the two differ.
    """
    products, cudnn = cast(Any, torch.backends.cuda.matmul), cast(Any, torch.backends.cudnn)
    older, newer = ((products, matmul), (cudnn, convolutions)), (products, cudnn.conv, cudnn.rnn)
    precisions = [backend.fp32_precision for backend in newer]
    flags = [_allow_tf32(backend) for backend, _ in older]
    for backend, allowed in older:
        if allowed is not None:
            backend.allow_tf32 = allowed
    try:
        yield
    finally:
        for (backend, allowed), flag in zip(older, flags, strict=True):
            if allowed is not None and flag is not None:
                backend.allow_tf32 = flag
        for backend, precision in zip(newer, precisions, strict=True):
            backend.fp32_precision = precision


def _allow_tf32(backend: Any) -> bool | None:
    """Returns the older setting, None if it cannot be read."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return None


def set_memory_format(model: nn.Module, knobs: Knobs) -> None:
    """Sets the layout of 2-d convolution weights by the knob, on or off, since the same model serves many trials."""
    if any(p.dim() == 4 for p in model.parameters()):
        # Activations follow the weights: a convolution whose weight is NHWC computes and returns NHWC.
        wanted = torch.channels_last if knobs.channels_last else torch.contiguous_format
        cast(Any, model).to(memory_format=wanted)


@contextmanager
def laid_out(model: nn.Module, knobs: Knobs) -> Iterator[None]:
    """Sets the memory format by the knob inside the block, and restores it after it: a script may keep its model."""
    before = {name: p.is_contiguous() for name, p in model.named_parameters() if p.dim() == 4}
    set_memory_format(model, knobs)
    yield
    if any(before.values()):
        set_memory_format(model, knobs.with_(channels_last=False))


def grad_scaler(knobs: Knobs, device: torch.device) -> torch.amp.GradScaler:
    """Returns the GradScaler: enabled for fp16, without effect otherwise."""
    return torch.amp.GradScaler(device.type, enabled=knobs.amp_dtype == "fp16")


@contextmanager
def checkpointed(modules: Sequence[nn.Module], on: bool) -> Iterator[None]:
    """If `on`, modules recompute activations in the backward pass inside the block (Chen et al., arXiv 1604.06174)."""
    with ExitStack() as stack:
        for module in modules if on else ():
            forward = vars(module).get("forward")
            if isinstance(forward, functools.partial) and forward.func is checkpoint:  # a block may be used twice
                continue
            if forward is None:
                stack.callback(delattr, module, "forward")
            else:
                stack.callback(setattr, module, "forward", forward)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # shadows the method
        yield


def compiled(model: nn.Module, knobs: Knobs) -> nn.Module:
    """Returns the model to call in the step: compiled in the knob's mode, or the model itself if the knob is off."""
    if knobs.compile == "off":
        return model
    return cast(nn.Module, cast(Any, torch.compile)(model, mode=knobs.compile))


def graphs_made() -> int:
    """Returns how many graphs this process has compiled so far, for any reason."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported before anything is compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def forget_graphs() -> None:
    """Forgets compiled graphs: torch limits recompilations per process, and an earlier trial's would count."""
    if graphs_made():
        torch.compiler.reset()


def keeps_gradients(knobs: Knobs) -> bool:
    """Returns whether gradients must be kept and zeroed after a step, whatever `set_to_none` says.

    A gradient allocated inside a CUDA graph is overwritten by the graph's next run: accumulated over micro-batches it
    would be wrong, and torch raises. Gradients of the first step, which is not compiled, are outside of any graph.
    """
    return knobs.compile == "reduce-overhead" and knobs.micro_batch_size < knobs.batch_size


def compiled_graphs(loss: Tensor) -> int:
    """Returns the number of compiled graphs that computed the loss; 0 if no part of it was compiled.

    A compiled graph is one node of the backward graph, as is each uncompiled operator.
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
