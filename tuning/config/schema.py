"""The parts of a study's configuration as strict types: unknown keys, wrong types and numbers out of range are refused.

Defaults live in `search_spaces/`, for people to read; here every key must be given.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from trainables.knobs import Scalar
from tuning.config.cards import GIB_BYTES, Card, DeviceType
from tuning.config.choices import Goal, PrunerName, SamplerName, available
from tuning.config.errors import ConfigError, allowed_by
from tuning.config.space import Space, shown

_SLUG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_DURATION = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+(?:\.[0-9]+)?)s)?")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
_DEVICE = re.compile(r"[0-9]{1,3}|(?:GPU|MIG)-[0-9A-Za-z/-]*")
_DAY_S = 86_400.0
PLANNED_TRIALS = 12
"""Whole trainings that a search of as many trials as the time allows is planned for.

Some are stopped half way, and others begin in their place.
"""
MOST_TRIALS = 50
"""The most trials of "auto", however short they are.

The best of many trainings with one seed is mostly lucky: of 542 in `temporal` the pick was below the baseline, of 50
above (docs/log/time_limits.md).
"""


def duration_s(value: object) -> object:
    """Returns seconds for "90s", "4m", "1h30m" or a number, which is seconds; raises ValueError for other text."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if value and match:
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return hours * 3600 + minutes * 60 + seconds
        if not _NUMBER.fullmatch(value):
            raise ValueError("a duration such as 90s, 4m, 1h30m, or a number of seconds")
        return float(value)
    return value


def _slug(value: str) -> str:
    if not _SLUG.fullmatch(value):
        what = "1 to 64 letters, digits, dots, dashes and underscores, starting with none of the dots and dashes"
        raise ValueError(what)
    return value


def _folder(value: str) -> str:
    if not value.strip() or value != value.strip() or len(value) > 1024:
        raise ValueError("the path of a folder")
    return value


def _address(value: object) -> object:
    """Returns None, "auto" or HOST:PORT, an IPv6 host in brackets."""
    if value is None or value == "auto":
        return value
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if host and port.isdecimal() and 0 < int(port) < 65536 and "/" not in host and (":" not in host or host[0] == "["):
        return value
    raise ValueError("auto, or the address of a Ray cluster's head as HOST:PORT")


def _devices(value: object) -> object:
    """Returns "all", or numbers and UUIDs of cards, parted by commas, each once."""
    cards = value.split(",") if isinstance(value, str) else []
    if value == "all" or (cards and len(set(cards)) == len(cards) and all(map(_DEVICE.fullmatch, cards))):
        return value
    raise ValueError("all, or cards by number or UUID, each once, such as 0,1")


def _epochs(value: object) -> object:
    """Returns "auto", or a number above 0 up to 10,000."""
    if value == "auto":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 10_000:
        return float(value)
    raise ValueError("auto, or a number > 0 and <= 10000")


def _count(least: int, most: int, value: object) -> object:
    """Returns "auto", or a whole number from `least` to `most`."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
        return value
    raise ValueError(f"auto, or a whole number from {least} to {most}")


def _tolerance(value: object) -> float | str:
    """Returns a number of at least 0, or a percentage as "2%"; no per cent at all is the number 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e300:
        return float(value)
    share = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if share and float(share[1]) <= 100:
        return f"{float(share[1]):g}%" if float(share[1]) else 0.0
    raise ValueError("a number >= 0 in the objective's own unit, or a percentage of the reference's, 0% to 100%")


Slug = Annotated[str, AfterValidator(_slug)]


class Section(BaseModel):
    """A strict, frozen part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


class WorkloadSection(Section):
    """Which workload: `ref` as `workload_files.load` takes it, `name` of its runs folder, its own options."""

    ref: str
    name: Slug
    options: dict[str, Scalar | None]
    epochs: float | None = None
    """The epochs that a user's file says it is trained today, None if it does not say."""

    @property
    def is_packaged(self) -> bool:
        """Whether it is one of ours, whose space is in `search_spaces/workload`."""
        return self.ref in available("workload")


