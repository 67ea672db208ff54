"""Whether a knob that is said to change speed alone leaves alone what is learned: measured on one workload.

One batch is trained on twice, with the knob changed and without: same samples, same weights, same seed, fp32. What then
differs by more than rounding in a gradient, or in a buffer such as the running mean of batch norm, is learned
otherwise. Dropout is off, as its draws depend on the micro-batch and their distribution does not; so is the rate, so
that further batches meet the same weights. What draws random numbers elsewhere, as mixup does, is compared with itself
under another seed first: what the knob changes by no more than that cannot be told. Of the micro-batch each module is
then asked by itself whether it gives half of its batch the same values alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError
from torch.utils.data import IterableDataset

from trainables import loop, own_loop, precision
from trainables.batches import size_of, tensors_of
from trainables.knobs import Scalar
from trainables.own_loop import OwnResident
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.sanity import Few
from trainables.workload import Config, WorkloadError, phases

SAMPLES, MOST_BATCHES = 8, 8
GRADIENT_ROUNDING_FRAC = 1e-3
"""The largest difference of a gradient, relative to its norm, that is taken for rounding."""
NOISE_TIMES = 3.0
"""So many times the difference between two seeds says that a difference is the knob's."""
OTHERWISE = "gives a sample other values beside other samples"
STREAM = (
    "the data set is a stream, which every loader process reads by itself: all of it, where it has no shards by "
    "get_worker_info()"
)
NOT_A_MEAN = (
    "the loss of a batch is not the mean of its samples' losses: it may be a sum, compare samples, or average over "
    "tokens; the model may read padding; or a sampler makes other batches by micro_batch_size"
)
_STEADY: Mapping[str, Scalar] = {
    **{"amp_dtype": "fp32", "tf32": False, "compile": "off", "num_workers": 0, "ram_cache": False},
    **{"learning_rate": 1e-12, "weight_decay": 0.0, "max_grad_norm": 0.0, "sync_every_step": False},
}
"""What every run of a comparison has."""


