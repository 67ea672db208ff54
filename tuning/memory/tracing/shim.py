"""The library that makes a torch without CUDA accept fake CUDA tensors: compiled at first use, tried out, loaded.

It is bound to the torch that is installed, so it is kept in the cache under torch's version and its own source's hash.
Nothing here imports torch before the library is loaded: torch looks for CUDA once, when it is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from trainables.data.cache import written_once
from trainables.data.errors import DataError
from tuning.memory.predictor import compiler

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
COMPILE_TIMEOUT_S, SMOKE_TIMEOUT_S = 180.0, 60.0
FUSED = ("silu_backward", "mish_backward")
"""One kernel each on a card. Without it torch takes them apart, and a trace has four copies of an activation more."""
_NAME = "fake_cuda.so"
_KERNELS: list[Any] = []  # torch takes a kernel back with its library


class NoShim(Exception):
    """The library cannot be had; the message says why: no compiler, or a torch that it does not fit."""


def library() -> Path:
    """Returns the library for the installed torch, compiled and tried out if it is not in the cache; raises NoShim.

    The compiler is what $CXX names, else g++, c++ or clang++ of the path. Compiling takes about 10 s, once.
    """
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    try:
        return written_once(f"fake-cuda-{importlib.metadata.version('torch')}-{source}", _build) / _NAME
    except DataError as error:  # no folder to write to
        raise NoShim(str(error)) from None


def load(path: Path, capability: tuple[int, int]) -> None:
    """Imports torch with the library in it; CUDA is then a device of that capability, on which nothing can be computed.

    Raises RuntimeError where torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the library must be loaded before torch is imported; use a process of its own")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch

    loaded.cardtune_choose_attention(*capability)
    for name in FUSED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _KERNELS.append(torch.library.Library("aten", "IMPL"))
            _KERNELS[-1].impl(name, _no_kernel, "CUDA")
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    for name, answer in (("is_bf16_supported", True), ("current_device", 0), ("is_initialized", True)):
        setattr(torch.cuda, name, _always(answer))
    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize", "_lazy_init"):
        setattr(torch.cuda, name, _always(None))
    torch.cuda.get_device_capability = _always(capability)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(data, device="cuda"): copied where a mode sees the copy
    # Recurrent layers ask before they lay out their weights, and a build with CUDA would look for the library itself.
    cast(Any, torch.backends.cudnn).is_acceptable = _always(False)


def _no_kernel(*args: Any, **how: Any) -> Any:
    raise RuntimeError("a kernel of CUDA was called, and there is no card")


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise NoShim("torch is not installed")
    return Path(found.origin).parent


def _build(folder: Path) -> None:
    """Compiles the library into the folder and tries it in a process of its own; raises NoShim."""
    torch, target, command = _torch_folder(), folder / _NAME, compiler()
    if not command:
        raise NoShim("there is no C++ compiler: none of $CXX, g++, c++ and clang++ is on the path")
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    _call([*command, *flags, "-o", str(target), str(SOURCE), "-lc10", "-ltorch_cpu"], COMPILE_TIMEOUT_S, "compile")
    _call([sys.executable, "-P", "-m", __spec__.name, str(target)], SMOKE_TIMEOUT_S, "work")


def _call(command: list[str], limit_s: float, verb: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoShim(f"the library for fake CUDA tensors does not {verb}: {error}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()[-1:]
        reason = lines[0].strip()[:300] if lines else f"exit status {done.returncode}"
        raise NoShim(f"the library for fake CUDA tensors does not {verb} with this torch: {reason}")


def _smoke(path: Path) -> None:
    """Does forward and backward of attention under autocast, and a step; whatever does not work ends the process."""
    load(path, (8, 6))
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn import functional as F

    with FakeTensorMode():
        layer = torch.nn.Linear(64, 192, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            heads = layer(torch.empty(2, 16, 64, device="cuda")).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads)
        name = mixed.grad_fn.name() if mixed.grad_fn is not None else ""
        if "FlashAttention" not in name:
            raise SystemExit(f"error: attention took {name or 'no kernel'} in place of flash")
        mixed.float().sum().backward()
        torch.optim.AdamW(layer.parameters(), fused=True).step()


if __name__ == "__main__":
    _smoke(Path(sys.argv[1]))
