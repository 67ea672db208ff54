"""The columns of the knob table: all facts about a knob besides its name. Torch is not imported here."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

Scalar = bool | int | float | str
Options = Mapping[str, Any]  # a workload's own settings by name: plain data, as YAML has it
Kind = Literal["system", "learning", "both"]
Memory = Literal["none", "step", "minor", "switch", "group"]
"""How a knob changes a step's peak memory.

group: the bytes of a sample or a parameter depend on the value, so each value is measured; numbers between two measured
values are interpolated. switch: as group, but only zero and non-zero differ. minor: by a few per cent, which the
guard's margin covers. step: through the samples of a micro-step, or the gradients of earlier micro-steps that it holds;
one profile covers both.
"""
Span = Literal["loader", "augment", "transfer", "compute", "optimizer", "none"]
"""The part of a step that a knob can shorten; if that part takes no time, the knob is not worth a probe.

A system knob with "optimizer" changes no other part: probes judge it by the optimiser step alone.
"""
Bound = Literal["loader", "transfer", "launch", "compute", "memory", "optimizer"]
AskedBy = Literal["loader", "batch", "prepare", "batches", "around", "autocast", "backward", "clip", "name"]
"""The call of `run` that applies a knob in a custom loop. around: it is set around any training. clip: `run.backward`
without `max_norm`. name: none; the user's own code reads the knob by `run["..."]`."""
CALLS: Mapping[AskedBy, str] = {
    "loader": "run.loader()",
    "batch": "run.loader() and run.backward(loss, optimizer)",
    "prepare": "run.prepare(model, optimizer)",
    "batches": "run.batches(loader)",
    "around": "run.batches(loader)",
    "autocast": "run.autocast()",
    "backward": "run.backward(loss, optimizer)",
    "clip": "run.backward(loss, optimizer) without a max_norm",
    "name": "",
}
"""The call of `run` that applies a knob, by the column `asked_by`."""
Seen = Mapping[str, Any]
"""The facts of a first step, `trainables.witness.Witness.facts`."""
Found = tuple[str, bool | None] | None
"""The finding of the first step, in words, and whether it agrees with the knob (None: unknown); None for no finding."""
Reader = Callable[[Any, Seen], Found]
"""(value of the knob, facts of the first step) -> what was found."""


