"""The contract between a workload and the loop.

A workload says what is learned: data, model, loss, quality. Device, precision, accumulation, prefetch, timing,
checkpoints and OOM are the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from trainables.knob_columns import Domain, Knob
from trainables.knobs import Knobs, KnobTable, Scalar
from trainables.our_knobs import BUILT_IN as BUILT_IN

if TYPE_CHECKING:  # who only looks a workload up does not wait for torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Split = Literal["train", "val"]
Batch = Any
"""What `collate` makes of a list of samples: a tensor, or tuples, lists and dicts of them."""
SPLIT_SEED = 0
"""Of the built-in workloads' splits, whatever a trial's seed is: every seed is judged on the same samples."""


@dataclass(frozen=True)
class Config:
    """The values of one trial, as a workload sees them.

    `options` are the workload's own settings (`workload.data`, `workload.model`, ...); `seed` fixes the model's first
    weights, the order of the samples and dropout; `device` is a torch device name. A loader's process from which
    nothing comes for `loader_timeout_s` seconds is taken for hung; without a limit the loop would wait for ever.
    """

    knobs: Knobs = field(default_factory=Knobs)
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"
    loader_timeout_s: float = 120.0

    def with_knobs(self, **changes: Scalar) -> Config:
        """Returns a copy with some knobs changed."""
        return replace(self, knobs=self.knobs.with_(**changes))


@runtime_checkable
class Workload(Protocol):
    """Four methods and their objectives, which a module has as its `WORKLOAD`; one of your own needs a space, too.

    Optional, each with a working default:
      `options: dict[str, Scalar | None]`   the workload's own settings and their defaults;
      `knobs: dict[str, Knob]`              knobs of its own (`trainables.Knob`), searched like those of the loop and
                                            read as `config.knobs.NAME`;
      `collate(samples) -> Batch`           default: `torch.utils.data.default_collate`;
      `length(sample) -> int`               for length bucketing; default: all equal, bucketing then changes nothing;
      `augment(batch, keys, config, phase) -> Batch`   for training batches: in the loader's processes, or on the device
                                            (knob `device_augmentation`); all randomness by `trainables.draws` from
                                            `keys`, int64, (batch,), one for each sample in the order of `collate`,
                                            which depend on seed, epoch and the sample's index alone;
      `phases(config) -> Mapping[str, float]`   phases of a run in order -> share of its training samples; the rate's
                                            schedule starts anew in each; default: one, "";
      `parameter_groups(model, config)`     the optimiser's groups, as torch takes them, with `lr_scale` as a factor of
                                            the rate; default: one group of all trainable;
      `optimizer(model, config)`            a torch optimiser in the place of the knob's, each group at its peak rate;
      `schedule(progress, config) -> float` share of the peak rate after that share of the run, 0 to 1, in the place of
                                            the knobs `schedule` and `warmup_frac`;
      `blocks(model) -> Sequence[Module]`   what activation checkpointing wraps; default: members of every ModuleList;
      `baselines(config) -> dict[str, dict[str, float]]`   what plain rules reach, such as the majority class:
                                            name -> objectives, printed beside the result; what is no better is not
                                            picked for its speed once anything is; the untrained model is one always.

    A data set may have, where samples one by one are the slow way:
      `batch(indices) -> Batch`             what `collate` gives of these samples, made at once;
      `in_ram() -> Dataset`                 itself with every sample read and prepared, for the knob `ram_cache`;
                                            default: a list of its samples;
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

        The last batch is smaller than the others, so that a mean over batches needs weights. Each is to be done with
        before the next is asked for. It is called again with batches of half the size where they run out of memory. An
        exception ends the evaluation of the untrained model where it takes too long.
        """
        ...


@runtime_checkable
class OwnWorkload(Workload, Protocol):
    """A workload in a file of one's own, which says what is searched; of ours their files in search_spaces do."""

    default_space: ClassVar[Mapping[str, Any]]


REPLACING = ("optimizer", "schedule")
"""Optional hooks that stand in the place of knobs: those are no knobs of a workload that has them."""
Augment = Callable[[Batch, "Tensor", Config, str], Batch]


