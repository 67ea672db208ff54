"""The values of knobs, and which knobs a workload has.

A `KnobTable` is the rows of one workload: those of `trainables.loop_knobs`, and the ones that its file declares. One is
in use in a process at a time. Torch is not imported here, so that a configuration can be checked before torch is.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast, get_args

from trainables.knob_columns import AskedBy, Domain, Kind, Knob, Memory, Requires, Scalar
from trainables.loop_knobs import OF_THE_LOOP, LoopKnobs

__all__ = [
    "OF_THE_LOOP",
    "KnobTable",
    "Knobs",
    "ReadKnobs",
    "Scalar",
    "asked_by",
    "domain_of",
    "is_active",
    "kind_of",
    "table",
    "use",
    "using",
]


class Knobs(LoopKnobs):
    """The knobs of one trial, not to be changed: those of the loop and, as further attributes, the workload's own."""

    def __init__(self, **values: Scalar) -> None:
        self._fill(table(), values)

    def _fill(self, rows: KnobTable, values: Mapping[str, object]) -> None:
        own = self.__dict__
        own["_table"] = rows
        own.update(rows.defaults)
        for name, value in values.items():
            if name not in rows:
                near = difflib.get_close_matches(name, rows, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; knobs are {', '.join(rows)}"
                raise ValueError(f"{name} is not a knob of this workload{hint}")
            if value is own[name]:  # most are: a search makes knobs thousands of times, and checking all took 0.3 ms
                continue
            try:
                own[name] = rows[name].domain.check(value)
            except ValueError as error:
                raise ValueError(f"knob {name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, object], rows: KnobTable | None = None) -> Knobs:
        """Returns the knobs in `values`, the others at their defaults, by the table in use or by `rows`.

        Raises ValueError for a name that is no knob there, and for a value that its knob may not take.
        """
        made = cls.__new__(cls)
        made._fill(table() if rows is None else rows, values)
        return made

    @property
    def table(self) -> KnobTable:
        """Returns the rows these are values of; in a loader's process, which changes none, those in use there."""
        return cast(KnobTable, self.__dict__.get("_table") or table())

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def with_(self, **changes: Scalar) -> Knobs:
        """Returns a copy with some knobs changed."""
        return Knobs.of({**self.as_dict(), **changes}, self.table)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: the values are there, so this is no knob; the type is that of a workload's own."""
        raise AttributeError(f"{name} is not a knob of this workload; its file declares its own in `knobs`")

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError: `with_` makes others."""
        raise AttributeError(f"knobs are not changed; with_({name}=...) makes others")

    def __getstate__(self) -> dict[str, Scalar]:
        """Returns the values alone, for another process: rows hold functions."""
        return self.as_dict()

    def __setstate__(self, values: Mapping[str, Scalar]) -> None:
        """Takes the values back."""
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        """Returns whether the other are knobs of the same values."""
        return isinstance(other, Knobs) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        """Returns the hash of the values."""
        return hash(tuple(self.as_dict().items()))

    def __repr__(self) -> str:
        """Returns the knobs as a call."""
        return f"Knobs({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


class ReadKnobs(Knobs):
    """Knobs that note in `read` which of them are read, by name or all of a workload's own, until they are `closed`."""

    def __init__(self, knobs: Knobs, read: set[str]) -> None:
        self.__dict__.update(knobs.__dict__, _read=read)

    def __getattribute__(self, name: str) -> Any:
        """Returns what it has; the name of a knob is noted."""
        own = object.__getattribute__(self, "__dict__")
        if name in own and not name.startswith("_"):
            own.get("_read", set()).add(name)  # a copy has none
        return object.__getattribute__(self, name)

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name, as `with_` does, and notes the workload's own."""
        self.__dict__.get("_read", set()).update(self.table.own)
        return super().as_dict()

    def closed(self) -> None:
        """Makes them knobs like any other, which note nothing."""
        del self.__dict__["_read"]
        object.__setattr__(self, "__class__", Knobs)


def asked_by(call: AskedBy) -> tuple[str, ...]:
    """Returns the knobs that this applies in a loop of one's own."""
    return tuple(name for name, row in OF_THE_LOOP.items() if row.asked_by == call)


class KnobTable(Mapping[str, Knob]):
    """The rows of one workload by the name of the knob: those of the loop, then its own.

    `kinds` are those that were measured on it, where they differ from what the row says; `hooks` are the methods that
    it has in the place of knobs or beside them. A workload with an optimiser of its own may have a `momentum` of its
    own. Raises ValueError for an own knob with the name of another of the loop's, or with one that Python has no
    attribute for.
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

    @cached_property
    def also_called(self) -> Mapping[str, str]:
        """What people write -> the knob, where the distance between the words does not lead there."""
        return {other: name for name, row in self.items() for other in row.also}

    @cached_property
    def requiring(self) -> Mapping[str, Requires]:
        """What knobs need of another, by their name; those that need nothing are left out."""
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
        """The knobs by how they move a step's peak memory."""
        moves: tuple[Memory, ...] = get_args(Memory)
        return {move: tuple(name for name, row in self.items() if row.memory == move) for move in moves}

    @cached_property
    def scaled(self) -> tuple[str, ...]:
        """Knobs of numbers that change the memory of a sample or of a parameter, as a width does."""
        return tuple(name for name in self.by_memory["group"] if self[name].domain.type in (int, float))

    def as_raw(self) -> dict[str, Any]:
        """Returns the own rows as a record keeps them; `of_raw` reads them back."""
        return {name: row.as_raw() for name, row in self.own.items()}


_in_use = KnobTable()


def table() -> KnobTable:
    """Returns the rows of the workload that this process works on; without one, those of the loop alone."""
    return _in_use


def use(rows: KnobTable) -> KnobTable:
    """Makes these the rows of the workload that this process works on; returns those before."""
    global _in_use
    before, _in_use = _in_use, rows
    return before


@contextmanager
def using(rows: KnobTable) -> Iterator[None]:
    """Makes these the rows that are in use inside the block, as where a study is read that was of another workload."""
    before = use(rows)
    try:
        yield
    finally:
        use(before)


def kind_of(name: str) -> Kind:
    """Returns how the knob may be searched: "system", "learning" or "both"."""
    return table()[name].kind


def domain_of(name: str) -> Domain:
    """Returns the values the knob may take."""
    return table()[name].domain


def is_active(name: str, values: Mapping[str, object]) -> bool:
    """Returns False for a knob whose requirement `values` do not meet, such as a prefetch without workers.

    True for a name that is no knob, as records of another version may hold.
    """
    requires = table().requiring.get(name)
    return requires is None or requires.met(values.get(requires.knob, table().defaults[requires.knob]))