@dataclass
class _Seen:
    """What a run learned: gradients by batch and parameter, and buffers."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    asks: int = 0
    """The samples of a batch of which modules are asked for half, too; 0 where they are not."""
    unlike: str = ""
    """The first that gave it other values than as a part of the batch."""
    is_stream: bool = False
    """Whether its data set yields samples in an order of its own."""
    shows_model: bool = True


def differing(
    resident: Resident | OwnResident, config: Config, changes: Mapping[str, Scalar], untold: list[str] | None = None
) -> dict[str, str]:
    """Returns the knobs of `changes` whose other value changes what is learned, each with the reason in words; adds to
    `untold` those of which it cannot be told.

    Of `micro_batch_size` the value does not count: a batch of eight is trained on whole and in halves. A loop of one's
    own is tried with the knobs that it asks for, on its first eight samples. Raises what the workload raises,
    HookFailed where a hook does, and WorkloadError where a loop of one's own does not show its model, which all but
    `num_workers` needs.
    """
    if isinstance(resident, OwnResident):
        changes, count = {name: value for name, value in changes.items() if name in resident.asked}, SAMPLES
        if not changes:
            return {}
    else:
        count = min(SAMPLES, size_of(resident.dataset(config, "train")))
    count -= count % 2
    if count < 2:
        return {}
    base = config.with_knobs(**_STEADY, batch_size=count, micro_batch_size=count)
    found = {}
    if "ram_cache" in changes and isinstance(resident, Resident) and _draws(resident, config, count):
        found["ram_cache"] = "dataset[i] draws random numbers, and in RAM each sample has been drawn once and for all"
    noise, module = cast(float | None, None), ""
    whole = _run(resident, base, count)
    if whole.is_stream and int(changes.get("num_workers", 0)) > 1:
        found["num_workers"] = STREAM
    changes = {name: value for name, value in changes.items() if name not in ("ram_cache", *_STEADY)}
    if changes and not whole.shows_model:
        raise WorkloadError("it does not show its model: run.prepare(model, optimizer)")
    halves = base.with_knobs(micro_batch_size=count // 2)
    in_halves: _Seen | None = None
    for name, value in changes.items():
        # In halves, since sorting changes nothing in a whole batch, and less is made there of what a knob changes.
        changed = halves if name == "micro_batch_size" else halves.with_knobs(**{name: value})
        reference = whole
        if name != "micro_batch_size":
            reference = in_halves = in_halves or _run(resident, halves, count)
        try:
            seen = _run(resident, changed, count)
        except CheckpointError:  # a rate written into a function of a block that is computed again: not to be told
            continue
        by, whose = _difference(reference, seen)
        if by <= GRADIENT_ROUNDING_FRAC:
            continue
        if noise is None:
            again = _run(resident, base, count, noise_seed=1, halves=True)
            noise, module = _difference(whole, again)[0], again.unlike
        if name == "micro_batch_size" and module:
            found[name] = f"{module} {OTHERWISE}"
        elif noise <= GRADIENT_ROUNDING_FRAC:
            found[name] = _because(name, whose)
        elif by > NOISE_TIMES * noise:
            found[name] = "a step comes out otherwise by more than its random numbers make of it"
        elif untold is not None:
            untold.append(name)
    return found


def _run(
    resident: Resident | OwnResident, config: Config, count: int, noise_seed: int = 0, *, halves: bool = False
) -> _Seen:
    """Returns what training on the same few samples learned, in every phase of the workload.

    With `halves` modules are asked for the first half of the first batch once more.
    """
    seen = _Seen(asks=count if halves else 0)
    if isinstance(resident, OwnResident):
        return _run_own(resident, config, count, noise_seed, seen)
    few = Few(resident, {"train": count, "val": count})
    shares = phases(resident.workload, config)
    batches = min(MOST_BATCHES, math.ceil(1 / min(shares.values())))
    state = loop.prepare(few, config, Plan(samples=count * batches))
    with _watching(seen, state.model, state.optimizer, config), _NoDropout(), torch.random.fork_rng():
        torch.manual_seed(noise_seed)
        for _ in loop.train(state):
            pass
    return seen


def _run_own(resident: OwnResident, config: Config, count: int, noise_seed: int, seen: _Seen) -> _Seen:
    """Returns what the first batch of a loop of one's own learned; `noise_seed` is set where it has drawn the batch."""
    state = own_loop.prepare(resident, config, Plan(samples=count), within=_NoDropout())
    # Else what is drawn behind it, as augmentations are, would differ by the cut.
    state.noise_seed = noise_seed or None
    seen.is_stream = isinstance(state.dataset, IterableDataset)
    with contextlib.closing(own_loop.train(state)) as events, contextlib.ExitStack() as stack:
        if state.model is None or state.optimizer is None:
            next(events)  # a generator that has begun can be closed
            seen.shows_model = False
            return seen
        stack.enter_context(_watching(seen, state.model, state.optimizer, config))
        for _ in events:
            pass
    return seen


@contextlib.contextmanager
def _watching(seen: _Seen, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> Iterator[None]:
    """Keeps what is learned inside the block, by the same kernels each time and without dropout in recurrent nets."""
    names = {id(p): name for name, p in model.named_parameters()}

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        seen.gradients.append({names.get(id(p), "?"): p.grad.detach().to("cpu", copy=True) for p in own})

    with contextlib.ExitStack() as stack:
        # Behind the step: a framework may hand it a closure, in which the gradients come about.
        stack.callback(optimizer.register_step_post_hook(stepped).remove)
        for name, module in model.named_modules() if seen.asks else ():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(_told(seen, _label(name, module))).remove)
        stack.enter_context(_without_dropout(model))
        if config.device.startswith("cuda"):
            cudnn = torch.backends.cudnn
            stack.enter_context(precision.tf32_kept(matmul=False, convolutions=False))
            stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
            cudnn.deterministic = True
        yield
    for name, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                seen.buffers[_label(name, module), own] = buffer.detach().to("cpu", copy=True)


