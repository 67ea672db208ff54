"""`estimate timm:NAME` and `estimate hf:FOLDER`: a model that has no workload, and one setting that is looked for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainables.knobs import KnobTable
from trainables.our_knobs import FINE_TUNED, HF_OPTIONS
from tuning.config import command_line
from tuning.config.cards import Card, restrict
from tuning.config.choices import available
from tuning.config.errors import ConfigError, TuningError
from tuning.config.load import load
from tuning.config.schema import WorkloadSection
from tuning.config.space import Range, Space, values_of
from tuning.memory.fitting import Fit, fit
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request
from tuning.report.estimate_lines import gib
from tuning.report.estimate_request import CAPABILITY, Question, card_of
from tuning.workers.nvml import Gpu

DESCRIBED = "trainables.workloads.described"
MODEL_SOURCES: Mapping[str, tuple[KnobTable, tuple[str, ...]]] = {
    "timm": (KnobTable(), ()),
    "hf": (KnobTable(FINE_TUNED), HF_OPTIONS),
}
"""By what is before the colon: the knobs of such a model, and its options; the first can be looked for."""
SHORT_NAMES = {"dtype": "amp_dtype", "checkpointing": "activation_checkpointing", "batch_size": "micro_batch_size"}
"""Settings that are shorter than their knobs; a batch is one micro-step here."""
MODEL_ROWS = ("amp_dtype", "activation_checkpointing", "adapter", "base_dtype")
LOOKED_FOR = ("batch_size", "card")
LENGTH_STEP = 64
"""The longest row is found to a multiple of this, and to a fiftieth."""
FIRST_LENGTH, MOST_LENGTH = 512, 1 << 18
LEAST_OF_ANOTHER = 0.9
"""The kernels of another card need at least so much of what those of one need."""
SIZES_SHOWN = (0.25, 0.5, 1, 2)
"""The sizes in the table, as multiples of the batch."""

Predicts = Callable[[Sequence[Request]], Sequence[Prediction]]


@dataclass(frozen=True)
class ModelQuestion:
    """A question about one model: `unknown` is the setting to find (`LOOKED_FOR`, max_length), "" if all are given."""

    about: Question
    unknown: str
    batch: int


def is_model(settings: Sequence[str]) -> bool:
    """Returns whether the first setting names a model in place of a workload."""
    return bool(settings) and settings[0].partition(":")[0] in MODEL_SOURCES


def model_question(settings: Sequence[str], gpus: Sequence[Gpu]) -> ModelQuestion:
    """Returns the question of a command line such as timm:resnet50 card=rtx3090; raises ConfigError for a wrong one.

    Without a card that is what is looked for, without a batch size the largest, else one sample is meant.
    """
    source, _, name = settings[0].partition(":")
    table, options = MODEL_SOURCES[source]
    if not name:
        raise ConfigError(f"{settings[0]} names no model", remedy="timm:resnet50, or hf:FOLDER with its config.json")
    typed = command_line.parse(settings[1:])
    given = {key.removeprefix("knobs."): text for key, text in {**typed.groups, **typed.values}.items()}
    asked = ["batch_size" if key == "micro_batch_size" else key for key, text in given.items() if text == "?"]
    card_items = [f"{key}={text}" for key, text in given.items() if key.partition(".")[0] == "card" and text != "?"]
    usual = "card" if not card_items else "" if given.keys() & {"batch_size", "micro_batch_size"} else "batch_size"
    unknown, may_be = asked[0] if asked else usual, [*LOOKED_FOR, *options[:1]]
    if len(asked) > 1 or unknown not in ("", *may_be):
        what = f"{' '.join(f'{name}=?' for name in asked)}: one setting can be looked for"
        raise ConfigError(what, allowed=", ".join(f"'{name}=?'" for name in may_be), remedy=f"'{may_be[0]}=?'")
    knobs: dict[str, object] = {"micro_batch_size": 1}
    if source == "hf":
        knobs |= {"adapter": "none"} | ({} if "optimizer" in given else {"fused_optimizer": True})  # as its Trainer
    path = name if source == "timm" else str(Path(name).expanduser().resolve())
    own: dict[str, Any] = {"source": source, "model": path}
    for key, text in given.items():
        if text == "?" or key.partition(".")[0] == "card":
            continue
        if key in options:
            own[key] = command_line.value_of(f"workload.{key}", text, table)
        elif (knob := SHORT_NAMES.get(key, key)) in table:
            knobs[knob] = command_line.value_of(f"knobs.{knob}", text, table)
        else:
            raise command_line.unknown_key(key, text, [*SHORT_NAMES, *options, *table, "card"], table)
    if not isinstance(own.get("max_length", 1), int) or own.get("max_length", 1) < 1:
        raise ConfigError(f"max_length={own['max_length']}", allowed="a number of tokens", remedy="max_length=512")
    if own.get("attention", "sdpa") not in ("sdpa", "eager"):
        raise ConfigError(f"attention={own['attention']}", allowed="sdpa, eager", remedy="attention=eager")
    card = card_of(load(card_items).card, gpus) if unknown != "card" else _cards()[0]
    if card.cap_bytes is None or card.device == "cpu":
        remedy = "card=rtx3090, or its memory: card=auto card.memory_gib=32, or 'card=?'"
        raise ConfigError(f"card={card.name} is no GPU here", allowed="a GPU", remedy=remedy)
    space = Space.parse(knobs, table)
    if unknown != "card":
        restrict(space, card, set(knobs))
    values = {n: values_of(space.given(n)) for n in table if not isinstance(space.given(n), Range)}
    axes = {n: values[n] for n in MODEL_ROWS if n in values and (n != "base_dtype" or n in knobs)}
    batch = int(values["micro_batch_size"][0])
    about = Question(
        workload=WorkloadSection(ref=DESCRIBED, name=_slug(name), options=own),
        knobs={n: v[0] for n, v in values.items() if n not in axes and n != "micro_batch_size"},
        couplings=tuple(dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())),
        micro_batches=tuple(sorted({max(1, int(batch * factor)) for factor in SIZES_SHOWN})),
        card=dataclasses.replace(card, capability=card.capability or CAPABILITY),
        kernels="cuda",
        read=tuple(table.own),
        searched={},
        table=table,
        typed=tuple(axes),
    )
    return ModelQuestion(about, unknown, batch)


def solved(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Returns the answer in one line, and the question whose table shows it; it is about the first row.

    Raises TuningError if the step cannot be predicted.
    """
    about, name, card = asked.about, asked.about.workload.name, asked.about.card
    if asked.unknown == "card":
        return _smallest_card(asked, predicts)
    if asked.unknown == "max_length":
        return _longest(asked, predicts)
    found = _fit(about, asked.batch, predicts)
    if asked.unknown == "batch_size" and found.largest:
        sizes = tuple(sorted({max(1, int(found.largest * factor)) for factor in SIZES_SHOWN if factor != 1}))
        said = f"{name}: batch_size={found.largest} is the largest that is expected to fit {_card(card)}"
        return said, dataclasses.replace(about, micro_batches=sizes)
    word = {"fits": "fits", "tight": "may fit"}.get(found.cells[0].verdict, "does not fit")
    least = f"; the largest batch that does is {found.largest}" if word == "does not fit" and found.largest else ""
    said = f"{name}: batch_size={asked.batch} {word} {_card(card)}: it needs {gib(found.cells[0].needed_bytes)} GiB"
    return said + least, about


