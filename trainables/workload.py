"""The contract between a workload and the loop, and `load`, which finds a workload by name, module or file.

A workload says what is learned: data, model, loss, quality. Device, precision, accumulation, prefetch, timing,
checkpoints and OOM are the loop's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from trainables import near_names
from trainables.knob_columns import Domain, Kind, Knob
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
        before the next is asked for. The first call of a run is broken off at the third batch by an exception: what
        two small batches took tells how many samples fit into one.
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


class ImportEnds(BaseException):
    """A script runs a study at its top level, and is read by that study as the file of its workload, up to there."""


class HookFailed(Exception):
    """A method of a workload that raised, or that returned what the loop cannot use.

    `hook` is its name, the text what it did. Where it raised, its own exception is the cause.
    """

    def __init__(self, hook: str, said: str) -> None:
        super().__init__(said)
        self.hook = hook


_FILE_PREFIX = "cardtune_workload_"
_imports = 0


def load(ref: str) -> Workload | OwnLoop:
    """Returns the workload `ref` names: one of ours ("nli"), a dotted module, or a path to a .py file.

    The module must hold a `WORKLOAD`, an instance or a class of the contract, or a function `train(run)` with a SPACE
    and OBJECTIVES. It may hold a `BEFORE`, a dict of knobs that gains are measured against. Raises WorkloadError with
    what is missing, or there and read by nobody (`near_names`). A file is imported under a name made of its stem, once
    a process.
    """
    module = _module(ref)
    found = getattr(module, "WORKLOAD", None)
    if found is None and callable(getattr(module, "train", None)):
        return load_own_loop(ref, module)
    if found is None:
        raise WorkloadError(
            f"{ref} has no module-level WORKLOAD, and no def train(run); add one, such as WORKLOAD = MyWorkload()"
        )
    workload = found() if isinstance(found, type) else found
    missing = [n for n in ("model", "dataset", "loss", "evaluate") if not callable(getattr(workload, n, None))]
    attributes = ("objectives",) if ref in BUILT_IN else ("objectives", "default_space")
    missing += [n for n in attributes if getattr(workload, n, None) is None]
    if missing:
        raise WorkloadError(f"{ref}: WORKLOAD lacks {', '.join(missing)}; the contract is in docs/workload.md")
    _check_objectives(f"{ref}: objectives", workload.objectives)
    if said := near_names.fault_of_class(workload, module):
        raise WorkloadError(f"{ref}: {said}")
    table_of(cast(Workload, workload))
    return cast(Workload, workload)


def load_own_loop(ref: str, module: Any) -> OwnLoop:
    """Returns the loop of its own in a module; raises WorkloadError for what it lacks, and for wrong knobs."""
    space, objectives = getattr(module, "SPACE", None), getattr(module, "OBJECTIVES", None)
    try:
        inspect.signature(module.train).bind(None)
    except TypeError:
        given = f"train{inspect.signature(module.train)}"
        raise WorkloadError(f"{ref} has a {given}, and needs a train(run): give that one another name") from None
    if not isinstance(space, Mapping) or not space:
        raise WorkloadError(f"{ref} has a train(run) and no SPACE; add one, such as SPACE = {{'batch_size': [16, 32]}}")
    if not isinstance(objectives, Mapping):
        raise WorkloadError(f"{ref} has a train(run) and no OBJECTIVES; add OBJECTIVES = {{'accuracy': 'max'}}")
    _check_objectives(f"{ref}: OBJECTIVES", objectives)
    if said := near_names.fault_of_loop(module):
        raise WorkloadError(f"{ref}: {said}")
    before = getattr(module, "BEFORE", None) or {}
    of_the_loop = KnobTable(hooks=REPLACING)
    # Settings of theirs that are not searched.
    space = {**space, **{name: [before[name]] for name in before if name not in space and name not in of_the_loop}}
    own = [name for name in space if name not in of_the_loop]
    try:
        knobs = {name: _own_knob(name, space[name], before) for name in own}
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{ref}: SPACE or BEFORE: {error}") from None
    searched = {name: _searched(given) if name in own else given for name, given in space.items()}
    sizes = space.get("batch_size")
    if sizes is not None and "micro_batch_size" not in space:
        searched["micro_batch_size"] = max(sizes) if isinstance(sizes, list | tuple) else _end(sizes, "high")
    rules, options = getattr(module, "BASELINES", {}), getattr(module, "OPTIONS", {})
    found = OwnLoop(module.train, objectives, searched, knobs, options, rules, str(module.__file__))
    table_of(found)
    return found


def _own_knob(name: str, given: Any, before: Mapping[str, Any]) -> Knob:
    """Returns the row of a knob that a SPACE names: of learning alone, unless it says {"kind": "both", ...}."""
    searched = _searched(given)
    values = tuple(searched) if isinstance(searched, list | tuple) else ()
    low, high = _end(searched, "low"), _end(searched, "high")
    default = before.get(name, values[0] if values else low)
    if isinstance(searched, Mapping) and "low" not in searched:
        raise ValueError(f"{name}={given!r}: give a list of values, or low and high")
    if not values and isinstance(searched, Mapping) and name not in before:
        is_whole = isinstance(low, int) and isinstance(high, int)
        middle = math.sqrt(low * high) if searched.get("log") else (low + high) / 2
        default = round(middle) if is_whole else middle
    if any(isinstance(value, float) for value in values) and not isinstance(default, str | bool):
        default = float(default)
    kind = given.get("kind", "learning") if isinstance(given, Mapping) else "learning"
    texts = tuple(dict.fromkeys((default, *values))) if isinstance(default, str) else ()
    return Knob(default, cast("Kind", kind), values=texts, shapes_model=kind == "both")


def _searched(given: Any) -> Any:
    """Returns what of a knob in a SPACE is searched: its values or its range, without its kind."""
    if not isinstance(given, Mapping):
        return given
    return given["values"] if "values" in given else {n: v for n, v in given.items() if n != "kind"}


def _end(given: Any, which: str) -> Any:
    return given.get(which) if isinstance(given, Mapping) else given


def _check_objectives(what: str, found: Mapping[str, Any]) -> None:
    if not found or any(v not in ("min", "max") for v in found.values()):
        raise WorkloadError(f"{what} must map each name to 'min' or 'max', got {dict(found)}")


def before_of(ref: str) -> Mapping[str, Scalar] | None:
    """Returns the `BEFORE` of a workload's module, knobs as they are now; None where there is none."""
    return cast("Mapping[str, Scalar] | None", getattr(_module(ref), "BEFORE", None))


