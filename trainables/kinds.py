"""Measures on one workload whether a system knob really leaves alone what is learned.

A batch is trained on twice, with the knob changed and unchanged: same samples, same weights, same seed, fp32. If a
gradient, or a buffer such as the running mean of batch norm, differs by more than rounding, the knob changes learning.
Dropout is off: its draws depend on the micro-batch, although their distribution does not. The learning rate is nearly
0, so that further batches meet the same weights. If other random numbers are drawn, as by mixup, the workload is first
compared with itself under another seed: a smaller difference by the knob cannot be told from noise, unless the means
over several seeds tell it. Nor is it one if a change of the weights like rounding changes as much. For the micro-batch
size, each module is also run on half of its batch, to find one that then gives other values; if `collate_fn` draws
random numbers, the halves are cut from the batch that it made.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from trainables import loader_check, loop, own_checks, own_loop, precision
from trainables.batches import size_of, tensors_of
from trainables.knobs import Scalar
from trainables.loop_ranks import taken
from trainables.own_count import OwnResident, seed_everything
from trainables.plan import Plan
from trainables.reports import READY, Event
from trainables.resident import Resident
from trainables.sanity import Few
from trainables.stopwatch import Window
from trainables.workload import Config, LoopError, WorkloadError, phases

SAMPLES, MOST_BATCHES = 8, 8
MORE_SAMPLES, QUICK_S = 64, 0.2
"""If the first samples take less than so many seconds, as many are compared, then four times as many: they show more
classes."""
GRADIENT_ROUNDING_FRAC = 1e-3
"""The largest difference of a gradient, relative to its norm, that counts as rounding."""
NOISE_TIMES = 3.0
"""A difference is due to the knob if it is more than so many times the difference between two seeds."""
SHAKEN_FRAC = 1e-5
"""Each weight is changed by about so much of itself, ten times its rounding, to see what rounding does to gradients.

Where a rectifier or a largest value is decided by rounding, one of 8 U-Net samples changed a gradient by 0.4 % when
`channels_last` did nothing else.
"""
OTHERWISE = "gives a sample other values in a batch with other samples"
NOT_A_MEAN = (
    "a batch cut in two has another gradient than in one piece. Possible causes: the loss is a sum; it averages over "
    "tokens or by class; it compares samples; the model reads padding; the loop calls backward() itself; a "
    "sampler makes other batches by micro_batch_size"
)
TIMES = "cutting a batch in two makes its gradient {:.3g} times as large: {}"
HALF = "give run.backward a mean loss, not a sum, and do not divide it by run.accumulation"
DOUBLE = (
    "the gradients of its parts are added, and not divided by their number; transformers' Trainer does so if a model "
    "takes num_items_in_batch and its loss does not: model.accepts_loss_kwargs = False"
)
COUNTS = (
    "the same samples and random numbers give another gradient in another part of a batch: your loss counts "
    "micro-batches, or keeps something from one to the next; run.batch counts batches"
)
SAME_TIMES = 1.2
"""Two is the factor of a sum; of gradients that are clipped it is less."""
BY_CLASS = "{}(weight=...) divides by the class weights of each micro-batch, so that two halves give another gradient"
COUNT_BATCHES, COUNT_S = 8, 1.5
"""Batches over which the optimiser steps of a custom loop are counted, fewer if they take longer than so many seconds.

