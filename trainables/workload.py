"""The contract between a workload and the loop.

A workload defines what is learned: data, model, loss, quality. The loop is responsible for device, precision,
accumulation, prefetch, timing, checkpoints and OOM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from trainables.knob_columns import Domain, Knob, Options
from trainables.knobs import Knobs, KnobTable, Scalar
from trainables.our_knobs import BUILT_IN as BUILT_IN

if TYPE_CHECKING:  # torch takes seconds to import, which code that only looks up a workload does not need
    from torch import Tensor, nn
    from torch.nn import Module as Module  # tuning.api names it, and may not import torch
    from torch.utils.data import Dataset

Split = Literal["train", "val"]
ParameterGroup = dict[str, Any]
"""Parameters and settings of an optimiser, as torch takes them."""
Batch = Any
"""The result of `collate`: a tensor, or tuples, lists and dicts of tensors."""
SPLIT_SEED = 0
"""Seed of the built-in workloads' splits; independent of a trial's seed, so all are judged on the same samples."""


@dataclass(frozen=True)
class Config:
    """The values of one trial, as a workload sees them.

    `options` are the workload's own settings (`workload.data`, `workload.model`, ...); `seed` fixes the model's initial
    weights, the order of the samples and dropout; `device` is a torch device name. A loader process that delivers
    nothing for `loader_timeout_s` seconds counts as hung; without a limit the loop would wait for ever.
    """

    knobs: Knobs = field(default_factory=Knobs)
    options: Options = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"
    loader_timeout_s: float = 120.0

    def with_knobs(self, **changes: Scalar) -> Config:
        """Returns a copy with some knobs changed."""
        return replace(self, knobs=self.knobs.with_(**changes))


@runtime_checkable
class Workload(Protocol):
    """Four methods and the objectives: the type of a module's `WORKLOAD`. Your own also needs a `default_space`.

    Optional, each with a working default:
      `options: dict[str, Scalar | None]`   the workload's own settings and their defaults;
      `knobs: dict[str, Knob]`              the workload's own knobs (`trainables.Knob`), searched like those of the
                                            loop and read as `config.knobs.NAME`;
      `collate(samples) -> Batch`           default: `torch.utils.data.default_collate`;
      `length(sample) -> int`               for length bucketing; default: all equal, bucketing then changes nothing;
      `augment(batch, keys, config, phase) -> Batch`   for training batches: in loader processes, or on the device
                                            (knob `device_augmentation`); draws random numbers by `trainables.draws`
                                            from `keys`, int64, (batch,), one for each sample in the order of `collate`;
                                            a key depends on seed, epoch and the sample's index alone;
      `phases(config) -> Mapping[str, float]`   phases of a run in order -> share of its training samples; the learning
                                            rate schedule restarts in each; default: one, "";
      `phase_rounds(config) -> int`         how often the phases come, in turns and equally long; default: once;
      `parameter_groups(model, config)`     the optimiser's groups, as torch takes them, with `lr_scale` as a factor of
                                            the learning rate; default: one group of all trainable parameters;
      `optimizer(model, config)`            a torch optimiser instead of the knob's, each group at its peak rate;
      `schedule(progress, config) -> float` share of the peak rate at that progress of the run, both 0 to 1, instead of
                                            the knobs `schedule` and `warmup_frac`;
      `blocks(model) -> Sequence[Module]`   modules that activation checkpointing wraps; default: members of every
                                            ModuleList;
      `baselines(config) -> dict[str, dict[str, float]]`   results of plain rules, such as the majority class: name ->
                                            objectives, printed beside the result; a configuration that is no better is
                                            picked only if none is better; the untrained model is always a baseline.

    If reading single samples is slow, a data set may have:
      `batch(indices) -> Batch`             the result of `collate` for these samples, made at once;
      `in_ram() -> Dataset`                 a data set with every sample prepared, for the knob `ram_cache`; default: a
                                            list of its samples;
      `sample_lengths() -> list`            `length` of every sample.
    """

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]]

    def model(self, config: Config) -> nn.Module:
        """Returns a new model on the CPU, in fp32; called under `torch.manual_seed(config.seed)`."""
        ...

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns a map-style dataset; the same samples in the same order at every call."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the batch, shape ()."""
        ...

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Returns the objectives over the validation batches; runs in eval mode, without gradients.

        The last batch may be smaller than the others, so a mean over batches needs weights. Finish a batch before you
        take the next. If batches run out of memory, the method is called again with batches of half the size. If the
        evaluation of the untrained model takes too long, an exception ends it.
        """
        ...


@runtime_checkable
class OwnWorkload(Workload, Protocol):
    """A workload in a user's file, with the space to search; our workloads have theirs in search_spaces."""

    default_space: ClassVar[Mapping[str, object]]


REPLACING = ("optimizer", "schedule")
"""Optional hooks that replace knobs: a workload with such a hook lacks the knobs that it replaces."""
Augment = Callable[[Batch, "Tensor", Config, str], Batch]


