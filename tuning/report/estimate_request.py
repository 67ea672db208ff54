"""The question to `python -m tuning estimate`: from a configuration to memory groups, sizes and a card."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from trainables.knob_columns import refusal
from trainables.knobs import KnobTable, Scalar
from tuning.config.cards import Card
from tuning.config.complete import on_card, with_cuda_knobs
from tuning.config.resolve import COMMAND_LINE
from tuning.config.schema import StudyConfig, WorkloadSection
from tuning.config.space import Choice, Range, Space
from tuning.memory.fitting import Kernels
from tuning.workers import doctor
from tuning.workers.nvml import Gpu

AXES = ("amp_dtype", "activation_checkpointing", "adapter", "base_dtype")
"""The knobs of the table's rows, beside the micro-batch size; an adapter where the workload has it, and the
type of frozen weights where several are asked for."""

MOST_SIZES = 6
CAPABILITY = (8, 6)
"""Taken for a card that does not say its own."""


@dataclass(frozen=True)
class Question:
    """The question: the workload with `knobs`, at each of `couplings`, for `micro_batches` on a card.

    `read` are the knobs the workload reads, `searched` those of several values with the ones left out, `typed` those of
    `couplings` whose values the command line names, `card_typed` what it says of the card beside its name. `table` has
    the knobs.
    """

    workload: WorkloadSection
    knobs: Mapping[str, Scalar]
    couplings: tuple[Mapping[str, Scalar], ...]
    micro_batches: tuple[int, ...]
    card: Card
    kernels: Kernels
    read: tuple[str, ...]
    searched: Mapping[str, tuple[Scalar, ...]]
    table: KnobTable
    typed: tuple[str, ...] = ()
    card_typed: str = ""


def question(config: StudyConfig, gpus: Sequence[Gpu]) -> Question:
    """Returns what a configuration asks of a card, which may not be among `gpus`, or of this machine's CPU."""
    card = card_of(config.card, gpus)
    kernels: Kernels = "cpu" if card.device == "cpu" or (card.device == "auto" and not gpus) else "cuda"
    config = on_card(with_cuda_knobs(config) if kernels == "cuda" else config, card)
    base, searched = _representative(config.space)
    read = tuple(sorted({*config.space.parameters, *config.space.fixed}))
    several = config.space.parameters.keys()
    left_out = {"adapter"} - set(read) | {"base_dtype"} - several
    axes = {name: _axis(config, card, name) for name in AXES if name not in left_out}
    couplings = tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return Question(
        workload=config.workload,
        knobs={n: v for n, v in base.items() if n not in axes},
        couplings=couplings,
        micro_batches=_sizes(config.space.settled(1).given("micro_batch_size")),  # whatever the cores
        card=replace(card, capability=card.capability or CAPABILITY),
        kernels=kernels,
        read=read,
        searched={n: values for n, values in searched.items() if n not in axes},
        table=config.space.table,
        typed=tuple(name for name in axes if _is_typed(config, f"knobs.{name}")),
        card_typed=" ".join(item for item in config.overrides if item.startswith("card.")),
    )


def card_of(card: Card, gpus: Sequence[Gpu]) -> Card:
    """Returns the card that "auto" stands for, with what a study would leave free as its reserve.

    It is the card here with the least free memory, held to the requested memory. More memory, or any without a card
    here, is that of a card that is not listed: a context is taken off it.
    """
    if card.name != "auto" or card.device == "cpu":
        return card
    here, asked = min(gpus, key=doctor.free_bytes, default=None), card.memory_bytes
    if here is None or here.memory_bytes < doctor.SAME_CARD_FRAC * (asked or 0):
        return card if asked is None else replace(card.unlisted(), name=card.name, device="cuda")
    name, memory_bytes = (here.name, here.memory_bytes) if asked is None else (card.name, asked)
    reserve_bytes = max(card.reserve_bytes, memory_bytes - doctor.free_bytes(here))
    return Card(name, memory_bytes, reserve_bytes, card.capability or here.capability, card.dtypes, "cuda")


def _representative(space: Space) -> tuple[dict[str, Scalar], dict[str, tuple[Scalar, ...]]]:
    """Returns one value for each knob, the largest or else the first of those searched, and the others by name."""
    chosen: dict[str, Scalar] = {}
    others: dict[str, tuple[Scalar, ...]] = {}
    for name, row in space.table.items():
        given = space.given(name)
        if row.memory == "none" or name == "micro_batch_size":
            chosen[name] = row.default
        elif isinstance(given, Range):
            chosen[name] = row.domain.check(given.high)
        elif isinstance(given, Choice):
            numbers = [v for v in given.values if isinstance(v, int | float) and not isinstance(v, bool)]
            chosen[name] = max(numbers) if numbers else given.values[0]
            others[name] = tuple(v for v in given.values if v != chosen[name])
        else:
            chosen[name] = given
    return chosen, others


def _axis(config: StudyConfig, card: Card, name: str) -> tuple[Scalar, ...]:
    """Returns the values of a row's knob: those typed, else those searched, and without either every one of use."""
    given = config.space.given(name)
    values = given.values if isinstance(given, Choice) else (given,) if not isinstance(given, Range) else ()
    if not _is_typed(config, f"knobs.{name}"):
        if name == "amp_dtype":
            values = tuple(dict.fromkeys([*values, *(v for v in ("fp32", "bf16") if v in card.dtypes)]))
            values = tuple(v for v in values if v != "fp16" or "bf16" not in values)  # it takes as many bytes
        elif name == "activation_checkpointing":
            values = (False, True)
    honoured = tuple(v for v in values if refusal(config.space.table[name], v, card) is None)
    return honoured or values


def _is_typed(config: StudyConfig, setting: str) -> bool:
    return config.origins.get(setting) == COMMAND_LINE


def _sizes(given: object) -> tuple[int, ...]:
    """Returns the micro-batch sizes to show, at most `MOST_SIZES` of them."""
    if isinstance(given, Choice):
        sizes = sorted({v for v in given.values if isinstance(v, int)})
    elif isinstance(given, Range):
        sizes = [2**k for k in range(17) if given.low <= 2**k <= given.high] or [int(given.high)]
    else:
        return (cast(int, given),)
    step = -(-len(sizes) // MOST_SIZES)
    return tuple(sizes[::-1][::step][::-1])
