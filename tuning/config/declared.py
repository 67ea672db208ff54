"""What a workload's file says of itself, read without running it: its default space, its options, its own knobs."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainables.knob_columns import Knob
from tuning.config.errors import ConfigError


@dataclass(frozen=True)
class Declared:
    """What the class behind WORKLOAD declares; None for what is not written as a literal."""

    default_space: Mapping[str, Any] | None
    options: Mapping[str, Any] | None
    knobs: Mapping[str, Knob] | None
    hooks: tuple[str, ...] = ()
    """Its methods."""
    before: Mapping[str, Any] | None = field(default_factory=dict)
    """The module's BEFORE; empty where there is none."""


def declared(ref: str) -> Declared:
    """Returns what the workload's class declares; without `options` or `knobs`, it has none.

    `ref` is the path of a .py file, or a dotted module. Raises ConfigError for a file that is no Python or holds no
    WORKLOAD, and for a knob that cannot be.
    """
    path = _file(ref)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        what = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"workload={ref}{where}: {what}", remedy="a .py file that can be imported") from None
    module = dict(_assignments(tree.body))
    found = module.get("WORKLOAD")
    names = {getattr(node, "name", "") for node in tree.body}
    if found is None and "WORKLOAD" not in names and "train" in names:
        raise ConfigError(
            f"workload={ref} has a loop of its own: its memory cannot be predicted, and nothing was measured",
            remedy=f"python -m tuning.run workload={ref} search.trials=0, which measures it in probes",
        )
    if found is None and "WORKLOAD" not in names:
        raise ConfigError(
            f"workload={ref} has no module-level WORKLOAD", remedy="add one, such as WORKLOAD = MyWorkload()"
        )
    name = getattr(found.func if isinstance(found, ast.Call) else found, "id", "WORKLOAD")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    body = next((node.body for node in classes if node.name == name), [])
    values = dict(_assignments(body))
    options = _literal(values["options"]) if "options" in values else {}
    knobs = _knobs(ref, values["knobs"]) if "knobs" in values else {}
    methods = tuple(node.name for node in body if isinstance(node, ast.FunctionDef))
    before = _literal(module["BEFORE"]) if "BEFORE" in module else {}
    return Declared(_literal(values.get("default_space")), options, knobs, methods, before)


def _file(ref: str) -> Path:
    if ref.endswith(".py"):
        return Path(ref)
    try:
        spec = importlib.util.find_spec(ref)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"workload={ref}: {error}", remedy="run from the folder that holds it") from None
    if spec is None or spec.origin is None:
        raise ConfigError(f"workload={ref}: there is no such module", remedy="run from the folder that holds it")
    return Path(spec.origin)


def _assignments(body: list[ast.stmt]) -> list[tuple[str, ast.expr]]:
    found: list[tuple[str, ast.expr]] = []
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        found += [(t.id, value) for t in targets if isinstance(t, ast.Name) and isinstance(value, ast.expr)]
    return found


def _literal(value: ast.expr | None) -> Mapping[str, Any] | None:
    try:
        found = ast.literal_eval(value) if value is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else None


def _knobs(ref: str, value: ast.expr) -> Mapping[str, Knob] | None:
    """Returns the knobs of {"name": Knob(literals), ...}, None where it is written otherwise."""
    found: dict[str, Knob] = {}
    pairs = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else [(None, value)]
    for key, call in pairs:
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or not isinstance(call, ast.Call):
            return None
        if getattr(call.func, "id", getattr(call.func, "attr", "")) != "Knob":
            return None
        try:
            given = [ast.literal_eval(argument) for argument in call.args]
            named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        try:
            found[key.value] = Knob(*given, **named)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"workload={ref}: knobs: {key.value}: {error}", remedy="mend it in the file") from None
    return found