def _smallest_card(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Finds the smallest card that holds the batch: each is judged by its own kernels, and none without need."""
    about, name, least = asked.about, asked.about.workload.name, 0
    knobs = {**about.knobs, **about.couplings[0]}
    for card in _cards():
        try:
            restrict(Space.parse(knobs, about.table), card, set(knobs))
        except ConfigError:  # such as bf16
            continue
        about = dataclasses.replace(about, card=card)
        if least * LEAST_OF_ANOTHER > cast(int, card.cap_bytes):
            continue
        cell = _fit(about, asked.batch, predicts).cells[0]
        least = cell.needed_bytes
        if cell.verdict == "fits":
            said = f"{name}: card={card.name} is the smallest listed that holds batch_size={asked.batch}"
            return f"{said}: {gib(least)} of {gib(cast(int, card.cap_bytes))} GiB", about
    return f"{name}: no card that is listed holds batch_size={asked.batch}; it needs {gib(least)} GiB", about


def _longest(asked: ModelQuestion, predicts: Predicts) -> tuple[str, Question]:
    """Finds the longest rows that fit, between one length that fits and one that does not: on the line between their
    needs, which is never too long, since needs rise as fast as lengths or faster.
    """
    about, name, cap = asked.about, asked.about.workload.name, cast(int, asked.about.card.cap_bytes)
    needs: dict[int, int] = {}

    def fits(length: int) -> bool:
        cell = _fit(_with_length(about, length), asked.batch, predicts).cells[0]
        needs[length] = cell.needed_bytes
        return cell.verdict != "no"

    most = _positions(Path(str(about.workload.options["model"])))
    low, high = 0, min(FIRST_LENGTH, most)
    while fits(high):
        low, high = high, min(high * 4, most)
        if low == most:
            break
    if not low and fits(LENGTH_STEP):
        low = LENGTH_STEP
    while low and high - low > max(LENGTH_STEP, low // 50):
        share = (cap - needs[low]) / max(1, needs[high] - needs[low])
        steps = min(max(1, int(share * (high - low)) // LENGTH_STEP), (high - low) // LENGTH_STEP - 1)
        low, high = (at, high) if fits(at := low + max(1, steps) * LENGTH_STEP) else (low, at)
    if not low:
        said = f"not one row of {LENGTH_STEP} tokens fits {_card(about.card)}: it needs {gib(needs[LENGTH_STEP])} GiB"
        return f"{name}: {said}", _with_length(about, LENGTH_STEP)
    said = f"max_length={low} is the longest that is expected to fit {_card(about.card)} at batch_size={asked.batch}"
    return f"{name}: {said}: it needs {gib(needs[low])} GiB", _with_length(about, low)


def _fit(about: Question, batch: int, predicts: Predicts) -> Fit:
    row, card = about.couplings[0], about.card
    options = about.workload.options
    request = Request(about.workload.ref, options, {**about.knobs, **row}, about.kernels, card.capability or CAPABILITY)
    found = fit(row, predicts([request])[0], [batch], card.cap_bytes, about.kernels)
    if not found.cells:
        why = "; ".join(found.notes) or "it was not traced"
        raise TuningError(f"{about.workload.name}: this step cannot be predicted: {why}", remedy="--timeout 600")
    return found


def _with_length(about: Question, length: int) -> Question:
    options = {**about.workload.options, "max_length": length}
    return dataclasses.replace(about, workload=about.workload.model_copy(update={"options": options}))


@functools.cache
def _cards() -> Sequence[Card]:
    """Returns the cards that are listed, those of least memory first."""
    found = [load([f"card={name}"]).card for name in available("card")]
    gpus = [card for card in found if card.device == "cuda" and card.memory_bytes]
    return sorted(gpus, key=lambda card: (card.cap_bytes or 0, card.capability or CAPABILITY))


def _positions(model: Path) -> int:
    """Returns the longest row that a model takes, as far as its config.json says that."""
    try:
        raw = json.loads((model / "config.json" if model.is_dir() else model).read_text(encoding="utf-8"))
        return min(int(raw.get("max_position_embeddings") or MOST_LENGTH), MOST_LENGTH)
    except (OSError, ValueError, AttributeError):  # whoever builds the model says what is wrong with it
        return MOST_LENGTH


def _slug(name: str) -> str:
    path = Path(name).resolve()
    name = path.parent.name if path.name == "config.json" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "model"


def _card(card: Card) -> str:
    return f"{card.name} ({gib(card.cap_bytes or 0)} GiB for tensors)"
