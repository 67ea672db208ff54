"""`estimate timm:NAME` and `estimate hf:FOLDER`: a model that has no workload, and one setting that is looked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainables.knobs import KnobTable, Scalar
from trainables.our_knobs import FINE_TUNED
from tuning.config import command_line
from tuning.config.cards import Card, restrict
from tuning.config.choices import available
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.config.schema import WorkloadSection
from tuning.config.space import Choice, Space, values_of
from tuning.memory.fitting import Fit, fit
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request
from tuning.report.estimate_request import CAPABILITY, Question, card_of
from tuning.report.format import percent
from tuning.workers.nvml import Gpu

SOURCES: Mapping[str, tuple[str, KnobTable, tuple[str, ...]]] = {
    "timm": ("trainables.workloads.of_timm", KnobTable(), ()),
    "hf": ("trainables.workloads.of_transformers", KnobTable(FINE_TUNED), ("max_length", "targets")),
}
"""By what is before the colon: the workload that makes the model, its knobs, and its options."""
SHORT = {"dtype": "amp_dtype", "checkpointing": "activation_checkpointing"}
"""Settings that are shorter than their knobs."""
SHOWN = {"micro_batch_size": "batch_size"}
"""A batch is one micro-step here."""
ROWS = ("amp_dtype", "activation_checkpointing", "adapter", "base_dtype")
UNKNOWN = ("batch_size", "max_length", "card")
LENGTHS = 64
"""A row's largest length is found to a multiple of this, and to a fiftieth."""
MOST_LENGTH = 1 << 20
SPREAD = (0.25, 0.5, 1, 2)
"""The sizes in the table, as multiples of the batch."""
_GIB_BYTES = 2**30

Predicts = Callable[[Sequence[Request]], Sequence[Prediction]]


@dataclass(frozen=True)
class ModelQuestion:
    """What is asked of a model: `unknown` is one of `UNKNOWN`, or "" if all is given."""

    about: Question
    unknown: str
    batch: int


def is_model(settings: Sequence[str]) -> bool:
    """Returns whether the first setting names a model in place of a workload."""
    return bool(settings) and settings[0].partition(":")[0] in SOURCES


def model_question(settings: Sequence[str], gpus: Sequence[Gpu]) -> ModelQuestion:
    """Returns the question of a command line such as timm:resnet50 card=rtx3090; raises ConfigError for a wrong one.

    Without a card that is what is looked for, without a batch size the largest, else one sample is meant.
    """
    source, _, name = settings[0].partition(":")
    ref, table, options = SOURCES[source]
    if not name:
        example = "timm:resnet50" if source == "timm" else "hf:FOLDER, with a config.json"
        raise ConfigError(f"{settings[0]} names no model", allowed=example, remedy=example)
    typed = command_line.parse(settings[1:])
    given = {key.removeprefix("knobs."): text for key, text in {**typed.groups, **typed.values}.items()}
    if "batch_size" in given:
        given["micro_batch_size"] = given.pop("batch_size")
    asked = [SHOWN.get(key, key) for key, text in given.items() if text == "?"]
    card_items = [f"{key}={text}" for key, text in given.items() if key.partition(".")[0] == "card" and text != "?"]
    usual = "card" if not card_items else "" if "micro_batch_size" in given else "batch_size"
    unknown = asked[0] if asked else usual
    may_be = [name for name in UNKNOWN if name in ("batch_size", "card", *options)]
    if len(asked) > 1 or unknown not in ("", *may_be):
        what = f"{' '.join(f'{name}=?' for name in asked)}: one setting can be looked for"
        raise ConfigError(what, allowed=", ".join(f"'{name}=?'" for name in may_be), remedy=f"'{may_be[0]}=?'")
    knobs: dict[str, Any] = {"micro_batch_size": 1, **({"adapter": "none"} if "adapter" in table else {})}
    own: dict[str, Any] = {"model": name if source == "timm" else str(Path(name).expanduser().resolve())}
    for key, text in given.items():
        if text == "?" or key.partition(".")[0] == "card":
            continue
        knob = SHORT.get(key, key)
        if key in options:
            own[key] = command_line.value_of(f"workload.{key}", text, table)
        elif knob in table:
            knobs[knob] = command_line.value_of(f"knobs.{knob}", text, table)
        else:
            raise command_line.unknown_key(key, text, [*SHORT, "batch_size", *options, *table, "card"], table)
    card = card_of(load(card_items).card, gpus) if unknown != "card" else _cards()[0]
    if card.cap_bytes is None or card.device == "cpu":
        remedy = "card=rtx3090, or its memory: card=auto card.memory_gib=32, or 'card=?'"
        raise ConfigError(f"card={card.name} is no GPU with a memory", allowed="a GPU", remedy=remedy)
    return _question(WorkloadSection(ref=ref, name=_slug(name), options=own), knobs, card, table, unknown)


def _question(
    workload: WorkloadSection, knobs: Mapping[str, Any], card: Card, table: KnobTable, unknown: str
) -> ModelQuestion:
    space = Space.parse(knobs, table)
    if unknown != "card":
        restrict(space, card, set(knobs))
    values = {n: values_of(given) if isinstance(given := space.given(n), Choice) else (given,) for n in table}
    axes = [n for n in ROWS if n in table and (n != "base_dtype" or n in knobs)]
    rows: list[dict[str, Scalar]] = [{}]
    for axis in axes:
        rows = [{**row, axis: cast(Scalar, value)} for row in rows for value in values[axis]]
    batch = int(cast(Any, values["micro_batch_size"][0]))
    about = Question(
        workload=workload,
        knobs={n: cast(Scalar, v[0]) for n, v in values.items() if n not in axes and n != "micro_batch_size"},
        couplings=tuple(rows),
        micro_batches=tuple(sorted({max(1, int(batch * factor)) for factor in SPREAD})),
        card=dataclasses.replace(card, capability=card.capability or CAPABILITY),
        kernels="cuda",
        read=(),
        searched={},
        table=table,
        typed=tuple(axes),
    )
    return ModelQuestion(about, unknown, batch)


