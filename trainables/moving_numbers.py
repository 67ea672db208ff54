"""Numbers that samples depend on and that change as a training goes: each loader process has a copy of its own.

A counter of reads begins at 0 in each process, and the strength of an augmentation that the loop raises stays as it was
when the process began. A change is small in the first steps, so it is tried as large as it is by the end.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_DEPTH, _ITEMS, _MOST = 4, 16, 2000
"""Levels of attributes and calls that are followed, the items of a list or dict, and objects in all."""
_CALLED = ("__getitem__", "__getitems__", "__iter__", "__call__")
_EPOCHS = (1.5, 10.0)
"""Lengths of a training at which a number is tried: a second epoch has begun, and many have passed."""


@dataclass(frozen=True)
class Number:
    """A number, text or truth value, or a tensor of one, in a dict, a list, or an object's attribute."""

    holder: Any
    key: Any

    def _held(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, dict | list) else getattr(self.holder, self.key)

    def get(self) -> Any:
        """Returns its value."""
        held = self._held()
        return held.item() if isinstance(held, Tensor | np.ndarray) else held

    def set(self, value: Any) -> None:
        """Gives it a value."""
        held = self._held()
        if isinstance(held, Tensor | np.ndarray):
            held[...] = value
        elif isinstance(self.holder, dict | list):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


def numbers_of(*roots: object) -> dict[str, Number]:
    """Returns the numbers by name that a data set and functions hold, or read from their module."""
    found, seen = dict[str, Number](), set[int]()
    for root in roots:
        if root is not None:
            found.update(_within(type(root).__name__, root, _DEPTH, seen))
    return found


def values_of(numbers: Mapping[str, Number]) -> dict[str, Any]:
    """Returns the values of numbers as they are now."""
    return {name: number.get() for name, number in numbers.items()}


def multiples(samples: int, pass_samples: int, progress: float = 1.0) -> tuple[float, ...]:
    """Returns how much larger a change is later than after the first `samples`, or after that share of a training."""
    return (*(epochs * pass_samples / samples for epochs in _EPOCHS), 1 / progress)


def decisive(
    numbers: Mapping[str, Number], before: Mapping[str, Any], times: Sequence[float], read: Callable[[], list[bytes]]
) -> str:
    """Returns the first number that has changed since `before` and by which `read` gives other samples; "" for none.

    Its change so far is tried `times` as large. All numbers have their present value after it.
    """
    now = values_of(numbers)
    changed = {name: value for name, value in now.items() if name in before and value != before[name]}

    def set_all(name: str = "", value: Any = None) -> None:
        for other in changed:
            numbers[other].set(value if other == name else now[other])

    def read_at(name: str, value: Any) -> list[bytes] | None:
        set_all(name, value)
        try:
            return read()
        except Exception:  # whatever a user's data set raises at a value that it may never get
            return None

    try:
        for name, value in changed.items():
            tried = [before[name]]
            if isinstance(value, int | float) and not isinstance(value, bool):
                kind = int if isinstance(value, int) else float
                tried = [kind(before[name] + by * (value - before[name])) for by in times]
            as_now = read_at(name, value)
            is_steady = as_now is not None and as_now == read_at(name, value)  # unlike with a generator of its own
            if is_steady and any(read_at(name, other) not in (None, as_now) for other in tried):
                return name
    finally:
        set_all()
    return ""


def _within(name: str, held: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Number]]:
    """Yields the numbers in an object's attributes or items, and those that its code reads."""
    is_other = isinstance(held, type | types.ModuleType | Tensor | np.ndarray)
    if is_other or id(held) in seen or len(seen) > _MOST or not depth:
        return
    seen.add(id(held))
    if isinstance(held, types.FunctionType):
        yield from _read_by(held, object, depth, seen)
    elif isinstance(held, dict | list):
        keys = list(held) if isinstance(held, dict) else range(len(held))
        for key in keys[:_ITEMS]:
            yield from _at(f"{name}[{key!r}]", held, key, depth, seen)
    else:
        attributes = getattr(held, "__dict__", {})
        for key in list(attributes):
            yield from _at(f"{name}.{key}", attributes, key, depth, seen)
        for called in _CALLED:
            if isinstance(method := getattr(type(held), called, None), types.FunctionType):
                yield from _read_by(method, type(held), depth, seen)


def _at(name: str, holder: Any, key: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Number]]:
    """Yields the number at a place, or those within what lies there."""
    value = holder[key] if isinstance(holder, dict | list) else getattr(holder, key, None)
    if isinstance(value, Tensor | np.ndarray):
        is_shared = isinstance(value, Tensor) and (value.requires_grad or value.is_shared())
        is_number = value.shape in ((), (1,)) and not is_shared
    else:
        is_number = isinstance(value, int | float | str)
    if is_number:
        yield name, Number(holder, key)
    else:
        yield from _within(name, value, depth - 1, seen)


def _read_by(function: types.FunctionType, owner: type, depth: int, seen: set[int]) -> Iterator[tuple[str, Number]]:
    """Yields the numbers of a module, of a class and of enclosing functions that a function's code names."""
    code = function.__code__
    if not depth or id(code) in seen:
        return
    seen.add(id(code))
    for key in code.co_names:
        if isinstance(method := getattr(owner, key, None), types.FunctionType):
            yield from _read_by(method, owner, depth - 1, seen)
        elif key in vars(owner):
            yield from _at(f"{owner.__name__}.{key}", owner, key, depth, seen)
        if key in function.__globals__:
            yield from _at(key, function.__globals__, key, depth, seen)
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if hasattr(cell, "cell_contents"):
            yield from _at(key, cell, "cell_contents", depth, seen)