@dataclass(frozen=True)
class Domain:
    """The values that a knob may take: a closed list of `values`, or numbers from `low` to `high`, both included.

    `low_excluded` excludes the lower end, for quantities that must be positive.
    """

    type: type[bool] | type[int] | type[float] | type[str]
    values: tuple[Scalar, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False

    def describe(self) -> str:
        """Returns the allowed values in words, for error messages and documentation."""
        if self.values:
            return "one of " + ", ".join(word(v) for v in self.values)
        name = "a whole number" if self.type is int else "a number"
        lower = f"{'> ' if self.low_excluded else '>= '}{self.low:g}" if self.low > -math.inf else ""
        upper = f"<= {self.high:g}" if self.high < math.inf else ""
        return " ".join(part for part in (name, lower, "and" if lower and upper else "", upper) if part)

    def check(self, value: object) -> Scalar:
        """Returns `value` in the knob's type, or raises ValueError with the allowed values.

        A whole number is accepted for a float; nothing else is converted ("yes" is not True).
        """
        if self.values:
            for allowed in self.values:
                if type(value) is type(allowed) and value == allowed:
                    return allowed
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        if type(value) is int and abs(value) > 2**63:
            raise ValueError(f"expected {self.describe()}, got a number of {len(str(value))} digits")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        outside = value < self.low or value > self.high or (self.type is int and int(value) != value)
        if outside or (self.low_excluded and value <= self.low):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        return int(value) if self.type is int else float(value)


FLAG = Domain(bool, values=(False, True))
_OF_VALUES = Domain(str)
"""Placeholder for a domain that `Knob` makes of `values`, `low` and `high`."""


@dataclass(frozen=True)
class Requires:
    """A condition on another knob, under which a knob has an effect: it is `above` a number, or `equals` a value."""

    knob: str
    above: float | None = None
    equals: Scalar | None = None

    def met(self, value: object) -> bool:
        """Returns whether `value` of the other knob meets the condition."""
        if self.above is None:
            return value == self.equals and isinstance(value, bool) == isinstance(self.equals, bool)
        return isinstance(value, int | float) and value > self.above

    @property
    def words(self) -> str:
        """Returns the condition as text, such as "num_workers > 0"."""
        return f"{self.knob} > {self.above:g}" if self.above is not None else f"{self.knob} = {word(self.equals)}"

    @property
    def example(self) -> str:
        """Returns a setting that meets the condition, as typed; a list if the other knob is worth searching, too."""
        if self.above is not None:
            return f"knobs.{self.knob}=[0,2,4]"
        return f"knobs.{self.knob}={'[false,true]' if self.equals is True else word(self.equals)}"


class Device(Protocol):
    """The device that a configuration is to run on."""

    @property
    def name(self) -> str:
        """The name of the device."""

    @property
    def device(self) -> str:
        """Its type: "cpu", "cuda", or "auto" before the study has detected it."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Its CUDA compute capability; None if it has none or it is not known."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The number types it supports, of fp32, bf16 and fp16."""


@dataclass(frozen=True)
class DeviceRule:
    """A requirement of some `values` of a knob on the device: in words, and a function to the reason if not met."""

    values: tuple[Scalar, ...]
    needs: str
    why_not: Callable[[Device, Scalar], str | None]


VOLTA, AMPERE = (7, 0), (8, 0)
"""Compute capabilities: the first that Triton supports, and the first with bfloat16 and TensorFloat-32."""


def only_on(device: Literal["cuda", "cpu"], why: str, *values: Scalar) -> DeviceRule:
    """Returns the rule that `values` (default: True) need this type of device; `why` begins the sentence otherwise."""
    other = "cpu" if device == "cuda" else "cuda"
    sentence = f"{why}, and this runs on {'the cpu' if other == 'cpu' else 'a CUDA device'}"
    needs = "a CUDA device" if device == "cuda" else "a CPU"
    return DeviceRule(values or (True,), needs, lambda on, _: sentence if on.device == other else None)


def capability(least: tuple[int, int], what: str, *values: Scalar) -> DeviceRule:
    """Returns the rule that values need a compute capability; a CPU and an unknown capability are not refused."""
    text = ".".join(map(str, least))

    def why_not(on: Device, _: Scalar) -> str | None:
        if on.device == "cpu" or on.capability is None or on.capability >= least:
            return None
        return f"{what} needs compute capability {text}, and {on.name} has {'.'.join(map(str, on.capability))}"

    return DeviceRule(values or (True,), f"compute capability {text}", why_not)


def package(name: str, extra: str, *values: Scalar) -> DeviceRule:
    """Returns the rule that values need an optional package."""
    sentence = f"it needs the package {name}, pip install 'cardtune[{extra}]'"
    return DeviceRule(values, f"the package {name}", lambda *_: None if importlib.util.find_spec(name) else sentence)


def card_types(*values: Scalar) -> DeviceRule:
    """Returns the rule that number types must be among those of the card."""

    def why_not(on: Device, value: Scalar) -> str | None:
        return None if value in on.dtypes else f"{value} is not a type of card {on.name} ({', '.join(on.dtypes)})"

    return DeviceRule(values, "a card with that type", why_not)


def cpu_flags(why: str, flags: tuple[str, ...], *values: Scalar) -> DeviceRule:
    """Returns the rule that values need a CPU with one of the `flags`; an unknown CPU is not refused."""

    def why_not(on: Device, _: Scalar) -> str | None:
        here = flags_of_cpu() if on.device == "cpu" else frozenset()
        return why if here and here.isdisjoint(flags) else None

    return DeviceRule(values, f"on a CPU one of {', '.join(flags)}", why_not)


@cache
def flags_of_cpu() -> frozenset[str]:
    """Returns the instruction sets of this machine's processor by Linux's names; empty if they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


@dataclass(frozen=True)
class Measured:
    """Measurements that a remedy may depend on: the device type; shares, 0 to 1, of the processor and of the time."""

    cuda: bool
    cpu_frac: float = 0.0
    augment_frac: float = 0.0
    loaders_wait: bool = False  # rather than compute


Remedy = Callable[[Any, Measured], Scalar | None]
"""(current knobs, measurements) -> the value that may help; None or the current value for none."""


def turn(value: Scalar) -> Remedy:
    """Returns the remedy of setting the knob to `value`."""
    return lambda own, measured: value


@dataclass(frozen=True)
class Knob:
    """A row of the table: the default of a knob, its kind, and the values that it may take.

    A workload declares its own as in `knobs = {"channels": Knob(32, "both", values=(16, 32, 64), shapes_model=True)}`.
    `kind` is "system" (speed and memory only), "learning" (what is learned only) or "both". The values are a list, or
    numbers from `low` to `high`, both included; a default of True or False needs neither. `shapes_model` says that
    `model()` reads the knob, so that a change needs a new model. `doc` is a sentence for people. Raises ValueError for
    arguments that contradict each other.

    Further columns are for the rows of the loop: `acts_in` are the modules of `trainables` that act on the knob. `seen`
    reads it back from a first step. `asked_by` is the call of `run` that applies it in a custom loop. `remedies` are by
    the bottleneck of a step. `also` are other names that people use.
    """

    default: Scalar
    kind: Kind
    domain: Domain = _OF_VALUES
    doc: str = ""
    acts_in: tuple[str, ...] = ("workload",)
    memory: Memory | None = None
    """Default: "group"; for a learning knob "none", or "minor" if it shapes the model."""
    span: Span | None = None
    """Default: "compute"; for a learning knob "none"."""
    seen: Reader | None = None
    asked_by: AskedBy = "name"
    requires: Requires | None = None
    rules: tuple[DeviceRule, ...] = ()
    remedies: Mapping[Bound, Remedy] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    shapes_model: bool = False
    auto: tuple[Scalar, ...] = ()
    """The values that "auto" stands for in a space, less those that the device or the machine does not support."""
    replaced_by: str = ""
    """The hook of a workload that replaces the knob."""
    by_hand: str = ""
    """How a script has it without cardtune, in a few words: for exports to frameworks, and the page of knobs."""
    values: InitVar[Sequence[Scalar]] = ()
    low: InitVar[float] = -math.inf
    high: InitVar[float] = math.inf

    def __post_init__(self, values: Sequence[Scalar], low: float, high: float) -> None:
        what = f"Knob({self.default!r}, {self.kind!r}, ...)"
        if self.kind not in get_args(Kind):
            raise ValueError(f"{what}: kind is {self.kind!r}; allowed: {', '.join(get_args(Kind))}")
        if not isinstance(self.default, bool | int | float | str):
            raise ValueError(f"{what}: the default is no true or false, number or text")
        if self.domain is _OF_VALUES:
            object.__setattr__(self, "domain", _domain(what, self.default, tuple(values), low, high))
        elif not isinstance(self.domain, Domain):
            raise ValueError(f"{what}: name what it may be, as in values={self.domain!r}")
        try:
            object.__setattr__(self, "default", self.domain.check(self.default))
        except ValueError as error:
            raise ValueError(f"{what}: the default: {error}") from None
        learning = self.kind == "learning"
        if self.memory is None:
            moves = ("minor" if self.shapes_model else "none") if learning else "group"
            object.__setattr__(self, "memory", moves)
        if self.span is None:
            object.__setattr__(self, "span", "none" if learning else "compute")

    def as_raw(self) -> dict[str, object]:
        """Returns a workload's own knob as plain values for a record; `of_raw` reads it back."""
        domain, ends = self.domain, (self.domain.low, self.domain.high)
        return {
            "default": self.default,
            "kind": self.kind,
            "type": domain.type.__name__,
            "values": list(domain.values),
            "range": [end if math.isfinite(end) else None for end in ends],
            "memory": self.memory,
            "span": self.span,
            "shapes_model": self.shapes_model,
            "doc": self.doc,
        }

    @classmethod
    def of_raw(cls, raw: Mapping[str, Any]) -> Knob:
        """Returns the knob of a record; raises KeyError, TypeError or ValueError if `raw` is no knob."""
        low, high = (math.nan if end is None else end for end in raw["range"])
        ends = (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
        domain = Domain(_BY_NAME[raw["type"]], tuple(raw["values"]), *ends)
        more = {name: raw[name] for name in ("doc", "memory", "span", "shapes_model")}
        return cls(raw["default"], raw["kind"], domain, **more)


_BY_NAME: Mapping[str, type[Any]] = {type_.__name__: type_ for type_ in (bool, int, float, str)}


def _domain(what: str, default: Scalar, values: tuple[Scalar, ...], low: float, high: float) -> Domain:
    """Returns the domain of a workload's own knob, from the arguments of `Knob`; raises ValueError."""
    if isinstance(default, bool):
        return FLAG
    ranged = low > -math.inf or high < math.inf
    if values and ranged:
        raise ValueError(f"{what}: values, low and high are given; leave out the values, or both ends")
    if values:
        kinds = {type(value) for value in values} - {int if isinstance(default, float) else None}
        if len(kinds - {float}) > 1 or not kinds <= {int, float, str}:
            raise ValueError(f"{what}: values={values!r} must be numbers, or texts")
        return Domain(str if str in kinds else float if float in kinds else int, values=values)
    if isinstance(default, str):
        raise ValueError(f"{what}: a text needs the texts it may be, as in values=({default!r}, ...)")
    if not low <= high:
        raise ValueError(f"{what}: low={low!r} is greater than high={high!r}")
    whole = isinstance(default, int) and all(math.isinf(end) or end == int(end) for end in (low, high))
    return Domain(int if whole else float, low=low, high=high)


def refusal(row: Knob, value: object, device: Device) -> str | None:
    """Returns why the device does not support the value of a knob, None if it does."""
    rules = (rule for rule in row.rules for v in rule.values if v is value or (v == value and type(v) is type(value)))
    reasons = (rule.why_not(device, cast(Scalar, value)) for rule in rules)
    return next((reason for reason in reasons if reason is not None), None)


def word(value: object) -> str:
    """Returns a value as one types it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