def solved(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Returns the answer in one line, and the question whose table shows it; it is about the first row."""
    about, name = asked.about, asked.about.workload.name
    if asked.unknown == "card":
        return _smallest_card(asked, predicts)
    if asked.unknown == "max_length":
        return _longest(asked, predicts)
    found = _fit(about, asked.batch, predicts)
    if not found.cells:
        return f"{name}: this step cannot be predicted", about
    if asked.unknown == "batch_size":
        if not found.largest or found.largest_cell is None:
            return f"{name}: not one sample fits {_card(about.card)}; it needs {_needs(found, about.card)}", about
        sizes = tuple(sorted({max(1, int(found.largest * factor)) for factor in SPREAD if factor != 1}))
        said = f"{name}: batch_size={found.largest} is the largest that fits {_card(about.card)}"
        return said, dataclasses.replace(about, micro_batches=sizes)
    fits = found.cells[0].verdict
    word = {"fits": "fits", "tight": "may fit"}.get(fits, "does not fit")
    least = "" if fits == "fits" or not found.largest else f"; the largest batch that does is {found.largest}"
    said = f"{name}: batch_size={asked.batch} {word} {_card(about.card)}: it needs {_needs(found, about.card)}{least}"
    return said, about


def _smallest_card(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Finds the smallest card that holds the batch: each is judged by its own kernels, and none without need."""
    about, name, last = asked.about, asked.about.workload.name, 0
    for card in _cards():
        one = dataclasses.replace(about, card=card)
        knobs = {**about.knobs, **about.couplings[0]}
        try:
            restrict(Space.parse(knobs, about.table), card, set(knobs))
        except ConfigError:  # it has no bf16
            continue
        if last * 0.9 > (card.cap_bytes or 0):  # another card's kernels need nearly as much
            continue
        found = _fit(one, asked.batch, predicts)
        if found.cells and found.cells[0].verdict == "fits":
            said = f"{name}: card={card.name} is the smallest listed that holds batch_size={asked.batch}"
            return f"{said}: {_needs(found, card)}", one
        last = found.cells[0].needed_bytes if found.cells else 0
        about = one
    return f"{name}: no card that is listed holds batch_size={asked.batch}; it needs {_gib(last)} GiB", about


def _longest(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Finds the longest rows that fit, between one length that fits and one that does not: on the line between their
    needs, which is never too long, since needs rise faster than lengths or as fast.
    """
    name, cap = asked.about.workload.name, cast(int, asked.about.card.cap_bytes)
    needs: dict[int, int] = {}

    def needed(length: int) -> int | None:
        found = _fit(_with_length(asked.about, length), asked.batch, predicts)
        if found.cells:
            needs[length] = found.cells[0].needed_bytes
        return None if not found.cells else 0 if found.cells[0].verdict == "fits" else 1

    low, high, at = 0, 0, 8 * LENGTHS
    while high == 0 and at <= MOST_LENGTH:
        over = needed(at)
        if over is None:
            break
        low, high, at = (at, 0, at * 4) if not over else (low, at, at)
    while low and high and high - low > max(LENGTHS, low // 50):
        share = (cap - needs[low]) / max(1, needs[high] - needs[low])
        at = low + max(1, min((high - low) // LENGTHS - 1, int(share * (high - low)) // LENGTHS)) * LENGTHS
        if at <= low or at >= high:
            break
        low, high = (low, at) if needed(at) else (at, high)
    if not low:
        tried = f"{high} tokens do not fit" if high else "it cannot be predicted"
        return f"{name}: {tried} {_card(asked.about.card)}", asked.about if not high else _with_length(asked.about, high)
    end = "" if high else ", and no longer row was tried"
    said = f"{name}: max_length={low} is the longest that fits {_card(asked.about.card)} at batch_size={asked.batch}"
    return f"{said}: {_gib(needs[low])} GiB{end}", _with_length(asked.about, low)


def _fit(about: Question, batch: int, predicts: Predicts) -> Fit:
    row = about.couplings[0]
    knobs, card = {**about.knobs, **row}, about.card
    request = Request(about.workload.ref, about.workload.options, knobs, about.kernels, card.capability or CAPABILITY)
    return fit(row, predicts([request])[0], [batch], card.cap_bytes, about.kernels)


def _with_length(about: Question, length: int) -> Question:
    options = {**about.workload.options, "max_length": length}
    return dataclasses.replace(about, workload=about.workload.model_copy(update={"options": options}))


def _cards() -> list[Card]:
    """Returns the cards that are listed, those of least memory first."""
    found = [load([f"card={name}"]).card for name in available("card")]
    gpus = [card for card in found if card.device == "cuda" and card.memory_bytes]
    return sorted(gpus, key=lambda card: (card.cap_bytes or 0, card.capability or CAPABILITY))


def _slug(name: str) -> str:
    path = Path(name)
    name = path.resolve().parent.name if path.name == "config.json" else path.name or path.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "model"


def _needs(found: Fit, card: Card) -> str:
    cell = found.cells[0]
    return f"{_gib(cell.needed_bytes)} of {_gib(card.cap_bytes or 0)} GiB ({percent(cell.share_frac or 0.0)})"


def _card(card: Card) -> str:
    return f"{card.name} ({_gib(card.cap_bytes or 0)} GiB for tensors)"


def _gib(size: int) -> str:
    return f"{size / _GIB_BYTES:.2f}"
