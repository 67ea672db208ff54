"""Tests a workload before anything is measured: one optimiser step and one evaluation of the loop, on a few samples.

Every hook is called as in a training, so a wrong key is reported after seconds and not after two trainings. The quality
of the untrained model is measured, too: a training that reaches no more has learned nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trainables import batches, loop, precision
from trainables.batches import size_of
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.state import LOSS, Diverged
from trainables.workload import Config, HookFailed, Split

FEW = 8
"""Samples of each split in the first test."""
UNTRAINED_S, PREDICTED_AFTER_S = 20.0, 2.0
"""The most that evaluating the untrained model may take: it is only one figure, and a study has minutes. After the
second limit the batches so far, including the slow first one, predict the whole time."""


class Enough(Exception):
    """Raised to end an evaluation that takes too long."""


def check(resident: Resident, config: Config) -> None:
    """Raises HookFailed for the first hook that fails; errors of the loop itself, such as an OOM, pass unchanged.

    If a few samples fail, a whole micro-batch and the whole validation split are tried before the error is raised: a
    loss or a metric may need more samples, as an area under a curve needs both classes.
    """
    micro = min(config.knobs.micro_batch_size, config.knobs.batch_size)
    config = config.with_knobs(num_workers=0, ram_cache=False, compile="off")
    with contextlib.suppress(Exception):
        _try_training(resident, config, min(FEW, micro), FEW)
        return
    _try_training(resident, config, micro, None)  # outside of the block, so that a traceback shows one error only


def untrained(resident: Resident, config: Config) -> dict[str, float]:
    """Returns the objectives of the model before any step, on the whole validation split.

    Empty if an objective is not finite, or if the evaluation takes longer than `UNTRAINED_S`. Raises what the
    workload's `evaluate` raises.
    """
    knobs, model = config.knobs, resident.model(config).eval()
    micro, count = min(knobs.micro_batch_size, knobs.batch_size), size_of(resident.dataset(config, "val"))
    on_host = resident.validation(config, micro)
    device, began = torch.device(config.device), time.perf_counter()

    def batches_in_time() -> Iterator[Any]:
        for done, batch in enumerate(on_host):
            spent_s = time.perf_counter() - began
            whole_s = spent_s * count / (done * micro) if done else 0.0
            if spent_s > UNTRAINED_S or (spent_s > PREDICTED_AFTER_S and whole_s > UNTRAINED_S):
                raise Enough
            yield batches.to_device(batch, device)

    with (
        contextlib.suppress(Enough),
        torch.no_grad(),
        precision.kernels(knobs, device),
        precision.autocast(knobs, device),
    ):
        result = resident.workload.evaluate(model, batches_in_time())
        values = {name: float(result[name]) for name in resident.workload.objectives}
        return values if all(map(math.isfinite, values.values())) else {}
    return {}


def _try_training(resident: Resident, config: Config, train: int, val: int | None) -> None:
    """Trains one step on `train` samples and evaluates on `val` samples, None for all."""
    few = Few(resident, {"train": train, "val": val})
    count = size_of(few.dataset(config, "train"))
    config = config.with_knobs(batch_size=count, micro_batch_size=count)
    try:
        loop.train(loop.prepare(few, config, Plan(samples=count, milestones=(count,))))
    except Diverged as diverged:
        # Not an error yet: a half-precision loss may overflow, and a metric of untrained weights be undefined.
        if LOSS in str(diverged) and config.knobs.amp_dtype == "fp32":
            raise HookFailed("loss", "is not finite on the first samples, before any step") from None


class Few(Resident):
    """A resident with the same model, a few samples of the data, and hooks that raise HookFailed."""

    def __init__(self, whole: Resident, sizes: Mapping[Split, int | None]) -> None:
        super().__init__(_Checked(whole.workload))  # type: ignore[arg-type]  # it has all attributes of the workload
        self._whole, self._sizes, self.meter = whole, sizes, whole.meter

    def model(self, config: Config) -> nn.Module:
        """Returns the resident's own model."""
        return self._whole.model(config)

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns samples spread evenly over the split."""
        return _FewSamples(self._whole.dataset(config, split), self._sizes[split], split)


class _FewSamples(Dataset[Any]):
    """`count` samples of a split, evenly spaced; None for all."""

    def __init__(self, whole: Dataset[Any], count: int | None, split: Split) -> None:
        size = size_of(whole)
        count = size if count is None else min(count, size)
        self._indices = [number * size // count for number in range(count)]
        self._item = _check_calls(f"dataset(config, {split!r})", whole.__getitem__)
        if (at_once := batches.at_once(whole)) is not None:
            batch = _check_calls("dataset.batch", at_once)
            self.batch = lambda indices: batch([self._indices[i] for i in indices])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._item(self._indices[index])


class _Checked:
    """A workload whose methods raise HookFailed."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._workload, name, default_collate) if name == "collate" else getattr(self._workload, name)
        if not callable(value):
            return value
        if name == "evaluate":
            return _check_calls(name, value, functools.partial(_evaluate_fault, self._workload.objectives))
        return _check_calls(name, value, _FAULTS.get(name))


def _check_calls(hook: str, call: Callable[..., Any], fault: Callable[[Any], str] | None = None) -> Callable[..., Any]:
    """Returns `call` so that it raises HookFailed for an exception, and for a result in which `fault` finds a fault."""

    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            result = call(*arguments, **named)
        except (HookFailed, Diverged, Enough):
            raise
        except Exception as error:  # whatever a user's code raises
            raise HookFailed(hook, f"raised {type(error).__name__}: {error}") from error
        if fault is not None and (message := fault(result)):
            raise HookFailed(hook, message)
        return result

    return checked


def _loss_fault(result: object) -> str:
    if not isinstance(result, Tensor):
        return f"returned {_type_of(result)}: it must return the mean loss of the batch, a tensor of shape ()"
    if result.numel() != 1:
        return f"returned shape {tuple(result.shape)}: it must be a mean, shape (), such as loss.mean()"
    if not result.requires_grad:
        return "returned what no weight of the model can change: without .detach(), .item() or no_grad()"
    return ""


def _groups_fault(result: object) -> str:
    if isinstance(result, list | tuple) and all(isinstance(group, Mapping) and "params" in group for group in result):
        return ""
    must = "it must return a list of dicts, each with params, as torch's optimisers take it"
    return f"returned {_type_of(result)}: {must}"


def _number_fault(result: Any) -> str:
    try:
        float(result)
    except (TypeError, ValueError, RuntimeError):
        return f"returned {_type_of(result)}: it must return a number"
    return ""


_FAULTS: Mapping[str, Callable[[Any], str]] = {
    "loss": _loss_fault,
    "parameter_groups": _groups_fault,
    "length": _number_fault,
    "schedule": _number_fault,
}
"""By hook: a function from its result to the fault in it, in words; "" for none."""


def _evaluate_fault(objectives: Mapping[str, str], result: object) -> str:
    names = ", ".join(objectives)
    if not isinstance(result, Mapping):
        return f"returned {_type_of(result)}: it must return a dict with {names}"
    missing = [name for name in objectives if name not in result]
    if missing:
        there = ", ".join(map(str, result)) or "nothing"
        return f"returned {there}, without {', '.join(missing)}: it must return a dict with {names} of `objectives`"
    for name, value in result.items():
        try:
            math.isfinite(float(value))
        except (TypeError, ValueError, RuntimeError):
            return f"returned {name}={_type_of(value)}: each value must be a number"
    return ""


def _type_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