@dataclass(frozen=True)
class OwnLoop:
    """A file with a custom loop, `def train(run)`, and the constants of its module.

    `default_space` is its SPACE, `knobs` are the names in it that are no knobs of the loop, `options` is its OPTIONS,
    `plain_rules` its BASELINES. If SPACE has batch sizes and no micro-batch sizes, batches are trained in one piece.
    """

    train: Callable[[Any], object]
    objectives: Mapping[str, Literal["min", "max"]]
    default_space: Mapping[str, object]
    knobs: Mapping[str, Knob]
    options: Options
    plain_rules: Mapping[str, Mapping[str, float]]
    path: str

    @property
    def is_outside(self) -> bool:
        """Returns whether another process trains (`integrations.program`), which shows no model and no data here."""
        return bool(getattr(self.train, "is_outside", False))


class WorkloadError(Exception):
    """A workload cannot be found, or does not keep the contract."""


class LoopError(WorkloadError):
    """A custom loop uses `run` in a wrong way: a line of its code is to blame, not an option."""


class NotIndependent(LoopError):
    """A training goes on from an earlier one, so that the qualities of all are wrong."""


class HookFailed(Exception):
    """A method of a workload raised an exception, or returned something that the loop cannot use.

    `hook` is its name, the text says what it did. If it raised, its exception is the cause.
    """

    def __init__(self, hook: str, message: str) -> None:
        super().__init__(message)
        self.hook = hook


def table_of(workload: Workload | OwnLoop) -> KnobTable:
    """Returns the table of the loop's knobs and the workload's own; raises WorkloadError for a wrong declaration."""
    declared = getattr(workload, "knobs", {})
    if not isinstance(declared, Mapping):
        raise WorkloadError(f"knobs must be a dict of names and Knob(...), got {type(declared).__name__}")
    replaced = REPLACING if isinstance(workload, OwnLoop) else ()  # a custom loop has its own optimiser and schedule
    hooks = (*REPLACING, "parameter_groups")
    try:
        return KnobTable(declared, hooks=[n for n in hooks if n in replaced or callable(getattr(workload, n, None))])
    except ValueError as error:
        raise WorkloadError(str(error)) from None


def options_of(workload: Any, config: Config) -> dict[str, Any]:
    """Returns the options of one of our workloads, by default its `options`.

    Raises WorkloadError for a value outside of its domain in `domains`, and for None unless it is the default.
    """
    defaults: Options = workload.options
    domains: Mapping[str, Domain] = workload.domains
    options = {**defaults, **config.options}
    for name, domain in domains.items():
        if options[name] is None and defaults[name] is None:
            continue
        try:
            options[name] = domain.check(options[name])
        except ValueError:
            raise WorkloadError(f"workload.{name}={options[name]}: expected {domain.describe()}") from None
    return options


def collate_of(workload: Workload) -> Callable[[list[Any]], Batch]:
    """Returns the workload's `collate`, by default torch's."""
    from torch.utils.data import default_collate

    return cast(Callable[[list[Any]], Batch], getattr(workload, "collate", default_collate))


def augment_of(workload: Workload) -> Augment | None:
    """Returns the workload's `augment`, or None if it has none."""
    return cast("Augment | None", getattr(workload, "augment", None))


def phases(workload: Workload, config: Config) -> dict[str, float]:
    """Returns the phases of a run in order with their shares, which sum to 1; phases of share 0 are left out.

    Raises WorkloadError for shares that are negative or do not sum to 1.
    """
    hook = getattr(workload, "phases", None)
    shares = dict(hook(config)) if hook is not None else {"": 1.0}
    if min(shares.values(), default=-1.0) < 0 or abs(sum(shares.values()) - 1.0) > 1e-6:
        raise WorkloadError(f"phases() returned {shares}; expected names with shares that sum to 1")
    return {name: share for name, share in shares.items() if share > 0}


def phase_rounds(workload: Workload, config: Config) -> int:
    """Returns how often the phases of a run are to come."""
    return int(getattr(workload, "phase_rounds", lambda _: 1)(config))


def parameter_groups(workload: Workload, model: nn.Module, config: Config) -> list[ParameterGroup]:
    """Returns the optimiser's parameter groups: the workload's own, or one group of all trainable parameters."""
    hook = getattr(workload, "parameter_groups", None)
    if hook is not None:
        return cast(list[ParameterGroup], hook(model, config))
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def blocks(workload: Workload | OwnLoop, model: nn.Module) -> Sequence[nn.Module]:
    """Returns the modules that activation checkpointing wraps: by the hook, or members of every ModuleList."""
    from torch import nn

    hook = getattr(workload, "blocks", None)
    if hook is not None:
        return cast(Sequence[nn.Module], hook(model))
    return [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]


def baselines(workload: Workload, config: Config) -> dict[str, dict[str, float]]:
    """Returns the objectives of the workload's baselines by name; empty if it has none.

    Raises HookFailed if the hook does not return such a mapping.
    """
    hook = getattr(workload, "baselines", None)
    reached = hook(config) if hook is not None else {}
    if not isinstance(reached, Mapping) or not all(isinstance(values, Mapping) for values in reached.values()):
        example = f'{{"majority": {{"{next(iter(workload.objectives))}": 0.5}}}}'
        message = f"returned {reached!r}: it must return names with objectives, such as {example}"
        raise HookFailed("baselines", message)
    return cast("dict[str, dict[str, float]]", reached)
