"""The values that a study may try: each knob either has one value, or a `Choice`, or a `Range`.

Pure values, checked once when they are made: everything behind this module may trust them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainables.knob_columns import Kind, Knob, Scalar
from trainables.knobs import OF_THE_LOOP, KnobTable
from tuning.config.errors import ConfigError

MAX_CHOICES = 10_000
AUTO = "auto"

_TYPED_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_RANGE_KEYS = ("low", "high", "log")


@dataclass(frozen=True)
class Choice:
    """A closed list of values, no two of them equal; with `auto` the machine is still to say which of them."""

    values: tuple[Scalar, ...]
    auto: bool = False

    def __contains__(self, value: object) -> bool:
        """Returns whether `value` is listed; true is not 1."""
        return any(v == value and isinstance(v, bool) == isinstance(value, bool) for v in self.values)

    def at(self, share: float) -> Scalar:
        """Returns the value at a place from 0 to 1, each having an equal part of it."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both allowed; `log` draws them evenly in the logarithm, `integer` whole ones."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __contains__(self, value: object) -> bool:
        """Returns whether `value` is a number of the range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return not self.integer or value == int(value)

    def place(self, value: float) -> float:
        """Returns the place of a number, 0 at `low` and 1 at `high`; `at` is the inverse."""
        if self.log:
            return math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, share: float) -> Scalar:
        """Returns the number at a place from 0 (`low`) to 1 (`high`), of five digits."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        if self.integer:
            return round(value)
        return min(max(float(f"{value:.5g}"), self.low), self.high)

    def spread(self) -> tuple[Scalar, ...]:
        """Returns the lowest, the middle (the geometric one of positive ends) and the highest, each once."""
        middle = math.sqrt(self.low * self.high) if self.low > 0 else (self.low + self.high) / 2
        return tuple(dict.fromkeys(round(v) if self.integer else v for v in (self.low, middle, self.high)))


Parameter = Choice | Range