class CardSection(Section):
    """A card as YAML has it; sizes in GiB (2**30 bytes)."""

    name: Slug
    memory_gib: Annotated[float, Field(gt=0, le=1024)] | None
    reserve_gib: Annotated[float, Field(ge=0, le=64)]
    capability: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(min_length=2, max_length=2)] | None
    dtypes: Annotated[list[Literal["fp32", "bf16", "fp16"]], Field(min_length=1)]
    device: DeviceType

    def card(self) -> Card:
        """Returns the card in bytes; raises ConfigError when the reserve leaves no memory."""
        if self.memory_gib is not None and self.reserve_gib >= self.memory_gib:
            what = f"card.reserve_gib={self.reserve_gib:g} leaves nothing of card.memory_gib={self.memory_gib:g}"
            raise ConfigError(what, allowed="reserve_gib < memory_gib", remedy="raise card.memory_gib")
        memory_bytes = None if self.memory_gib is None else round(self.memory_gib * GIB_BYTES)
        capability = None if self.capability is None else (self.capability[0], self.capability[1])
        reserve_bytes = round(self.reserve_gib * GIB_BYTES)
        return Card(self.name, memory_bytes, reserve_bytes, capability, tuple(self.dtypes), self.device)


def card_as_raw(card: Card) -> dict[str, object]:
    """Returns the card as `CardSection` takes it."""
    return {
        "name": card.name,
        "memory_gib": None if card.memory_bytes is None else card.memory_bytes / GIB_BYTES,
        "reserve_gib": card.reserve_bytes / GIB_BYTES,
        "capability": None if card.capability is None else list(card.capability),
        "dtypes": list(card.dtypes),
        "device": card.device,
    }


class RungsSection(Section):
    """Successive halving: each rung is `eta` times the one before; the first is `first_frac` of the horizon."""

    eta: Annotated[int, Field(ge=2, le=16)]
    first_frac: Annotated[float, Field(gt=0, le=1)]


class ProbeSection(Section):
    """Seconds for all probes and for one of them; shorter if knobs and groups are many (`search.probe`).

    A probe ends sooner once it cannot be the fastest any more.
    """

    max_time_s: Annotated[float, Field(gt=0, le=_DAY_S)]
    probe_time_s: Annotated[float, Field(gt=0, le=_DAY_S)]


class ConfirmSection(Section):
    """How the answer is confirmed: `top` configurations at a time are trained with the reference, on at most `seeds`
    fresh seeds, until it is settled or `search.max_time` is over; then windows of `window_s` seconds in turns.
    """

    windows: Annotated[int, Field(ge=5, le=100)]
    window_s: Annotated[float, Field(gt=0, le=600)]
    seeds: Annotated[int, Field(ge=1, le=100)]
    top: Annotated[int, Field(ge=1, le=100)]


class BudgetSection(Section):
    """The budget of a study; `train_epochs` of the training split is the horizon of a trial that is never stopped.

    "auto": as many as let all trials be trained in the time there is, or `PLANNED_TRIALS` of them if their number is
    "auto", too; one epoch without a limit.
    """

    name: Slug
    train_epochs: Annotated[float | Literal["auto"], BeforeValidator(_epochs)]
    rungs: RungsSection
    probe: ProbeSection
    confirm: ConfirmSection


class SearchSection(Section):
    """How many trials, for how long (`max_time` in YAML and on the command line), how, and from which seed.

    "auto": as many trials as the time allows, at most `MOST_TRIALS`; without a limit `PLANNED_TRIALS`. 0: a study of
    probes alone, the fastest settings that change nothing learned.

    Learning and "both" knobs are proposed, with the fastest system knobs that were probed. `sampler` proposes: known
    (what would be faster), tpe or random. `pruner` stops trials at the budget's rungs (`choices.PRUNERS`).
    """

    trials: Annotated[int | Literal["auto"], BeforeValidator(functools.partial(_count, 0, 100_000))]
    max_time_s: Annotated[Annotated[float, Field(gt=0, le=365 * _DAY_S)] | None, BeforeValidator(duration_s)] = Field(
        alias="max_time"
    )
    hang_time_s: Annotated[float, Field(gt=0, le=_DAY_S), BeforeValidator(duration_s)] = Field(alias="hang_time")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)]
    sampler: SamplerName
    pruner: PrunerName

    @property
    def most_trials(self) -> int:
        """Returns how many trials there may be; the time may end the search sooner."""
        if self.trials != "auto":
            return self.trials
        return MOST_TRIALS if self.max_time_s is not None else PLANNED_TRIALS


