"""A search space as Ray Tune's users write it, as the `Space` of our search: names, kinds, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.search import sample

from trainables.knob_columns import Kind, Knob
from trainables.knobs import LOOP, KnobTable, Scalar
from tuning.config.errors import ConfigError
from tuning.config.space import Space, largest
from tuning.memory.groups import defaults

MICRO_BATCH = "micro_batch_size"
_DOMAINS = "a list, {low, high, log}, tune.choice, uniform, loguniform, randint or lograndint"


@dataclass(frozen=True)
class TuneSpace:
    """The space of a Tune script: `names` has the knob of each of the user's names.

    `lr` is our learning rate and `bs` our batch size, so that what we know of them holds; an unknown name is a knob of
    the user's own. A batch is one micro-batch, as in a plain loop.
    """

    space: Space
    names: Mapping[str, str]

    @classmethod
    def parse(cls, given: Mapping[str, object], learning: Collection[str], system: Collection[str]) -> TuneSpace:
        """Returns the space of name -> values; `learning` change neither speed nor memory, `system` only these.

        Raises ConfigError for what cannot be searched, and for a kind of a name that the space lacks.
        """
        if not isinstance(given, Mapping) or not given:
            what = f"space={given!r} has nothing to search"
            raise ConfigError(what, allowed=f"a dict: {_DOMAINS}", remedy="space={'lr': tune.loguniform(1e-4, 1e-1)}")
        if strange := sorted({*learning, *system} - given.keys()):
            what = f"learning or system names {strange[0]}, which the space lacks"
            raise ConfigError(what, allowed=", ".join(given), remedy="leave it out, or give its values in the space")
        raw = {name: _plain(name, value) for name, value in given.items()}
        kinds: dict[str, Kind] = {**dict.fromkeys(learning, "learning"), **dict.fromkeys(system, "system")}
        names, own = dict[str, str](), dict[str, Knob]()
        for name, value in raw.items():
            ours = LOOP.also_called.get(name, name)
            if name not in kinds and ours != MICRO_BATCH and ours in LOOP and _holds(ours, value):
                names[name] = ours
            else:
                names[name] = name if name not in LOOP else f"{name}_"
                own[names[name]] = _knob(name, value, kinds.get(name, "both"))
        try:
            table = KnobTable(own, {MICRO_BATCH: "both"})
        except ValueError as error:
            raise ConfigError(
                f"space: {error}", remedy="another name for it in the space and in your function"
            ) from None
        space = Space.parse({"batch_size": 1, **{names[name]: value for name, value in raw.items()}}, table)
        whole = int(largest(space.given("batch_size")))
        return cls(Space(space.parameters, {**space.fixed, MICRO_BATCH: whole}, table), names)

    def config(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns a configuration by the user's names; what has no effect with the rest has its usual value."""
        start = {**self.space.table.defaults, **defaults(self.space), **knobs}
        return {name: start[knob] for name, knob in self.names.items()}

    def knobs(self, config: Mapping[str, Any]) -> dict[str, Scalar]:
        """Returns a configuration by our names; raises ConfigError for a name or a value that cannot be."""
        if strange := sorted(config.keys() - self.names.keys()):
            what = f"reference={config!r} names {strange[0]}, which the space lacks"
            raise ConfigError(
                what, allowed=", ".join(self.names), remedy="leave it out, or give its values in the space"
            )
        try:
            return self.space.whole({**defaults(self.space), **{self.names[n]: v for n, v in config.items()}})
        except ValueError as error:
            raise ConfigError(f"reference={config!r}: {error}", remedy="a value of that kind") from None


def _plain(name: str, value: Any) -> Any:
    """Returns the values of a domain of Tune as our files have them."""
    if isinstance(value, sample.Categorical):
        return list(value.categories)
    if not isinstance(value, sample.Domain):
        return value
    drawn = value.get_sampler()
    if not isinstance(value, sample.Float | sample.Integer) or not isinstance(
        drawn, sample.Uniform | sample.LogUniform
    ):
        what = f"space: {name}={value!r} is drawn in a way that a search by known speeds cannot use"
        raise ConfigError(what, allowed=_DOMAINS, remedy=f"{name}=tune.choice([...]), or a range without steps")
    if isinstance(value, sample.Integer):  # Tune's upper end is excluded
        ends: tuple[int | float, int | float] = int(value.lower), int(value.upper) - 1
    else:
        ends = float(value.lower), float(value.upper)
    return {"low": ends[0], "high": ends[1], "log": isinstance(drawn, sample.LogUniform)}


def _values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [value[end] for end in ("low", "high") if end in value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _holds(knob: str, value: Any) -> bool:
    """Returns whether a knob of the loop may be all of these values; else the user means another thing by its name."""
    try:
        return bool([LOOP[knob].domain.check(one) for one in _values(value)])
    except ValueError:
        return False


def _knob(name: str, value: Any, kind: Kind) -> Knob:
    """Returns the row of a knob of the user's own."""
    try:
        values = _values(value)
        is_range, is_flag = isinstance(value, Mapping), all(isinstance(one, bool) for one in values)
        more: Any = (
            dict(zip(("low", "high"), values, strict=True)) if is_range else {"values": () if is_flag else values}
        )
        return Knob(values[0], kind, **more)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"space: {name}={value!r}: {error}", allowed=_DOMAINS, remedy=f"{name}=[16, 32]") from None
