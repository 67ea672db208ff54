"""What would make a step fit that does not: levers in order of their cost, each with the bytes it leads to.

A lever that is a knob is predicted with that knob changed. One that is code is worked out on the trace: cross-entropy
in chunks holds an eighth of the logits' log-softmax and of its gradient at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from trainables.knobs import Knobs, Scalar
from tuning.memory.fitting import Kernels, Verdict, needed_bytes, verdict
from tuning.memory.peaks import peak_of
from tuning.memory.prediction import Prediction
from tuning.memory.trace import Trace

Predict = Callable[[Mapping[str, Scalar]], Prediction]
"""Knobs -> prediction; asked again for the same knobs, it should be quick to answer."""

CHUNKS = 8
LEAST_SAVING_FRAC = 0.01
"""A lever that saves less than a hundredth is not named."""


@dataclass(frozen=True)
class Lever:
    """One change, or several together: the knobs to set, what it costs, and what the step then needs.

    `needed_bytes` is None where it cannot be predicted. `of_code` marks what no knob does.
    """

    name: str
    knobs: Mapping[str, Scalar]
    cost: str
    needed_bytes: int | None
    verdict: Verdict
    of_code: bool = False


@dataclass(frozen=True)
class Asked:
    """What is to fit: knobs and micro-batch on a card, and the knobs that the workload reads."""

    knobs: Mapping[str, Scalar]
    micro_batch: int
    usable_bytes: int
    kernels: Kernels
    read: Collection[str]


def levers(asked: Asked, predict: Predict) -> list[Lever]:
    """Returns what helps, the cheapest first, and at the end what it takes together, where none is enough alone.

    Levers that save nothing here are left out; after the first that is enough alone, dearer ones are not tried.
    """
    start = _needed(asked, predict(asked.knobs), asked.micro_batch)
    if start is None:
        return []
    found: list[Lever] = []
    for lever in _single(asked, predict, start):
        found.append(lever)
        if lever.verdict == "fits":
            return found
    together = _together(asked, predict, [lever for lever in found if not lever.of_code and lever.knobs])
    return [*found, together] if together is not None else found


def _single(asked: Asked, predict: Predict, start: int) -> Iterator[Lever]:
    """Yields the levers that save something, from those that cost nothing to those that change what is learned."""

    def tried(name: str, cost: str, micro_batch: int = asked.micro_batch, **changes: Scalar) -> Iterator[Lever]:
        needed = _needed(asked, predict({**asked.knobs, **changes}), micro_batch)
        knobs = changes if micro_batch == asked.micro_batch else {"micro_batch_size": micro_batch}
        if needed is None:
            yield Lever(name, knobs, cost, None, "")
        elif needed < start * (1 - LEAST_SAVING_FRAC):
            yield Lever(name, knobs, cost, needed, _verdict(asked, predict, needed))

    own = Knobs.of(asked.knobs)
    if not own.set_to_none:
        yield from tried("gradients dropped after a step", "nothing", set_to_none=True)
    if not own.fused_optimizer and own.optimizer == "adamw":
        yield from tried("fused AdamW", "nothing, and it is faster", fused_optimizer=True)
    if asked.micro_batch > 1:
        smaller = _smaller(asked, predict)
        yield from tried(f"micro-batch of {smaller}", "speed; the batch stays what it is", smaller)
    yield from _chunked(asked, predict, start)
    if not own.activation_checkpointing:
        yield from tried("activation checkpointing", "about a third more compute", activation_checkpointing=True)
    if own.amp_dtype == "fp32":
        yield from tried("bf16 autocast", "some precision; faster where the card has bf16", amp_dtype="bf16")
    if own.optimizer == "adamw":
        cost = "moments of 8 bits; needs bitsandbytes"
        yield from tried("AdamW of 8 bits", cost, optimizer="adamw8bit", fused_optimizer=False)
    if "adapter" in asked.read:
        for kind in {"none": ("dora", "lora"), "dora": ("lora",), "lora": ()}[own.adapter]:
            yield from tried(f"{kind} adapters", "fewer weights are trained", adapter=kind)
    if "hidden_size" in asked.read:
        for width in (own.hidden_size // 2, own.hidden_size // 4):
            if width >= 4:
                yield from tried(f"width of {width}", "a smaller model", hidden_size=width)


def _together(asked: Asked, predict: Predict, single: list[Lever]) -> Lever | None:
    """Returns the shortest row of knobs, from the cheapest on, that is enough; where none is, all that can be had."""
    changes: dict[str, Scalar] = {}
    names: list[str] = []
    best: Lever | None = None
    for lever in single:
        changes = {**changes, **lever.knobs}
        if changes.get("optimizer") == "adamw8bit":
            changes["fused_optimizer"] = False
        names.append(lever.name)
        micro_batch = int(changes.get("micro_batch_size", asked.micro_batch))
        needed = _needed(asked, predict({**asked.knobs, **_without_size(changes)}), micro_batch)
        if len(names) == 1 or needed is None:
            continue
        best = Lever(" + ".join(names), dict(changes), "all of these", needed, _verdict(asked, predict, needed))
        if best.verdict == "fits":
            break
    return best


def chunked_cross_entropy(trace: Trace, chunks: int = CHUNKS) -> Trace:
    """Returns the trace with cross-entropy computed over its tokens in `chunks` parts, one after the other.

    What the log-softmax and its backward pass bring into being is then there for a part of the tokens at a time.
    """
    births = iter(trace.ops)
    events = tuple(
        (ident, -(-size // chunks)) if size >= 0 and "log_softmax" in next(births, "") else (ident, size)
        for ident, size in trace.events
    )
    return replace(trace, events=events)


def _chunked(asked: Asked, predict: Predict, start: int) -> Iterator[Lever]:
    trace = predict(asked.knobs).trace(asked.micro_batch)
    if trace is None or not any("log_softmax" in op for op in trace.ops):
        return
    needed = needed_bytes(peak_of(chunked_cross_entropy(trace)), asked.kernels)
    if needed < start * (1 - LEAST_SAVING_FRAC):
        name, cost = f"cross-entropy in {CHUNKS} chunks", "a change of the loss's code, not of its value"
        yield Lever(name, {}, cost, needed, _verdict(asked, predict, needed), of_code=True)


def _smaller(asked: Asked, predict: Predict) -> int:
    """Returns the largest halving of the micro-batch that fits, 1 where none does."""
    size = asked.micro_batch // 2
    while size > 1:
        needed = _needed(asked, predict(asked.knobs), size)
        if needed is None or _verdict(asked, predict, needed) == "fits":
            break
        size //= 2
    return max(1, size)


def _needed(asked: Asked, prediction: Prediction, micro_batch: int) -> int | None:
    peak = prediction.peak(micro_batch)
    return None if peak is None else needed_bytes(peak, asked.kernels)


def _verdict(asked: Asked, predict: Predict, needed: int) -> Verdict:
    return verdict(needed, asked.usable_bytes, predict(asked.knobs).confidence)


def _without_size(knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in knobs.items() if name != "micro_batch_size"}