def epochs_of(ref: str) -> float | None:
    """Returns the `EPOCHS` of a workload's module, how long it is trained today; None where there is no such number."""
    found = getattr(_module(ref), "EPOCHS", None)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if 0 < found < math.inf else None


def table_of(workload: Workload | OwnLoop) -> KnobTable:
    """Returns the rows of the loop's knobs and of those that the workload declares.

    Raises WorkloadError for wrong ones.
    """
    declared = getattr(workload, "knobs", {})
    if not isinstance(declared, Mapping):
        raise WorkloadError(f"knobs must be a dict of names and Knob(...), got {type(declared).__name__}")
    own = REPLACING if isinstance(workload, OwnLoop) else ()  # its optimiser and schedule are its own
    try:
        return KnobTable(declared, hooks=[n for n in REPLACING if n in own or callable(getattr(workload, n, None))])
    except ValueError as error:
        raise WorkloadError(str(error)) from None


def _module(ref: str) -> Any:
    if ref in BUILT_IN:
        return importlib.import_module(f"trainables.workloads.{ref}")
    if ref.endswith(".py"):
        path = Path(ref).resolve()
        if not path.is_file():
            raise WorkloadError(f"no workload file at {ref}")
        name = f"{_FILE_PREFIX}{path.stem}"
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise WorkloadError(f"{ref} cannot be imported as Python")
        module = importlib.util.module_from_spec(spec)
        _make_importable(path.parent)
        sys.modules[name] = module  # before exec, so that dataclasses and pickles in it resolve
        try:
            with _importing([str(path)]):
                spec.loader.exec_module(module)
        except ImportEnds:  # what stands above that line is the workload
            pass
        except SystemExit as error:
            del sys.modules[name]
            raise WorkloadError(
                f'{ref} calls sys.exit when it is imported; what is run belongs behind `if __name__ == "__main__":`'
            ) from error
        except BaseException:
            del sys.modules[name]
            raise
        return module
    try:
        with _importing(sys.argv):
            return importlib.import_module(ref)
    except ImportEnds:
        said = f'{ref} runs a study when it is imported; that belongs behind `if __name__ == "__main__":`'
        raise WorkloadError(said) from None
    except ModuleNotFoundError as error:
        if error.name is not None and ref.startswith(error.name):
            known_names = ", ".join(BUILT_IN)
            raise WorkloadError(f"no workload {ref!r}; ours are {known_names}, or give a .py file") from None
        raise


def is_importing() -> bool:
    """Returns whether a workload's module is being imported: a study that it starts there would start itself."""
    return _imports > 0


def forget_files() -> None:
    """Forgets the files that were imported, which may have changed since."""
    for name in [name for name in sys.modules if name.startswith(_FILE_PREFIX)]:
        del sys.modules[name]


@contextlib.contextmanager
def _importing(arguments: list[str]) -> Iterator[None]:
    """A file that reads a command line when it is imported finds its own, an empty one, and not ours."""
    global _imports
    ours, sys.argv = sys.argv, arguments
    _imports += 1
    try:
        yield
    finally:
        sys.argv = ours
        _imports -= 1


def _make_importable(folder: Path) -> None:
    """Lets a workload's file import what lies beside it, as under `python file.py`; the standard library goes first.

    Before installed packages, so that its own `data.py` or `evaluate.py` is meant.
    """
    if str(folder) not in sys.path:
        installed = (n for n, entry in enumerate(sys.path) if Path(entry).name in ("site-packages", "dist-packages"))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def options_of(
    config: Config, defaults: Mapping[str, Any], domains: Mapping[str, Domain], nullable: Collection[str] = ()
) -> dict[str, Any]:
    """Returns a workload's options, those not given at their defaults; None only where it is that or `nullable`.

    Raises WorkloadError for a value outside of its domain.
    """
    options = {**defaults, **config.options}
    for name, domain in domains.items():
        if options[name] is None and (defaults[name] is None or name in nullable):
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


def length_of(workload: Workload) -> Callable[[Any], int] | None:
    """Returns the workload's measure of a sample's length, or None where all are taken to be equal."""
    return cast("Callable[[Any], int] | None", getattr(workload, "length", None))


def parameter_groups(workload: Workload, model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Returns the optimiser's parameter groups: the workload's own, or one of every trainable parameter."""
    own = getattr(workload, "parameter_groups", None)
    if own is not None:
        return cast(list[dict[str, Any]], own(model, config))
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def blocks(workload: Workload, model: nn.Module) -> Sequence[nn.Module]:
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
