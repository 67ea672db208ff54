"""A workload tried before anything is measured: one optimiser step and one evaluation of the loop, on a few samples.

Every hook is called as a training calls it, so a wrong key is said after seconds and not after two trainings. What
the model knows before any step is measured too: trainings that come to no more have learned nothing.
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
"""Samples of each split that are tried first."""
UNTRAINED_S, TOLD_S = 20.0, 2.0
"""The most that evaluating the untrained model may take, as it is one figure and a study has minutes; and the seconds
after which its batches so far tell what it will take, the slow first one among them."""


class Enough(Exception):
    """An evaluation was seen for long enough."""


def check(resident: Resident, config: Config) -> None:
    """Raises HookFailed for the first hook that fails, and as it is what the loop itself meets, such as an OOM.

    What fails on a few samples is tried with a whole micro-batch and the whole validation split before it is said: a
    loss or a metric may need more, as an area under a curve needs both classes.
    """
    micro = min(config.knobs.micro_batch_size, config.knobs.batch_size)
    config = config.with_knobs(num_workers=0, ram_cache=False, compile="off")
    with contextlib.suppress(Exception):
        _tried(resident, config, min(FEW, micro), FEW)
        return
    _tried(resident, config, micro, None)  # outside, so that a traceback shows what is raised once


def untrained(resident: Resident, config: Config) -> dict[str, float]:
    """Returns the objectives of the model before any step, on the whole validation split.

    Empty where one is undefined, or where it takes longer than `UNTRAINED_S`. Raises what the workload's `evaluate`
    raises.
    """
    knobs, model = config.knobs, resident.model(config).eval()
    micro, count = min(knobs.micro_batch_size, knobs.batch_size), size_of(resident.dataset(config, "val"))
    held = resident.validation(config, micro)
    device, began = torch.device(config.device), time.perf_counter()

    def moved() -> Iterator[Any]:
        for done, batch in enumerate(held):
            spent_s = time.perf_counter() - began
            whole_s = spent_s * count / (done * micro) if done else 0.0
            if spent_s > UNTRAINED_S or (spent_s > TOLD_S and whole_s > UNTRAINED_S):
                raise Enough
            yield batches.to_device(batch, device)

    with (
        contextlib.suppress(Enough),
        torch.no_grad(),
        precision.kernels(knobs, device),
        precision.autocast(knobs, device),
    ):
        found = resident.workload.evaluate(model, moved())
        values = {name: float(found[name]) for name in resident.workload.objectives}
        return values if all(map(math.isfinite, values.values())) else {}
    return {}


def _tried(resident: Resident, config: Config, train: int, val: int | None) -> None:
    """Trains one step on `train` samples and evaluates on `val`, None for all."""
    few = Few(resident, {"train": train, "val": val})
    count = size_of(few.dataset(config, "train"))
    config = config.with_knobs(batch_size=count, micro_batch_size=count)
    try:
        for _ in loop.train(loop.prepare(few, config, Plan(samples=count, milestones=(count,)))):
            pass
    except Diverged as diverged:
        # A half-precision loss may overflow, and a metric of untrained weights be undefined: a trial tells.
        if LOSS in str(diverged) and config.knobs.amp_dtype == "fp32":
            raise HookFailed("loss", "is not finite on the first samples, before any step") from None


class Few(Resident):
    """A resident's model with the hooks watched, and with a few samples of its data."""

    def __init__(self, whole: Resident, sizes: Mapping[Split, int | None]) -> None:
        super().__init__(_Watched(whole.workload))  # type: ignore[arg-type]  # it has whatever the workload has
        self._whole, self._sizes, self.meter = whole, sizes, whole.meter

    def model(self, config: Config) -> nn.Module:
        """Returns the resident's own model."""
        return self._whole.model(config)

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns samples spread evenly over the split."""
        return _FewSamples(self._whole.dataset(config, split), self._sizes[split], split)


class _FewSamples(Dataset[Any]):
    """So many samples of a split, evenly spaced; None for all."""

    def __init__(self, whole: Dataset[Any], count: int | None, split: Split) -> None:
        size = size_of(whole)
        count = size if count is None else min(count, size)
        self._indices = [number * size // count for number in range(count)]
        self._item = _watched(f"dataset(config, {split!r})", whole.__getitem__)
        if (at_once := batches.at_once(whole)) is not None:
            batch = _watched("dataset.batch", at_once)
            self.batch = lambda asked: batch([self._indices[i] for i in asked])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._item(self._indices[index])


class _Watched:
    """A workload whose methods raise HookFailed."""

    def __init__(self, workload: Any) -> None:
        self._own = workload

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name, default_collate) if name == "collate" else getattr(self._own, name)
        if not callable(found):
            return found
        if name == "evaluate":
            return _watched(name, found, functools.partial(_evaluate_fault, self._own.objectives))
        return _watched(name, found, _FAULTS.get(name))


def _watched(hook: str, call: Callable[..., Any], fault: Callable[[Any], str] | None = None) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            found = call(*arguments, **named)
        except (HookFailed, Diverged, Enough):
            raise
        except Exception as error:  # whatever a user's code raises
            raise HookFailed(hook, f"raised {type(error).__name__}: {error}") from error
        if fault is not None and (said := fault(found)):
            raise HookFailed(hook, said)
        return found

    return called


def _loss_fault(found: object) -> str:
    if not isinstance(found, Tensor):
        return f"returned {_shown(found)}: it must return the mean loss of the batch, a tensor of shape ()"
    if found.numel() != 1:
        return f"returned shape {tuple(found.shape)}: it must be a mean, shape (), such as loss.mean()"
    if not found.requires_grad:
        return "returned what no weight of the model can change: without .detach(), .item() or no_grad()"
    return ""


def _groups_fault(found: object) -> str:
    if isinstance(found, list | tuple) and all(isinstance(each, Mapping) and "params" in each for each in found):
        return ""
    return f"returned {_shown(found)}: it must return a list of dicts, each with params, as torch's optimisers take it"


def _number_fault(found: Any) -> str:
    try:
        float(found)
    except (TypeError, ValueError, RuntimeError):
        return f"returned {_shown(found)}: it must return a number"
    return ""


_FAULTS: Mapping[str, Callable[[Any], str]] = {
    "loss": _loss_fault,
    "parameter_groups": _groups_fault,
    "length": _number_fault,
    "schedule": _number_fault,
}
"""By hook: what is wrong with what it returned, in words; "" for nothing."""


def _evaluate_fault(objectives: Mapping[str, str], found: object) -> str:
    names = ", ".join(objectives)
    if not isinstance(found, Mapping):
        return f"returned {_shown(found)}: it must return a dict with {names}"
    missing = [name for name in objectives if name not in found]
    if missing:
        there = ", ".join(map(str, found)) or "nothing"
        return f"returned {there}, without {', '.join(missing)}: it must return a dict with {names} of `objectives`"
    for name, value in found.items():
        try:
            math.isfinite(float(value))
        except (TypeError, ValueError, RuntimeError):
            return f"returned {name}={_shown(value)}: each value must be a number"
    return ""


def _shown(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