@dataclass(frozen=True)
class OwnLoop:
    """A file with a loop of its own, `def train(run)`, and what its module says beside it.

    `default_space` is its SPACE, `knobs` are those in it that are not of the loop, `options` its OPTIONS, `plain_rules`
    its BASELINES. A SPACE with batch sizes and no micro-batch sizes asks for whole batches.
    """

    train: Callable[[Any], object]
    objectives: Mapping[str, Literal["min", "max"]]
    default_space: Mapping[str, Any]
    knobs: Mapping[str, Knob]
    options: Mapping[str, Any]
    plain_rules: Mapping[str, Mapping[str, float]]
    path: str


class WorkloadError(Exception):
    """A workload that cannot be found, or that does not keep the contract."""


class LoopError(WorkloadError):
    """A loop of one's own that does not do what `run` asks of it: its line is to blame, and no option."""


class HookFailed(Exception):
    """A method of a workload that raised, or that returned what the loop cannot use.

    `hook` is its name, the text what it did. Where it raised, its own exception is the cause.
    """

    def __init__(self, hook: str, said: str) -> None:
        super().__init__(said)
        self.hook = hook


def table_of(workload: Workload | OwnLoop) -> KnobTable:
    """Returns the rows of the loop's knobs and of those that the workload declares.

    Raises WorkloadError for wrong ones.
    """
    declared = getattr(workload, "knobs", {})
    if not isinstance(declared, Mapping):
        raise WorkloadError(f"knobs must be a dict of names and Knob(...), got {type(declared).__name__}")
    own = REPLACING if isinstance(workload, OwnLoop) else ()  # its optimiser and schedule are its own
    hooks = (*REPLACING, "parameter_groups")
    try:
        return KnobTable(declared, hooks=[n for n in hooks if n in own or callable(getattr(workload, n, None))])
    except ValueError as error:
        raise WorkloadError(str(error)) from None


def options_of(config: Config, defaults: Mapping[str, Any], domains: Mapping[str, Domain]) -> dict[str, Any]:
    """Returns a workload's options, those not given at their defaults; None only where that is the default.

    Raises WorkloadError for a value outside of its domain.
    """
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
    """Returns how the workload makes a batch of samples."""
    from torch.utils.data import default_collate

    return cast(Callable[[list[Any]], Batch], getattr(workload, "collate", default_collate))


def augment_of(workload: Workload) -> Augment | None:
    """Returns the workload's augmentation, or None where it has none."""
    return cast("Augment | None", getattr(workload, "augment", None))


def phases(workload: Workload, config: Config) -> dict[str, float]:
    """Returns the phases of a run in order with their shares, which sum to 1; those of share 0 are left out.

    Raises WorkloadError for shares that are negative or do not sum to 1.
    """
    own = getattr(workload, "phases", None)
    found = dict(own(config)) if own is not None else {"": 1.0}
    if min(found.values(), default=-1.0) < 0 or abs(sum(found.values()) - 1.0) > 1e-6:
        raise WorkloadError(f"phases() returned {found}; expected names with shares that sum to 1")
    return {name: share for name, share in found.items() if share > 0}


def parameter_groups(workload: Workload, model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Returns the optimiser's parameter groups: the workload's own, or one of every trainable parameter."""
    own = getattr(workload, "parameter_groups", None)
    if own is not None:
        return cast(list[dict[str, Any]], own(model, config))
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def blocks(workload: Workload | OwnLoop, model: nn.Module) -> Sequence[nn.Module]:
    """Returns the modules that activation checkpointing wraps: its own, or members of every ModuleList."""
    from torch import nn

    own = getattr(workload, "blocks", None)
    if own is not None:
        return cast(Sequence[nn.Module], own(model))
    return [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]


def baselines(workload: Workload, config: Config) -> dict[str, dict[str, float]]:
    """Returns what is reached without learning the task, by name; empty where the workload states none.

    Raises HookFailed where the hook returns something else.
    """
    own = getattr(workload, "baselines", None)
    found = own(config) if own is not None else {}
    if not isinstance(found, Mapping) or not all(isinstance(reached, Mapping) for reached in found.values()):
        wanted = next(iter(workload.objectives))
        said = f'returned {found!r}: it must return names with objectives, such as {{"majority": {{"{wanted}": 0.5}}}}'
        raise HookFailed("baselines", said)
    return cast("dict[str, dict[str, float]]", found)