def _label(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def _told(seen: _Seen, label: str) -> Callable[..., None]:
    """Returns the hook that keeps the label of the first module which gives half of the first batch other values."""

    def called(module: nn.Module, asked: Any, given: Any) -> None:
        if not seen.gradients and not seen.unlike and _is_other_alone(module, asked, seen.asks):
            seen.unlike = label

    return called


def _is_other_alone(module: nn.Module, asked: tuple[Any, ...], count: int) -> bool:
    """Returns whether a module gives the first half of its batch other values alone; False where that is not told.

    Copies of it are asked, so that neither what it keeps nor what it changes in place is touched.
    """
    if not asked or not all(isinstance(one, Tensor) and one.dim() and len(one) == len(asked[0]) for one in asked):
        return False
    rows, rest = divmod(len(asked[0]), count)  # of one sample
    if rest or not rows:
        return False
    half, whole = count // 2 * rows, count * rows
    cuda = [asked[0].device] if asked[0].is_cuda else []

    def given(size: int) -> Tensor:
        own = copy.deepcopy(module)
        found: Tensor = type(module).forward(own, *(one.detach()[:size].clone() for one in asked))
        return found.detach()[:half].to("cpu", torch.float32)

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            alone, again, beside = given(half), given(half), given(whole)
        draws = _is_unlike(alone, again)
        return not draws and alone.shape == beside.shape and len(alone) == half and _is_unlike(alone, beside)
    except Exception:  # whatever a module raises that is called otherwise than it was made for
        return False


def _is_unlike(one: Tensor, other: Tensor) -> bool:
    scale = float(one.double().norm())
    return float((one.double() - other.double()).norm()) > GRADIENT_ROUNDING_FRAC * scale + 1e-12


def _difference(one: _Seen, other: _Seen) -> tuple[float, str]:
    """Returns the largest relative difference of a gradient or a buffer, and whose buffer it is, "" for a gradient."""
    worst, whose = 0.0, ""
    steps = zip(one.gradients, other.gradients, strict=False)
    pairs: list[tuple[Mapping[Any, Tensor], Mapping[Any, Tensor]]] = [*steps, (one.buffers, other.buffers)]
    for a, b in pairs:
        if a.keys() != b.keys():
            return math.inf, ""
        # Gradients that are 0 but for rounding, such as those of a bias before a norm, are held to the whole.
        whole = math.sqrt(sum(float(t.double().square().sum()) for t in a.values()))
        for key, tensor in a.items():
            if tensor.shape != b[key].shape:
                return math.inf, ""
            by = float((tensor.double() - b[key].double()).norm())
            norm = float(tensor.double().norm()) + 1e-3 * whole
            if by > worst * norm and math.isfinite(by) and norm > 0:
                worst, whose = by / norm, key[0] if a is one.buffers else ""
    return worst, whose


def _because(name: str, whose: str) -> str:
    """Returns why a knob changes what is learned where no module is the reason; `whose` buffer differs, "" for none."""
    if name == "micro_batch_size":
        return NOT_A_MEAN
    return f"{whose} updates its buffers otherwise" if whose else "its gradients come out otherwise"


def _draws(resident: Resident, config: Config, count: int) -> bool:
    """Returns whether a sample read twice under other seeds is another."""
    dataset = resident.dataset(config.with_knobs(ram_cache=False), "train")
    state = random.getstate()
    reads = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            reads.append([tensors_of(dataset[i]) for i in range(count)])
    random.setstate(state)
    pairs = [(a, b) for one, other in zip(*reads, strict=True) for a, b in zip(one, other, strict=False)]
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside the block the rates of modules are 0; `_NoDropout` is for functions with rates of their own."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name, value in list(vars(module).items()):
                is_rate = "dropout" in name or (name == "p" and isinstance(module, _DropoutNd))
                if is_rate and isinstance(value, float):
                    stack.callback(setattr, module, name, value)
                    setattr(module, name, 0.0)
        yield


class _NoDropout(TorchFunctionMode):
    """Takes dropouts, and those inside of attention, for nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns the input of a dropout, and what every other function returns."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name.rstrip("123d_").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
