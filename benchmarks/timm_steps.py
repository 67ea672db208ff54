"""Traces the training steps of timm's models, as its own script takes them, with the kernels of an A100.

    echo resnet50 vit_base_patch16_224 | python -m benchmarks.timm_steps >> traces.jsonl

A process of its own: it loads the library for fake CUDA tensors before torch. Each line of the output is a model: its
step at `SIZES` samples, and which convolutions its operators are, so that a change to the model of their workspaces
needs no new trace. The settings are those of timm's train.py unless told otherwise, at its default image size: fp32,
SGD with Nesterov momentum 0.9 and weight decay, label smoothing, 1,000 classes.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from tuning.memory.prediction import Prediction
from tuning.memory.tracing import shim

A100 = (8, 0)
SIZES = (2, 3)
"""Samples of the steps that are traced; all others follow from these two."""
PLACE_BYTES = 512
"""The storage that stands for the workspaces of a convolution's operator."""
_TORCHVISION = (
    "roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool "
    "_ps_roi_pool_backward nms qnms qroi_align deform_conv2d _deform_conv2d_backward"
)


def main() -> int:
    """Returns 0 once each model that standard input names has its line, or is said not to be traceable."""
    shim.load(shim.library(), A100)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The compiled part of torchvision does not load beside a CPU build of torch; its Python asks for these alone.
    operators = torch.library.Library("torchvision", "DEF")
    for name in _TORCHVISION.split():
        operators.define(f"{name}(Tensor x) -> Tensor")
    import timm

    gc.freeze()
    for name in sys.stdin.read().split():
        start = time.perf_counter()
        row: dict[str, Any] = {"model": name, "timm": timm.__version__}
        try:
            row |= _traced(name)
        except Exception as error:  # whatever a model's code or a fake kernel raises
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        print(json.dumps({**row, "seconds": round(time.perf_counter() - start, 1)}), flush=True)
    return 0


def _traced(name: str) -> dict[str, Any]:
    from tuning.memory.tracing.step import patched

    with patched():
        model, image = _model(name)
        steps = [_step(model, image, size) for size in SIZES]
    return {
        "image": image,
        "parameters": sum(p.numel() for p in model.parameters()),
        "prediction": Prediction("traced", (), tuple(trace for trace, _ in steps)).to_json(),
        "convolutions": [{own: [asdict(each) for each in some] for own, some in found.items()} for _, found in steps],
    }


def _model(name: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the model without weights on the card, in training mode, and the shape of its images."""
    import timm

    from tuning.memory.tracing import weightless
    from tuning.memory.tracing.step import FAKE

    try:
        with FAKE:
            model = timm.create_model(name)
    except Exception:  # it looks at its first weights
        model = timm.create_model(name)
    model = weightless.moved(model, lambda t: t if hasattr(t, "fake_mode") else FAKE.from_tensor(t))
    with FAKE:
        model = weightless.moved(model, lambda t: t.to("cuda")).to("cuda").train()
    return model, tuple(timm.data.resolve_data_config({}, model=model)["input_size"])


def _step(model: Any, image: Sequence[int], samples: int) -> tuple[Any, dict[int, Any]]:
    """Returns the trace of the first step, and the convolutions by the storage that stands for their workspaces."""
    import torch
    from timm.loss import LabelSmoothingCrossEntropy

    from tuning.memory.tracing import workspaces
    from tuning.memory.tracing.lifetimes import Lifetimes
    from tuning.memory.tracing.step import FAKE

    found: dict[int, Any] = {}

    class Recorded(workspaces.Cuda):
        def transients(self, func: Any, args: Sequence[Any], result: Any) -> Iterator[Any]:
            some = workspaces.convolutions(func, args, result)
            if not some:
                yield from super().transients(func, args, result)
                return
            found[lifetimes.births] = some
            yield PLACE_BYTES

    lifetimes = Lifetimes("cuda", FAKE, Recorded(A100))
    model.zero_grad()
    with lifetimes:
        lifetimes.adopt(model.parameters(), "parameter")
        lifetimes.adopt(model.buffers(), "buffer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=2e-5)
        images = torch.empty(samples, *image, device="cuda")
        labels = torch.empty(samples, dtype=torch.long, device="cuda")
        lifetimes.name([images, labels], "batch")
        lifetimes.phase = "forward"
        out = model(images)
        loss = LabelSmoothingCrossEntropy()(out[0] if isinstance(out, tuple | list) else out, labels)
        loss.backward()
        lifetimes.phase = "optimizer"
        optimizer.step()
        states = (value for of_one in optimizer.state.values() for value in of_one.values())
        lifetimes.name((value for value in states if isinstance(value, torch.Tensor)), "optimizer")
        lifetimes.name((p.grad for p in model.parameters() if p.grad is not None), "gradient")
        optimizer.zero_grad()
        trace = lifetimes.trace(samples)
    del optimizer, images, labels, out, loss
    gc.collect()
    return cast(Any, trace), found


if __name__ == "__main__":
    sys.exit(main())
