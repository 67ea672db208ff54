"""Finds names in a workload's file that are never read: misspelt hooks, and constants that a class does not use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

HOOKS = (
    *("model", "dataset", "loss", "evaluate", "collate", "length", "augment", "phases", "parameter_groups"),
    *("optimizer", "schedule", "blocks", "baselines", "phase_rounds"),
)
"""The methods of the contract."""
ATTRIBUTES = ("objectives", "default_space", "options", "knobs")
"""The attributes of the contract that are no methods."""
IN_CLASS = {"OBJECTIVES": "objectives", "SPACE": "default_space", "OPTIONS": "options", "BASELINES": "baselines"}
"""The constants of a module with `def train(run)`, and their counterparts in a class of the contract."""
LIKE = 0.8
"""Similarity of two names, 0 to 1, from which one counts as a misspelling of the other."""


def fault_of_class(workload: Any, module: Any) -> str:
    """Returns a name in a class of the contract or its module that is never read, and the remedy; "" for none."""
    names = [n for n in dir(workload) if not n.startswith("_")]
    values = {name: inspect.getattr_static(workload, name) for name in names}  # properties are not evaluated
    # Names inherited from an installed package, such as `optimizers`, are ignored: the user cannot rename them.
    own = {n for c in type(workload).__mro__ if c.__module__ == type(workload).__module__ for n in vars(c)}
    is_method = {name: callable(value) or isinstance(value, classmethod) for name, value in values.items()}
    for known, methods in ((HOOKS, True), (ATTRIBUTES, False)):
        candidates = [n for n in names if is_method[n] is methods]
        slip = _slip(candidates, known, own)
        if slip:
            return f"WORKLOAD has {slip[0]}, which nobody reads: is it `{slip[1]}`? Else give it a leading underscore"
    for constant, attribute in IN_CLASS.items():
        given, read = getattr(module, constant, None), getattr(workload, attribute, None)
        if isinstance(given, Mapping) and not callable(read) and given != read:
            named = "a method `baselines(self, config)`" if constant == "BASELINES" else f"its `{attribute}`"
            return f"{constant} beside WORKLOAD is not read, but for a train(run): a class says it as {named}"
    return _fault_of_module(module, ("WORKLOAD", "BEFORE"))


def fault_of_loop(module: Any) -> str:
    """Returns a constant of a module with a custom loop that is never read, and the remedy; "" for none."""
    return _fault_of_module(module, (*IN_CLASS, "BEFORE"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most similar to `name`, "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=LIKE)), "")


def _fault_of_module(module: Any, known: Collection[str]) -> str:
    own = [n for n, value in vars(module).items() if n.isupper() and isinstance(value, Mapping)]
    slip = _slip(own, known, own)
    return f"{slip[0]} is not read: is it {slip[1]}? Else give it a leading underscore" if slip else ""


def _slip(held: Collection[str], known: Collection[str], own: Collection[str]) -> tuple[str, str] | None:
    """Returns a name of `held` that is the user's `own` and unknown, and the similar known name that is missing."""
    missing = [name for name in known if name not in held]
    unknown = [name for name in held if name in own and name not in known]
    pairs = ((name, nearest(name.lower(), map(str.lower, missing))) for name in unknown)
    return next(((n, similar.upper() if n.isupper() else similar) for n, similar in pairs if similar), None)
