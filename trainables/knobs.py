"""The values of knobs, and the table of the knobs that a workload has.

A `KnobTable` holds the rows of one workload: those of `trainables.loop_knobs`, and those that its file declares. Torch
is not imported here, so that a configuration is checked before that import.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from trainables.knob_columns import AskedBy, Kind, Knob, Memory, Options, Requires, Scalar
from trainables.loop_knobs import OF_THE_LOOP, LoopKnobs

__all__ = ["LOOP", "OF_THE_LOOP", "KnobTable", "Knobs", "Options", "ReadKnobs", "Scalar", "asked_by"]


class Knobs(LoopKnobs):
    """The values of one trial's knobs, immutable: those of the loop and, as further attributes, the workload's own."""

    def __init__(self, **values: Scalar) -> None:
        """Takes values of the loop's knobs alone, as in a workload without its own; raises ValueError as `of` does."""
        self._fill(LOOP, values)

    def _fill(self, rows: KnobTable, values: Mapping[str, object]) -> None:
        held = self.__dict__
        held["_table"] = rows
        held.update(rows.defaults)
        for name, value in values.items():
            if name not in rows:
                near = difflib.get_close_matches(name, rows, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; knobs are {', '.join(rows)}"
                raise ValueError(f"{name} is not a knob of this workload{hint}")
            if value is held[name]:  # as most: a search makes knobs thousands of times, and checking all took 0.3 ms
                continue
            try:
                held[name] = rows[name].domain.check(value)
            except ValueError as error:
                raise ValueError(f"knob {name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, object], rows: KnobTable) -> Knobs:
        """Returns knobs with `values`, and all others of `rows` at their defaults.

        Raises ValueError for an unknown name, and for a value that its knob may not take.
        """
        knobs = cls.__new__(cls)
        knobs._fill(rows, values)
        return knobs

    @property
    def table(self) -> KnobTable:
        """Returns the table of these values; if they were pickled, for a process that changes no knob, the loop's."""
        rows: KnobTable = self.__dict__.get("_table", LOOP)
        return rows

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def with_(self, **changes: Scalar) -> Knobs:
        """Returns a copy with some knobs changed."""
        return Knobs.of({**self.as_dict(), **changes}, self.table)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: the name is no knob. The return type is that of a workload's own knobs."""
        raise AttributeError(f"{name} is not a knob of this workload; its file declares its own in `knobs`")

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError: `with_` makes others."""
        raise AttributeError(f"knobs are not changed; with_({name}=...) makes others")

    def __getstate__(self) -> dict[str, Scalar]:
        """Returns the values without the table, for pickle: rows hold functions."""
        return self.as_dict()

    def __setstate__(self, values: Mapping[str, Scalar]) -> None:
        """Restores the values."""
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        """Returns whether `other` are knobs with the same values."""
        return isinstance(other, Knobs) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        """Returns the hash of the values."""
        return hash(tuple(self.as_dict().items()))

    def __repr__(self) -> str:
        """Returns the knobs as a call."""
        return f"Knobs({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


class ReadKnobs(Knobs):
    """Knobs that record in `read` which of them are read, until `closed` is called."""

    def __init__(self, knobs: Knobs, read: set[str]) -> None:
        self.__dict__.update(knobs.__dict__, _read=read)

    def __getattribute__(self, name: str) -> Any:
        """Returns the attribute; records the name if it is a knob's."""
        held = object.__getattribute__(self, "__dict__")
        if name in held and not name.startswith("_"):
            held.get("_read", set()).add(name)  # a copy has no `_read`
        return object.__getattribute__(self, name)

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name; records all of the workload's own as read. `with_` calls it, too."""
        self.__dict__.get("_read", set()).update(self.table.own)
        return super().as_dict()

    def closed(self) -> None:
        """Stops recording: turns this object into plain `Knobs`."""
        del self.__dict__["_read"]
        object.__setattr__(self, "__class__", Knobs)


def asked_by(call: AskedBy) -> tuple[str, ...]:
    """Returns the knobs that `call` applies in a custom loop."""
    return tuple(name for name, row in OF_THE_LOOP.items() if row.asked_by == call)


class KnobTable(Mapping[str, Knob]):
    """The rows of one workload by the name of the knob: those of the loop, then the workload's own.

    `kinds` are measured kinds that differ from the row's. `hooks` are the workload's methods that replace knobs of the
    loop or accompany them: a workload with a hook `optimizer` may declare its own `momentum`. Raises ValueError for an
    own knob with the name of a knob of the loop, or with a name that cannot be an attribute.
    """

    def __init__(
        self,
        own: Mapping[str, Knob] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        hooks: Collection[str] = (),
    ) -> None:
        self.own, self.hooks = dict(own or {}), tuple(sorted(hooks))
        of_the_loop = {name: row for name, row in OF_THE_LOOP.items() if row.replaced_by not in self.hooks}
        for name, row in self.own.items():
            if not isinstance(row, Knob):
                raise ValueError(f"knobs: {name}: {row!r} is no knob; such as Knob(32, 'both', values=(16, 32, 64))")
            if name in of_the_loop:
                raise ValueError(f"knobs: {name} is a knob that every workload has; give yours another name")
            if not str(name).isidentifier() or hasattr(Knobs, name) or str(name).startswith("_"):
                raise ValueError(f"knobs: {name!r} cannot be read as config.knobs.{name}; give it another name")
        self.kinds = dict(kinds or {})
        rows = {**of_the_loop, **self.own}
        self._rows = {n: replace(row, kind=self.kinds[n]) if n in self.kinds else row for n, row in rows.items()}
        self.defaults: Mapping[str, Scalar] = {name: row.default for name, row in self._rows.items()}

    def __getitem__(self, name: str) -> Knob:
        """Returns the row of a knob."""
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the knobs."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Returns how many knobs there are."""
        return len(self._rows)

    def whole(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the values, and the defaults of all other knobs."""
        return {**self.defaults, **values}

    def is_active(self, name: str, values: Mapping[str, object]) -> bool:
        """Returns False for a knob whose requirement is not met by `values`, such as a prefetch without workers.

        True for an unknown name, which a record of another version may hold.
        """
        requires = self.requiring.get(name)
        return requires is None or requires.met(values.get(requires.knob, self.defaults[requires.knob]))

    @cached_property
    def also_called(self) -> Mapping[str, str]:
        """Other names that people write -> the knob, for names that are not spelt alike."""
        return {other: name for name, row in self.items() for other in row.also}

    @cached_property
    def requiring(self) -> Mapping[str, Requires]:
        """The requirement of each knob that needs a value of another knob, by name."""
        return {name: row.requires for name, row in self.items() if row.requires is not None}

    @cached_property
    def system(self) -> tuple[str, ...]:
        """The knobs that change speed and memory only."""
        return tuple(name for name, row in self.items() if row.kind == "system")

    @cached_property
    def both(self) -> tuple[str, ...]:
        """The knobs that change speed and learning; their values are the speed group."""
        return tuple(name for name, row in self.items() if row.kind == "both")

    @cached_property
    def by_memory(self) -> Mapping[Memory | None, tuple[str, ...]]:
        """The names of knobs by how they change a step's peak memory."""
        moves: tuple[Memory, ...] = get_args(Memory)
        return {move: tuple(name for name, row in self.items() if row.memory == move) for move in moves}

    @cached_property
    def scaled(self) -> tuple[str, ...]:
        """The numeric knobs that change the memory of a sample or of a parameter, such as a width."""
        return tuple(name for name in self.by_memory["group"] if self[name].domain.type in (int, float))

    def __reduce__(self) -> tuple[type[KnobTable], tuple[Any, ...]]:
        """Returns what pickle makes the table of: the workload's own rows without functions, which only a step asks."""
        own = {name: replace(row, seen=None, rules=(), remedies={}) for name, row in self.own.items()}
        return KnobTable, (own, self.kinds, self.hooks)

    def as_raw(self) -> dict[str, object]:
        """Returns the workload's own rows as plain values for a record; `Knob.of_raw` reads one back."""
        return {name: row.as_raw() for name, row in self.own.items()}


LOOP = KnobTable()
"""The table of a workload without its own knobs."""


def complete(config: Mapping[str, Scalar], table: KnobTable) -> dict[str, Scalar]:
    """Returns every knob of a configuration with the defaults filled in, less those without effect in it."""
    try:
        full = dict(Knobs.of(config, table).as_dict())
    except ValueError:  # a run of another version: what it recorded is all there is to say
        full = dict(config)
    return {name: value for name, value in full.items() if table.is_active(name, full)}


def identity(config: Mapping[str, Scalar], table: KnobTable) -> frozenset[tuple[str, str]]:
    """Returns what is the same for all configurations that run the same."""
    full = complete(config, table)
    return frozenset((name, repr(value)) for name, value in full.items() if value != table.defaults.get(name))