A line such as `if i % 4 == 0` counts micro-batches: cut in two, a generator never stepped.
"""
DRAWS, LEAST_DRAWS, DRAWS_S, KEPT = 16, 6, 0.5, 4096
"""Draws of random numbers over which gradients are averaged, the fewest that show no difference, the seconds that they
may take in each of two runs, and the numbers that are kept of each gradient."""
EQUAL = 2
"""Batches before them in which all parts are the same samples and draw the same random numbers."""
DRAWN_TIMES, TOLD_FRAC = 4.0, 0.1
"""Two means differ if they do by more than so many standard errors; these are to be below that share of the mean."""
RATE_ROUNDING_FRAC = 1e-6
_SUMS = {"add", "sub", "mul", "div", "lerp", "addcmul", "radd", "rsub", "rmul", "iadd", "isub", "imul"}
FAR = 1000
"""Batches of a training whose first is compared: what goes by run.progress is the same in all parts of that batch."""
_STEADY: Mapping[str, Scalar] = {
    **{"amp_dtype": "fp32", "tf32": False, "compile": "off", "num_workers": 0, "ram_cache": False},
    **{"learning_rate": 1e-12, "weight_decay": 0.0, "max_grad_norm": 0.0, "sync_every_step": False},
}
"""The knobs that have the same value in every run of a comparison."""


@dataclass
class _Learned:
    """The result of one run: gradients by batch and parameter, and buffers."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    halved_samples: int = 0
    """The samples of a batch, if modules are also run on half of it; otherwise 0."""
    shakes: bool = False
    """Whether the weights are changed by about their rounding."""
    unlike: str = ""
    """The first module that gave the half other values than within the batch; "" for none."""
    dataset: Any = None
    """The data set of a custom loop's loader; None if it is not known."""
    worker_init: Callable[[int], None] | None = None
    """The worker_init_fn of that loader."""
    collate: Callable[[list[Any]], Any] | None = None
    """The collate_fn of that loader."""
    draws: bool = False
    """Whether lines of the loop drew random numbers for the first micro-batch, or may have."""
    kept: int | None = None
    """The numbers that are kept of each gradient; None for all."""
    loaded: list[tuple[Any, int, int]] = field(default_factory=list)
    """The micro-batches of run.batches, with their sample dimension and size."""
    weighted: str = ""
    """The loss function that had unequal weights of classes; "" for none."""
    shows_model: bool = True
    seconds: float = 0.0


