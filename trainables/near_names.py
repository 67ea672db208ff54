"""Names in a workload's file that nobody reads: a hook that is misspelt, and what is said beside a class."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

HOOKS = (
    *("model", "dataset", "loss", "evaluate", "collate", "length", "augment", "phases", "parameter_groups"),
    *("optimizer", "schedule", "blocks", "baselines"),
)
"""The methods of the contract."""
ATTRIBUTES = ("objectives", "default_space", "options", "knobs")
"""What a class of the contract has beside its methods."""
IN_CLASS = {"OBJECTIVES": "objectives", "SPACE": "default_space", "OPTIONS": "options", "BASELINES": "baselines"}
"""What a module with `def train(run)` says, and where a class of the contract says it."""
LIKE = 0.8
"""How alike two names are, 0 to 1, from where on one is taken for the other misspelt."""


def fault_of_class(workload: Any, module: Any) -> str:
    """Returns what a class of the contract, or its module, says that nobody reads, and what to do; "" where nothing."""
    names = [n for n in dir(workload) if not n.startswith("_")]
    held = {name: inspect.getattr_static(workload, name) for name in names}  # a property is not asked
    # What a class of an installed package has beside them, such as `optimizers`, nobody can rename.
    own = {n for c in type(workload).__mro__ if c.__module__ == type(workload).__module__ for n in vars(c)}
    is_method = {name: callable(one) or isinstance(one, classmethod) for name, one in held.items()}
    for known, methods in ((HOOKS, True), (ATTRIBUTES, False)):
        held_so = [n for n in names if is_method[n] is methods]
        slip = _slip(held_so, known, own)
        if slip:
            return f"WORKLOAD has {slip[0]}, which nobody reads: is it `{slip[1]}`? Else give it a leading underscore"
    for constant, attribute in IN_CLASS.items():
        given, read = getattr(module, constant, None), getattr(workload, attribute, None)
        if isinstance(given, Mapping) and not callable(read) and given != read:
            named = "a method `baselines(self, config)`" if constant == "BASELINES" else f"its `{attribute}`"
            return f"{constant} beside WORKLOAD is not read, but for a train(run): a class says it as {named}"
    return _fault_of_module(module, ("WORKLOAD", "BEFORE"))


def fault_of_loop(module: Any) -> str:
    """Returns what a module with a loop of its own says that nobody reads, and what to do; "" where nothing."""
    return _fault_of_module(module, (*IN_CLASS, "BEFORE"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most like `name`, "" where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=LIKE)), "")


def _fault_of_module(module: Any, known: Collection[str]) -> str:
    own = [n for n, value in vars(module).items() if n.isupper() and isinstance(value, Mapping)]
    slip = _slip(own, known, own)
    return f"{slip[0]} is not read: is it {slip[1]}? Else give it a leading underscore" if slip else ""


def _slip(held: Collection[str], known: Collection[str], own: Collection[str]) -> tuple[str, str] | None:
    """Returns an own name of those held, and the known one that it is most like, of those that are not held."""
    lacking = [name for name in known if name not in held]
    theirs = [name for name in held if name in own and name not in known]
    pairs = ((name, nearest(name.lower(), map(str.lower, lacking))) for name in theirs)
    return next(((n, found.upper() if n.isupper() else found) for n, found in pairs if found), None)
