"""What the device itself reaches, a large product of matrices and a large copy, and what a step asks of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

SIDES = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**25}
REPEATS = {"cuda": 10, "cpu": 3}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def ceilings(device: str) -> dict[str, float]:
    """Returns FLOP/s of a product in each type, "tf32" too on CUDA, and under "copy" bytes/s read and written."""
    found = {}
    for name, dtype in TYPES.items():
        if name == "fp16" and device == "cpu":
            continue  # hardly arithmetic of a CPU
        found[name] = product_flops_per_s(device, dtype)
    if device == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        found["tf32"] = product_flops_per_s(device, torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy"] = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    return found


def product_flops_per_s(device: str, dtype: torch.dtype) -> float:
    """Returns floating-point operations a second of a product of square matrices of random numbers."""
    side = SIDES[device]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    return 2 * side**3 / seconds(lambda: torch.mm(a, b, out=out), device)


def seconds(call: Callable[[], Any], device: str) -> float:
    """Returns the seconds of a call, the mean over some after three that are not counted."""
    for _ in range(3):
        call()
    _wait(device)
    start = time.perf_counter()
    for _ in range(REPEATS[device]):
        call()
    _wait(device)
    return (time.perf_counter() - start) / REPEATS[device]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Asked(TorchDispatchMode):
    """Sums up what operators ask of a device: arithmetic, and bytes of the tensors they take and return.

    Views move nothing and are left out. Arithmetic is torch's own count (`torch.utils.flop_counter`), of products,
    convolutions and attention. `bound_s` is the least that all operators take one after the other at the ceilings, each
    held by the slower of its arithmetic and its bytes (Williams et al., "Roofline", 2009).
    """

    def __init__(self, device: str, found: Mapping[str, float]) -> None:
        super().__init__()
        self._device, self._found = device, found
        self.flops = self.bytes = self.operators = 0
        self.bound_s = 0.0
        self.by_operator: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        touched = [t for t in (*_tensors(args), *_tensors(kwargs), *_tensors(result)) if t.device.type == self._device]
        if not touched:
            return result
        moved = sum(t.numel() * t.element_size() for t in touched)
        formula = flop_registry.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        self.flops += flops
        self.bytes += moved
        self.operators += 1
        took = max(moved / self._found["copy"], flops / self._ceiling(touched) if flops else 0.0)
        self.bound_s += took
        self.by_operator[str(func)] = self.by_operator.get(str(func), 0.0) + took
        return result

    def _ceiling(self, touched: list[Tensor]) -> float:
        names = {dtype: name for name, dtype in TYPES.items()}
        name = names.get(touched[0].dtype, "fp32")
        if name == "fp32" and self._device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            name = "tf32"
        return self._found.get(name, self._found["fp32"])


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