def differing(
    resident: Resident | OwnResident, config: Config, changes: Mapping[str, Scalar], untold: list[str] | None = None
) -> dict[str, str]:
    """Returns the knobs of `changes` whose other value changes what is learned, with the reason in words; adds to
    `untold` the knobs for which the measurement cannot tell.

    The value of `micro_batch_size` is ignored: a batch of eight, and a larger one, is trained on whole and in halves.
    In a custom loop, only knobs that it reads are tried, on its first samples. Raises what the workload raises,
    HookFailed if a hook raised it, and WorkloadError if a custom loop does not show its model, which all knobs but
    `num_workers` need.
    """
    if isinstance(resident, OwnResident):
        if resident.workload.is_outside:
            raise WorkloadError("a command shows no gradients")
        changes = {name: value for name, value in changes.items() if name in resident.asked}
        if not changes:
            return {}
        count, most = SAMPLES, resident.pass_samples
    else:
        most = size_of(resident.dataset(config, "train"))
        count = min(SAMPLES, most) // 2 * 2
    if count < 2:
        return {}
    reasons = {}
    steady = config.with_knobs(ram_cache=False)
    uncached = resident.dataset(steady, "train") if isinstance(resident, Resident) else None
    if "ram_cache" in changes and uncached is not None and loader_check.draws(uncached, range(count)):
        reasons["ram_cache"] = "dataset[i] draws random numbers, and in RAM each sample has been drawn once and for all"
    noise, shaken, module = cast(float | None, None), cast(float | None, None), ""
    whole, base = _first(resident, config, count)
    count = base.knobs.batch_size
    workers = max(int(changes["num_workers"]), config.knobs.num_workers) if "num_workers" in changes else 0
    data = whole.dataset if uncached is None else uncached
    if workers and (why := loader_check.reads_differ(data, workers, whole.worker_init)):
        reasons["num_workers"] = why
    changes = {name: value for name, value in changes.items() if name not in ("ram_cache", *_STEADY)}
    if changes and not whole.shows_model:
        raise WorkloadError("it does not show its model: run.prepare(model, optimizer)")
    halves = base.with_knobs(micro_batch_size=count // 2)
    in_halves: _Learned | None = None
    is_drawn, given = _halves_of(whole) if "micro_batch_size" in changes else (False, [])
    if "micro_batch_size" in changes:
        try:
            why = BY_CLASS.format(whole.weighted) if whole.weighted else ""
            if isinstance(resident, OwnResident):
                why = _steps_differ(resident, base, halves, whole.seconds) or why
            in_halves = None if why else _run(resident, halves, count, given=given)
            why = _scaled(whole, in_halves) if in_halves else why
        except LoopError as error:  # the loop trains whole batches alone
            why, in_halves, halves, given = str(error), whole, base, []
        reasons |= {"micro_batch_size": why} if why else {}
        changes = {name: value for name, value in changes.items() if name not in reasons}
    if workers and isinstance(resident, OwnResident) and resident.moves:
        reasons.setdefault("num_workers", resident.moves)
    for name, value in changes.items():
        # Batches are cut in halves: in a whole batch sorting changes nothing, and other knobs change less.
        is_micro = name == "micro_batch_size"
        changed = halves if is_micro else halves.with_knobs(**{name: value})
        reference = whole
        if not is_micro:
            reference = in_halves = in_halves or _run(resident, halves, count, given=given)
        try:
            learned = in_halves if in_halves and changed == halves else _run(resident, changed, count, given=given)
        except CheckpointError:  # a recomputed block has a function with a fixed dropout rate: nothing can be told
            continue
        by, whose = _difference(reference, learned)
        if by <= GRADIENT_ROUNDING_FRAC:
            continue
        if noise is None:
            again = _run(resident, base, count, noise_seed=1, halves=True)
            noise, module = _difference(whole, again)[0], again.unlike
        if is_micro and module:
            reasons[name] = f"{module} {OTHERWISE}"
            continue
        if shaken is None:
            shaken = _shaken(resident, base, whole)
        if by <= NOISE_TIMES * shaken:
            continue
        if noise <= GRADIENT_ROUNDING_FRAC and not (is_micro and (is_drawn or whole.draws)):
            said: str | None = f"{whose} updates its buffers differently" if whose else "its gradients differ"
            said = NOT_A_MEAN if is_micro else said
        else:
            said = _settled(resident, halves, whole) if is_micro and isinstance(resident, OwnResident) else None
            if said is None and by > NOISE_TIMES * noise and not (is_micro and is_drawn):
                said = "a step differs by more than its random numbers explain"
        if said:
            reasons[name] = said
        elif said is None and untold is not None:
            untold.append(name)
    is_open = "micro_batch_size" in changes and "micro_batch_size" not in reasons and not (is_drawn or whole.draws)
    part, parts, seconds = min(MORE_SAMPLES, most) // 2 * 2, 1, whole.seconds
    while is_open and (noise or 0) <= GRADIENT_ROUNDING_FRAC and seconds < QUICK_S and count < parts * part <= most:
        large = base.with_knobs(batch_size=parts * part, micro_batch_size=part)
        one = _run(resident, large, parts * part)
        cut = large.with_knobs(micro_batch_size=part // 2)
        by = _difference(one, _run(resident, cut, parts * part, given=_halves_of(one)[1]))[0]
        if by > GRADIENT_ROUNDING_FRAC and by > NOISE_TIMES * _shaken(resident, large, one):
            return reasons | {"micro_batch_size": NOT_A_MEAN}
        parts, seconds = 4 * parts, one.seconds
    return reasons


def _first(resident: Resident | OwnResident, config: Config, count: int) -> tuple[_Learned, Config]:
    """Returns what a batch of `count` samples taught, and its configuration.

    A custom loop that cannot train on so few, as one that draws so many of each class, has a batch of its own size.
    """
    base = config.with_knobs(**_STEADY, batch_size=count, micro_batch_size=count)
    try:
        return _run(resident, base, count), base
    except Exception:  # whatever a user's code raises
        size = config.knobs.batch_size // 2 * 2
        if size <= count or isinstance(resident, Resident):
            raise
        own = base.with_knobs(batch_size=size, micro_batch_size=size)
        return _run(resident, own, size), own


def _shaken(resident: Resident | OwnResident, config: Config, learned: _Learned) -> float:
    """Returns by how much gradients differ from those in `learned` after a change of the weights like rounding."""
    return _difference(learned, _run(resident, config, config.knobs.batch_size, shakes=True))[0]


def _halves_of(whole: _Learned) -> tuple[bool, list[Any]]:
    """Returns whether the loader draws numbers by micro-batch, which it would draw anew for halves, and the halves.

    There are none if nothing is drawn so, or if the micro-batches cannot be cut.
    """
    if whole.collate is None or not loader_check.collates_anew(whole.dataset, whole.collate, SAMPLES):
        return False, []
    halves = _cut(whole)
    return not halves, halves


def _cut(whole: _Learned) -> list[Any]:
    """Returns the two halves of each micro-batch of `whole`, none if they cannot be cut or are not known."""
    halves = list[tuple[Any, bool]]()
    try:
        for batch, dim, size in whole.loaded:
            halves += [taken(batch, dim, size, part) for part in (range(size // 2), range(size // 2, size))]
    except LoopError:  # a tensor without a row for each sample
        return []
    return [half for half, is_split in halves if is_split]


def _run(
    resident: Resident | OwnResident,
    config: Config,
    count: int,
    noise_seed: int = 0,
    *,
    halves: bool = False,
    shakes: bool = False,
    given: Sequence[Any] = (),
    batches: int = 0,
) -> _Learned:
    """Returns what training on the first `count` samples learned, in every phase of the workload.

    With `halves`, modules are also run on the first half of the first batch. With `shakes`, the weights are changed by
    about their rounding. A custom loop trains on the micro-batches `given`, if there are any, and goes on with those of
    their last batch; for so many `batches` if that is not 0, all parts of a batch with the same random numbers.
    """
    kept, began = KEPT if batches else None, time.perf_counter()
    learned = _Learned(halved_samples=count if halves else 0, shakes=shakes, kept=kept)
    if isinstance(resident, OwnResident):
        _run_custom_loop(resident, config, noise_seed, learned, given, batches)
        learned.seconds = time.perf_counter() - began
        return learned
    few = Few(resident, {"train": count, "val": count})
    shares = phases(resident.workload, config)
    most = min(MOST_BATCHES, math.ceil(1 / min(shares.values())))
    state = loop.prepare(few, config, Plan(samples=count * most))
    with _recording(learned, state.model, state.optimizer, config), _Functions(learned), torch.random.fork_rng():
        torch.manual_seed(noise_seed)
        loop.train(state)
    learned.seconds = time.perf_counter() - began
    return learned


def _settled(resident: OwnResident, halves: Config, whole: _Learned) -> str | None:
    """Returns why a batch that is cut in halves teaches something else, whatever random numbers a loop draws.

    "" if it does not; None if that cannot be told. Two runs with the same numbers must teach the same by each part of a
    batch, and over several draws the mean of a whole batch must be that of its halves.
    """
    size, parts = halves.knobs.batch_size, _cut(whole)[:2]
    batches = min(EQUAL + DRAWS, resident.pass_samples // size)
    if not parts or batches < EQUAL:
        return None
    cut = _run(resident, halves, size, given=[parts[0]] * 2 * EQUAL + parts, batches=batches).gradients
    given, base = [parts[0]] * EQUAL + [whole.loaded[0][0]], halves.with_knobs(micro_batch_size=size)
    pair = _run(resident, base, size, given=given, batches=len(cut)).gradients, cut
    if _difference(*(_Learned(one[:EQUAL]) for one in pair))[0] > GRADIENT_ROUNDING_FRAC:
        return COUNTS
    batches = min(map(len, pair)) - EQUAL
    if batches < 2 or pair[0][0].keys() != pair[1][0].keys():
        return None
    rows = [torch.stack([torch.cat([g[n].double() for n in cut[0]]) for g in one[EQUAL:][:batches]]) for one in pair]
    by, mean = rows[0] - rows[1], float(rows[0].mean(dim=0).norm())
    error = DRAWN_TIMES * float((by.var(dim=0).sum() / batches).sqrt())
    if float(by.mean(dim=0).norm()) > error + GRADIENT_ROUNDING_FRAC * mean:
        return NOT_A_MEAN
    return "" if batches >= LEAST_DRAWS and error <= TOLD_FRAC * mean else None


def _steps_differ(resident: OwnResident, whole: Config, halves: Config, seconds: float) -> str:
    """Returns why a custom loop takes other optimiser steps once its batches are cut in two, "" if it does not.

    `seconds` is what one batch took, its start included.
    """
    size = whole.knobs.batch_size
    batches = min(COUNT_BATCHES, int(COUNT_S / max(seconds, 1e-3)), resident.pass_samples // size)
    if batches < 2:
        return ""
    (one, rates), (two, more_rates) = (_counts(resident, config, batches * size) for config in (whole, halves))
    for name in {*one, *two} - {""}:
        if one[name] != two[name]:
            return (
                f"{name} stepped {one[name]} times in {batches} batches, and {two[name]} times with each batch cut in "
                "two. Does the loop count to decide when to step (i % 4)? Its turns are parts of batches then; "
                "run.batch is the number of the batch"
            )
    if any(abs(a - b) > RATE_ROUNDING_FRAC * abs(a) for a, b in zip(rates, more_rates, strict=False)):
        return (
            f"the learning rates of {batches} batches change if each batch is cut in two: your loop counts "
            "micro-batches, as len(loader) does; make the scheduler for run.steps and give it to run.prepare, which "
            "steps it once a batch"
        )
    if one[""] != two[""]:
        return (
            "your loop averages or changes weights by lines of its own, more often if each batch is cut in two: do so "
            "only if run.backward(...) returned true"
        )
    return ""


def _counts(resident: OwnResident, config: Config, samples: int) -> tuple[Counter[str], Sequence[float]]:
    """Returns a custom loop's steps on its first samples by optimiser, by "" its sums of weights, and the rates."""
    counts, rates = Counter[str](), list[float]()

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sizes = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        counts[f"the {type(optimizer).__name__} of {sizes:,} weights"] += 1
        rates.extend(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)

    def add(func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Counts a sum or a product with weights that is in no forward pass, and that none of them learns from."""
        name = getattr(func, "__name__", "").removeprefix("_foreach").strip("_")
        if name in _SUMS and not (torch.is_grad_enabled() and getattr(result, "requires_grad", False)):
            weights = {p.data_ptr() for p in nn.ModuleList(state.prepared).parameters() if type(p) is nn.Parameter}
            if any(t.layout is torch.strided and t.data_ptr() in weights for t in tensors_of(args)):
                counts[""] += all(frame.f_code.co_name != "forward" for frame, _ in traceback.walk_stack(None))

    moving = cast(loader_check.Moving | None, None)

    def heard(event: Event) -> None:
        nonlocal moving
        moving = loader_check.Moving(state.dataset, state.collate) if event == READY else moving

    state = own_loop.prepare(resident, config, Plan(samples=samples))
    with register_optimizer_step_post_hook(count), own_checks.Calls(add), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a scheduler that steps before its optimiser
        own_loop.train(state, heard)
    if moving is not None:
        resident.moves = resident.moves or moving.matters(samples, resident.pass_samples)
    return counts, rates


def _run_custom_loop(
    resident: OwnResident, config: Config, noise_seed: int, learned: _Learned, given: Sequence[Any], batches: int
) -> None:
    """Adds what a custom loop's first batch taught, or `batches`; `noise_seed` is set after the batch was drawn."""
    plan = Plan(samples=(batches or FAR) * config.knobs.batch_size, window_s=0.0)
    state = own_loop.prepare(resident, config, plan)
    # Without it, numbers drawn after the batch, as for augmentation, would depend on the micro-batch.
    state.noise_seed = noise_seed or None

    before, parts, until = "", config.knobs.batch_size // config.knobs.micro_batch_size, math.inf

    def hand(*micro: Any) -> Any:
        nonlocal before, until
        number = len(learned.loaded)
        learned.loaded.append(micro if number < parts else (None, 0, 0))
        if batches:
            seed_everything(number // parts)
        before = before or loader_check.seeds()
        if number == parts:  # the first batch is watched, and slow
            until = time.perf_counter() + DRAWS_S
        again = number if number < len(given) else len(given) - parts + (number - len(given)) % parts
        return given[again] if given else micro[0]

    def heard(event: Event) -> bool:
        if event == READY:
            learned.dataset, learned.worker_init, learned.collate = state.dataset, state.worker_init, state.collate
            if state.model is None or state.optimizer is None:
                learned.shows_model = False
            else:
                stack.enter_context(_recording(learned, state.model, state.optimizer, config))
        has_stepped = isinstance(event, Window)
        learned.draws |= has_stepped and not batches and before not in ("", loader_check.seeds())
        return not learned.shows_model or (has_stepped and (not batches or time.perf_counter() > until))

    state.hand = hand
    with _Functions(learned), contextlib.ExitStack() as stack:
        own_loop.train(state, heard)


@contextlib.contextmanager
def _recording(learned: _Learned, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> Iterator[None]:
    """Records what is learned inside the block, with deterministic kernels and without dropout in modules."""
    names = {id(p): name for name, p in model.named_parameters()}

    def record_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        few = {names.get(id(p), "?"): cast(Tensor, p.grad).detach().flatten()[: learned.kept] for p in trained}
        learned.gradients.append({name: grad.to("cpu", copy=True) for name, grad in few.items()})

    with contextlib.ExitStack() as stack:
        # After the step: a framework may give `step` a closure that computes the gradients.
        stack.callback(optimizer.register_step_post_hook(record_gradients).remove)
        for name, module in model.named_modules() if learned.halved_samples else ():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(_halving_hook(learned, _label(name, module))).remove)
        stack.enter_context(_without_dropout(model))
        if learned.shakes:
            _shake(model)
        if config.device.startswith("cuda"):
            cudnn = torch.backends.cudnn
            stack.enter_context(precision.tf32_kept(matmul=False, convolutions=False))
            stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
            cudnn.deterministic = True
        yield
    for name, module in model.named_modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                learned.buffers[_label(name, module), buffer_name] = buffer.detach().to("cpu", copy=True)


def _shake(model: nn.Module) -> None:
    """Changes each weight by `SHAKEN_FRAC` of itself, times a normal number."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and not isinstance(p, UninitializedParameter):
                p.addcmul_(p, torch.randn(p.shape, generator=generator).to(p), value=SHAKEN_FRAC)


def _label(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def _halving_hook(learned: _Learned, label: str) -> Callable[..., None]:
    """Returns a forward hook that records the label of the first module that gives half of a batch other values."""

    def test_half(module: nn.Module, inputs: Any, output: Any) -> None:
        if not learned.gradients and not learned.unlike and _depends_on_batch(module, inputs, learned.halved_samples):
            learned.unlike = label

    return test_half


def _depends_on_batch(module: nn.Module, inputs: tuple[Any, ...], count: int) -> bool:
    """Returns whether a module gives the first half of its batch other values alone; False if that cannot be told.

    Copies of the module are run, so that its state and its inputs stay unchanged.
    """
    if not inputs or not all(isinstance(x, Tensor) and x.dim() and len(x) == len(inputs[0]) for x in inputs):
        return False
    rows, rest = divmod(len(inputs[0]), count)  # rows of one sample
    if rest or not rows:
        return False
    half, whole = count // 2 * rows, count * rows
    cuda = [inputs[0].device] if inputs[0].is_cuda else []

    def values_of_half(size: int) -> Tensor:
        output: Tensor = type(module).forward(copy.deepcopy(module), *(x.detach()[:size].clone() for x in inputs))
        return output.detach()[:half].to("cpu", torch.float32)

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            alone, again, in_batch = values_of_half(half), values_of_half(half), values_of_half(whole)
        draws = _is_unlike(alone, again)
        return not draws and alone.shape == in_batch.shape and len(alone) == half and _is_unlike(alone, in_batch)
    except Exception:  # whatever a module raises that is called in another way than it was made for
        return False


def _scaled(whole: _Learned, halves: _Learned) -> str:
    """Returns why the first gradients of a batch cut in two are multiples of those of the whole; "" if not."""
    if not whole.gradients or not halves.gradients or whole.gradients[0].keys() != halves.gradients[0].keys():
        return ""
    pairs = [(a.double(), halves.gradients[0][name].double()) for name, a in whole.gradients[0].items()]
    if any(a.shape != b.shape for a, b in pairs) or not (norm := sum(float(a.square().sum()) for a, _ in pairs)):
        return ""
    times = sum(float(a.mul(b).sum()) for a, b in pairs) / norm
    if SAME_TIMES > times > 1 / SAME_TIMES or any(_is_unlike(times * a, b) for a, b in pairs):
        return ""
    return TIMES.format(times, HALF if times < 1 else DOUBLE)


def _is_unlike(a: Tensor, b: Tensor) -> bool:
    scale = float(a.double().norm())
    return float((a.double() - b.double()).norm()) > GRADIENT_ROUNDING_FRAC * scale + 1e-12


def _difference(reference: _Learned, other: _Learned) -> tuple[float, str]:
    """Returns the largest relative difference of a gradient or buffer, and the buffer's module, "" for a gradient."""
    worst, whose = 0.0, ""
    steps = zip(reference.gradients, other.gradients, strict=False)
    pairs: list[tuple[Mapping[Any, Tensor], Mapping[Any, Tensor]]] = [*steps, (reference.buffers, other.buffers)]
    for a, b in pairs:
        if a.keys() != b.keys():
            return math.inf, ""
        # A gradient that is 0 but for rounding, such as that of a bias before a norm, is compared with all gradients.
        whole = math.sqrt(sum(float(t.double().square().sum()) for t in a.values()))
        for key, tensor in a.items():
            if tensor.shape != b[key].shape:
                return math.inf, ""
            by = float((tensor.double() - b[key].double()).norm())
            norm = float(tensor.double().norm()) + 1e-3 * whole
            if by > worst * norm and math.isfinite(by) and norm > 0:
                worst, whose = by / norm, key[0] if a is reference.buffers else ""
    return worst, whose


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Sets the dropout rates of modules to 0 inside the block; `_Functions` does so for calls of functions."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name, value in list(vars(module).items()):
                is_rate = "dropout" in name or (name == "p" and isinstance(module, _DropoutNd))
                if is_rate and isinstance(value, float):
                    stack.callback(setattr, module, name, value)
                    setattr(module, name, 0.0)
        yield


class _Functions(TorchFunctionMode):
    """Turns off dropout functions, and the dropout inside of attention; records losses that weight classes."""

    def __init__(self, learned: _Learned) -> None:
        super().__init__()
        self._learned = learned

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns its input for a dropout function, and the normal result for any other function."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name.rstrip("123d_").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        if name in ("cross_entropy", "nll_loss") and kwargs.get("reduction", "mean") == "mean":
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and float(weight.min()) != float(weight.max()):
                self._learned.weighted = name
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