@dataclass(frozen=True)
class Space:
    """The parameters a study searches, and the values it holds fixed; a knob in neither keeps its default.

    `table` has the knobs of the workload.
    """

    parameters: Mapping[str, Parameter]
    fixed: Mapping[str, Scalar]
    table: KnobTable = field(compare=False, repr=False)

    @classmethod
    def parse(cls, raw: Mapping[str, object], table: KnobTable) -> Space:
        """Returns the space of knob name -> raw parameter, each knob checked by itself; raises ConfigError.

        `check_whole` checks it as a whole: it may be a part, such as what was typed for a workload not yet imported.
        """
        parameters: dict[str, Parameter] = {}
        fixed: dict[str, Scalar] = {}
        for name, value in raw.items():
            parsed = parse_parameter(name, value, table)
            if isinstance(parsed, Choice | Range):
                parameters[name] = parsed
            else:
                fixed[name] = parsed
        return cls(parameters, fixed, table)

    def without_effect(self) -> tuple[str, ...]:
        """Returns the knobs that were given a value or a search, and whose precondition no configuration here meets."""
        requires, defaults = self.table.requiring, self.table.defaults
        asked = (n for n in requires if n in {**self.parameters, **self.fixed} and self.given(n) != defaults[n])
        return tuple(n for n in asked if not any(map(requires[n].met, values_of(self.given(requires[n].knob)))))

    def given(self, name: str) -> Parameter | Scalar:
        """Returns what the knob may be here: its parameter, its fixed value, or its default."""
        return self.parameters.get(name, self.fixed.get(name, self.table.defaults[name]))

    def unmet(self, name: str) -> str:
        """Returns in words what a knob of `without_effect` needs, and what there is instead."""
        requires = self.table.requiring[name]
        values = " or ".join(shown(v) for v in values_of(self.given(requires.knob)))
        return f"it needs {requires.words}, which can only be {values} here"

    def as_raw(self) -> dict[str, object]:
        """Returns knob name -> scalar, list or mapping, as YAML has it; `Space.parse` reads it back."""
        raw: dict[str, object] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, Choice):
                raw[name] = AUTO if parameter.auto else list(parameter.values)
            else:
                raw[name] = {"low": parameter.low, "high": parameter.high, "log": parameter.log}
        return {**raw, **self.fixed}

    def settled(self, cores: int | None) -> Space:
        """Returns the space with what each "auto" stands for: workers up to one a core of a device's share,
        micro-batches of powers of two from a sixteenth of the largest batch, and all of it; of others what the device
        honours (`cards.restrict`). Without `cores` the device is not known yet, nor its batches, and all stay open.
        """
        if cores is None:
            return self
        parameters = dict(self.parameters)
        for name, parameter in self.parameters.items():
            if not isinstance(parameter, Choice) or not parameter.auto:
                continue
            if name == "micro_batch_size":
                whole = int(largest(self.given("batch_size")))
                powers = (int(v) for v in parameter.values if whole / 16 <= float(v) < whole)
                parameters[name] = Choice((*powers, whole))  # which is each smaller batch in one pass, too
            else:
                most = cores if name == "num_workers" else math.inf
                parameters[name] = Choice(tuple(v for v in parameter.values if isinstance(v, str) or v <= most))
        return replace(self, parameters=parameters)

    def subset(self, kinds: Collection[Kind]) -> Space:
        """Returns the space of the parameters of these kinds; the other parameters are dropped, the fixed stay."""
        return replace(self, parameters={n: p for n, p in self.parameters.items() if self.table[n].kind in kinds})

    def whole(self, named: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns a configuration as it stands, with defaults for what it does not name and the space has."""
        given = {**self.fixed, **self.parameters}
        values = {n: named.get(n, row.default) for n, row in self.table.items() if n in named or n in given}
        return self.complete(values)

    def complete(self, values: Mapping[str, object]) -> dict[str, Scalar]:
        """Returns `values` over the fixed ones, without the knobs that have no effect with the others.

        A micro-batch larger than the batch is cut to the batch. Raises ValueError for a value no knob may take.
        """
        whole = {n: self.table[n].domain.check(v) for n, v in {**self.fixed, **values}.items()}
        active = {n: v for n, v in whole.items() if self.table.is_active(n, whole)}
        if "micro_batch_size" in active and "batch_size" in active:
            active["micro_batch_size"] = min(active["micro_batch_size"], active["batch_size"])
        return active


def parse_parameter(name: str, raw: object, table: KnobTable) -> Scalar | Parameter:
    """Returns what a knob is given: one value, a `Choice` for a list, a `Range` for {low, high, log}.

    Raises ConfigError that names the knob, the value, what is allowed and what to write instead.
    """
    row = table.get(name)
    if row is None:
        what = f"knobs.{name}={shown(raw)}: {name} is not a knob of this workload"
        raise ConfigError(what, remedy=near_knob(name, table))
    if raw == AUTO and row.auto:
        return Choice(row.auto, auto=True)
    if isinstance(raw, Mapping):
        return _range(name, row, raw)
    if isinstance(raw, list | tuple):
        return _choice(name, row, raw)
    return _value(name, row, raw, raw)


def near_knob(name: str, table: KnobTable) -> str:
    """Returns a sentence with the knob most like `name`, or with all of them; of one that a hook replaces, which."""
    if name in OF_THE_LOOP and (hook := OF_THE_LOOP[name].replaced_by) in table.hooks:
        return f"leave it out: this workload has its own {hook}, which sets it"
    near = table.also_called.get(name) or next(iter(difflib.get_close_matches(name, table, n=1, cutoff=0.6)), None)
    declared = "; a workload of yours declares its own as `knobs` of its class"
    return f"did you mean knobs.{near}?" if near else f"knobs are {', '.join(table)}{declared}"


def _value(name: str, row: Knob, value: object, raw: object) -> Scalar:
    """Returns one value of the knob; `raw` is all that it was given."""
    try:
        return row.domain.check(value)
    except ValueError:
        inside = "" if value is raw else f" in {shown(raw)}"
        typed = _is_number(row) and re.fullmatch(rf"({_TYPED_NUMBER}) ?(?:\.\.+|-|to) ?({_TYPED_NUMBER})", str(value))
        range_typed = f"'knobs.{name}={{low: {typed[1]}, high: {typed[2]}}}', a range" if typed else ""
        what = f"knobs.{name}: {shown(value)}{inside} is not allowed"
        remedy = range_typed or (_range_example(name, row) if isinstance(raw, Mapping) else _example(name, row))
        raise ConfigError(what, allowed=row.domain.describe(), remedy=remedy) from None


def _choice(name: str, row: Knob, raw: list[object] | tuple[object, ...]) -> Scalar | Choice:
    if not raw:
        raise ConfigError(f"knobs.{name}=[] leaves nothing to choose from", remedy=_example(name, row))
    if len(raw) > MAX_CHOICES:
        what = f"knobs.{name} lists {len(raw)} values, starting {shown(raw[:3])}"
        remedy = f"give a range, such as {_range_example(name, row)}" if _is_number(row) else _example(name, row)
        raise ConfigError(what, allowed=f"at most {MAX_CHOICES} choices", remedy=remedy)
    values = tuple(_value(name, row, value, raw) for value in raw)
    if len(set(values)) < len(values):
        twice = next(v for i, v in enumerate(values) if v in values[:i])
        what = f"knobs.{name}={shown(raw)}: {shown(twice)} is listed twice"
        remedy = f"knobs.{name}={shown(list(dict.fromkeys(values)))}"
        raise ConfigError(what, allowed="choices that all differ (1 and 1.0 are the same)", remedy=remedy)
    return values[0] if len(values) == 1 else Choice(values)


def _range(name: str, row: Knob, raw: Mapping[Any, object]) -> Scalar | Range:
    said, domain = f"knobs.{name}={shown(raw)}", row.domain
    if not _is_number(row):
        raise ConfigError(f"{said}: a range of {domain.type.__name__}", remedy=_example(name, row))
    if values := domain.values:
        what = f"{said}: a range of a knob that has a list of values"
        raise ConfigError(what, allowed=domain.describe(), remedy=f"knobs.{name}={shown(list(values))}")
    example = _range_example(name, row)
    for key in raw:
        if key not in _RANGE_KEYS:
            near = difflib.get_close_matches(str(key), _RANGE_KEYS, n=1)
            hint = f"did you mean {near[0]}? For example {example}" if near else example
            raise ConfigError(f"{said}: {key} is no part of a range", allowed=", ".join(_RANGE_KEYS), remedy=hint)
    for key in ("low", "high"):
        if key not in raw:
            raise ConfigError(f"{said}: {key} is missing", remedy=example)
    low, high = (float(_value(name, row, raw[key], raw)) for key in ("low", "high"))
    if not isinstance(log := raw.get("log", False), bool):
        raise ConfigError(f"{said}: log is {shown(log)}", allowed="true, false", remedy=example)
    if low > high:
        raise ConfigError(f"{said}: low is greater than high", allowed="low <= high", remedy=example)
    if log and low <= 0:
        raise ConfigError(f"{said}: a logarithm needs low > 0", allowed="low > 0 with log", remedy=example)
    if low == high:
        return _value(name, row, raw["low"], raw)
    integer = domain.type is int
    return Range(int(low) if integer else low, int(high) if integer else high, log, integer)


def _is_number(row: Knob) -> bool:
    return row.domain.type in (int, float)


def _example(name: str, row: Knob) -> str:
    return f"knobs.{name}={shown(row.default)}"


def _range_example(name: str, row: Knob) -> str:
    default, domain = float(row.default), row.domain
    low, high = (max(default // 2, 1), default * 2 or 4) if domain.type is int else (default / 5, default * 5)
    return f"'knobs.{name}={{low: {low:g}, high: {min(high, domain.high):g}, log: true}}'"


def largest(parameter: Parameter | Scalar) -> float:
    """Returns the largest number that a knob may be."""
    return float(parameter.high if isinstance(parameter, Range) else max(values_of(parameter), key=float))


def values_of(parameter: Parameter | Scalar) -> Sequence[Any]:
    """Returns the values of a list or of a range of whole numbers, or the one that is fixed."""
    if isinstance(parameter, Range):
        return range(int(parameter.low), int(parameter.high) + 1)
    return parameter.values if isinstance(parameter, Choice) else (parameter,)


def shown(value: object) -> str:
    """Returns the value as one would type it, cut to one line's length."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = value or "''"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ",".join(shown(v) for v in value[:50]) + "]"
    else:
        text = "null" if value is None else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
