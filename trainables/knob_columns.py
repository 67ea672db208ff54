"""The columns of the knob table: what is known of a knob besides its name. No torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast

Scalar = bool | int | float | str
Kind = Literal["system", "learning", "both"]
Memory = Literal["none", "step", "minor", "group"]
"""How a knob moves a step's peak memory.

group: by its values a sample or a parameter needs another amount, so each is measured for itself (a number with a
fraction only by whether it is above 0). minor: by a few per cent, which the guard's margin holds. step: by how many
samples a micro-step has, or whether gradients of earlier micro-steps are held in it; one profile has all of that.
"""
Span = Literal["loader", "augment", "transfer", "compute", "optimizer", "none"]
"""The part of a step that a knob can shorten; of one that takes no time, the knob is not worth a probe."""
Bound = Literal["loader", "transfer", "launch", "compute", "memory", "optimizer"]
Seen = Mapping[str, Any]
"""The facts of a first step, `trainables.witness.Witness.facts`."""
Found = tuple[str, bool | None] | None
"""What the first step showed, in words, and whether it is what was asked (None: cannot be told); None for nothing."""
Reader = Callable[[Any, Seen], Found]
"""(value asked, facts seen) -> found."""


@dataclass(frozen=True)
class Domain:
    """What values a knob may take: a closed list of `values`, or numbers from `low` to `high` (both allowed).

    `low_excluded` makes the lower end open, for quantities that must be positive.
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
        """Returns `value` as the knob's own type, or raises ValueError with what is allowed.

        A whole number is taken where a number is asked; nothing else is converted ("yes" is not True).
        """
        if self.values:
            for allowed in self.values:
                if type(value) is type(allowed) and value == allowed:
                    return allowed
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        outside = value < self.low or value > self.high or (self.type is int and int(value) != value)
        if outside or (self.low_excluded and value <= self.low):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        return int(value) if self.type is int else float(value)


FLAG = Domain(bool, values=(False, True))


@dataclass(frozen=True)
class Requires:
    """The values of another knob under which a knob has an effect: all `above` a number, or the one it `equals`."""

    knob: str
    above: float | None = None
    equals: Scalar | None = None

    def met(self, value: object) -> bool:
        """Returns whether the other knob's `value` is one of them."""
        if self.above is None:
            return value == self.equals and isinstance(value, bool) == isinstance(self.equals, bool)
        return isinstance(value, int | float) and value > self.above

    @property
    def words(self) -> str:
        """Returns the condition as text, such as "num_workers > 0"."""
        return f"{self.knob} > {self.above:g}" if self.above is not None else f"{self.knob} = {word(self.equals)}"

    @property
    def example(self) -> str:
        """Returns a setting that meets it, as typed: a list where the other knob is worth a search of its own."""
        if self.above is not None:
            return f"knobs.{self.knob}=[0,2,4]"
        return f"knobs.{self.knob}={'[false,true]' if self.equals is True else word(self.equals)}"


class Device(Protocol):
    """Where a configuration is to run; `capability` is CUDA's, None where it does not apply or is not known."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def device(self) -> str:
        """Its type: "cpu", "cuda", or "auto" until the study has looked."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Its compute capability."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types of numbers it computes in, of fp32, bf16 and fp16."""


@dataclass(frozen=True)
class DeviceRule:
    """Which `values` of a knob need something of the device: `needs` in words, and the sentence why it is not there."""

    values: tuple[Scalar, ...]
    needs: str
    why_not: Callable[[Device, Scalar], str | None]


def cuda(why: str, *values: Scalar) -> DeviceRule:
    """Returns the rule of values that only a CUDA device honours; `why` begins the sentence about a CPU."""
    sentence = f"{why}, and this runs on the cpu"
    return DeviceRule(values or (True,), "a CUDA device", lambda on, _: sentence if on.device == "cpu" else None)


def capability(least: tuple[int, int], what: str, *values: Scalar) -> DeviceRule:
    """Returns the rule of values that need a compute capability; a CPU and an unknown one are not refused."""
    text = ".".join(map(str, least))

    def why_not(on: Device, _: Scalar) -> str | None:
        if on.device == "cpu" or on.capability is None or on.capability >= least:
            return None
        return f"{what} needs compute capability {text}, and {on.name} has {'.'.join(map(str, on.capability))}"

    return DeviceRule(values or (True,), f"compute capability {text}", why_not)


def package(name: str, extra: str, *values: Scalar) -> DeviceRule:
    """Returns the rule of values that need an optional package."""
    sentence = f"it needs the package {name}, pip install 'cardtune[{extra}]'"
    return DeviceRule(values, f"the package {name}", lambda *_: None if importlib.util.find_spec(name) else sentence)


def card_types(*values: Scalar) -> DeviceRule:
    """Returns the rule of number types that a card has to have."""

    def why_not(on: Device, value: Scalar) -> str | None:
        return None if value in on.dtypes else f"{value} is not a type of card {on.name} ({', '.join(on.dtypes)})"

    return DeviceRule(values, "a card with that type", why_not)


def cpu_flags(why: str, flags: tuple[str, ...], *values: Scalar) -> DeviceRule:
    """Returns the rule of values for which a CPU has to have one of the `flags`; an unknown CPU is not refused."""

    def why_not(on: Device, _: Scalar) -> str | None:
        here = flags_of_cpu() if on.device == "cpu" else frozenset()
        return why if here and here.isdisjoint(flags) else None

    return DeviceRule(values, f"on a CPU one of {', '.join(flags)}", why_not)


@cache
def flags_of_cpu() -> frozenset[str]:
    """Returns the instruction sets of this machine's processor by Linux's names; empty where they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


@dataclass(frozen=True)
class Measured:
    """What a remedy may depend on: the kind of device, and shares from 0 to 1 of the processor and of the time."""

    cuda: bool
    cpu_frac: float = 0.0
    augment_frac: float = 0.0


Remedy = Callable[[Any, Measured], Scalar | None]
"""(own knobs, what was measured) -> the value that may help; None or the value it has already for none."""


def turn(value: Scalar) -> Remedy:
    """Returns the remedy of setting the knob to `value`."""
    return lambda own, measured: value


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    `acts_in` are the modules of `trainables` that act on it. `seen` reads it back from a first step, None where it
    leaves no trace there. `claimed` names the documents that recommend it (docs/knobs.md). `remedies` are by what
    bounds a step. `short` heads a column of trials, "" for none; `also` are other names that people use.
    `shapes_model`: a workload's `model()` may read it, so that a change needs a new model.
    """

    default: Scalar
    kind: Kind
    domain: Domain
    doc: str
    acts_in: tuple[str, ...]
    memory: Memory
    span: Span
    seen: Reader | None
    claimed: str
    requires: Requires | None = None
    rules: tuple[DeviceRule, ...] = ()
    remedies: Mapping[Bound, Remedy] = field(default_factory=dict)
    short: str = ""
    also: tuple[str, ...] = ()
    shapes_model: bool = False


def refusal(row: Knob, value: object, device: Device) -> str | None:
    """Returns why the device cannot honour the value of a knob, None where it can."""
    asked = (rule for rule in row.rules for v in rule.values if v is value or (v == value and type(v) is type(value)))
    reasons = (rule.why_not(device, cast(Scalar, value)) for rule in asked)
    return next((reason for reason in reasons if reason is not None), None)


def word(value: object) -> str:
    """Returns a value as one types it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