class PickSection(Section):
    """The requirements on the pick: the fastest that is as good as what is trained today, the reference.

    `tolerance` is the quality that it may give up on purpose, as long as it beats the baselines: a number in the
    objective's own unit, or a text such as "2%", a share of the reference's quality. `at_least` names a quality in
    place of the reference's. `goal=quality` asks for the best quality that is no slower than the reference.
    """

    tolerance: Annotated[float | str, BeforeValidator(_tolerance)]
    at_least: Annotated[float, Field(ge=-1e300, le=1e300)] | None
    goal: Goal


class StudyConfig(Section):
    """Everything a study is told. `tuning.config` makes it, from the command line or from a journal.

    `cluster` is the address of a Ray cluster of the user's whose nodes run trials too, `concurrency` then the trials at
    once on each; one that asks for no token is joined if `insecure_cluster` says so. `target` is the kind of device
    whose speed the study is about, None: this machine's, or that with most devices. `devices` are the cards of
    this machine that are used, as text: "all" that are visible, else their places among those or their UUIDs;
    `devices_per_trial` of them train together, on a CPU so many processes.
    `named` are configurations measured in addition to the search;
    `origins` has the file or "command line" behind each dotted key; `dropped` has a sentence for each value left out;
    `overrides` is the command line as typed; `secrets` are options of the workload given again with `resume`.
    """

    workload: WorkloadSection
    card: InstanceOf[Card]
    budget: BudgetSection
    search: SearchSection
    pick: PickSection
    concurrency: Annotated[int | Literal["auto"], BeforeValidator(functools.partial(_count, 1, 256))]
    cluster: Annotated[str | None, BeforeValidator(_address)]
    insecure_cluster: bool
    target: Slug | None  # of a cluster's kinds of device
    devices: Annotated[str, BeforeValidator(_devices)]
    devices_per_trial: Annotated[int, Field(ge=1, le=64)]
    space: InstanceOf[Space]
    named: dict[str, dict[str, Scalar]]
    dashboard: bool
    force: bool  # resumes although device, versions, data or code have changed
    runs_dir: Annotated[str, AfterValidator(_folder)]
    resume: Slug | None
    name: Slug | None
    secrets: dict[str, str] = {}
    origins: dict[str, str]
    dropped: list[str]
    overrides: tuple[str, ...]


_Model = TypeVar("_Model", bound=Section)


def validated(
    model: type[_Model], raw: object, key: str, origins: Mapping[str, str], remedies: Mapping[str, object]
) -> _Model:
    """Returns `raw` as the model, or raises ConfigError for its first fault.

    `key` is the place of `raw` in the tree, "" for the root; `remedies` has the value each key has without the command
    line.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    # The location names members of unions and positions in lists too; keys are what is found in the input.
    path = [key] if key else []
    inner: Any = raw
    for part in fault["loc"]:
        if isinstance(inner, Mapping) and (part in inner or fault["type"] == "missing"):
            path.append(str(part))
            inner = inner.get(part)
    dotted = ".".join(path)
    origin = origins.get(dotted, "command line")
    where = "" if origin == "command line" else f" ({origin})"
    if fault["type"] == "missing":
        raise ConfigError(f"{dotted} is missing{where}", remedy=f"add {dotted}=<value>")
    if fault["type"] == "extra_forbidden":
        raise ConfigError(f"{dotted}={shown(inner)}: there is no setting {dotted}{where}", remedy=f"leave out {dotted}")
    default = remedies.get(dotted)
    remedy = f"leave out {dotted}" if default is None else f"{dotted}={shown(default)}"
    if dotted.endswith("_gib") and (number := re.fullmatch(r"([0-9.]+) ?Gi?B?", str(inner), re.IGNORECASE)):
        remedy = f"{dotted}={number[1]}"
    if dotted not in remedies:
        remedy = f"change {dotted}"
    if where:
        remedy = f"edit {origin}"
    raise ConfigError(f"{dotted}={shown(inner)} is not allowed{where}", allowed=allowed_by(fault), remedy=remedy)
