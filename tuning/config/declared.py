"""What a workload's file says of itself, read without running it: its default space and its options."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuning.config.errors import ConfigError


def declared(ref: str) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Returns `default_space` and `options` of the class behind WORKLOAD; None for what is not written as a literal.

    `ref` is the path of a .py file, or a dotted module. Without `options`, a workload has none. Raises ConfigError for
    a file that is no Python or holds no WORKLOAD.
    """
    path = _file(ref)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        what = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"workload={ref}{where}: {what}", remedy="a .py file that can be imported") from None
    found = next((value for name, value in _assignments(tree.body) if name == "WORKLOAD"), None)
    if found is None and "WORKLOAD" not in {getattr(node, "name", "") for node in tree.body}:
        raise ConfigError(
            f"workload={ref} has no module-level WORKLOAD", remedy="add one, such as WORKLOAD = MyWorkload()"
        )
    name = getattr(found.func if isinstance(found, ast.Call) else found, "id", "WORKLOAD")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    body = next((node.body for node in classes if node.name == name), [])
    values = {key: value for key, value in _assignments(body) if key in ("default_space", "options")}
    options = _literal(values["options"]) if "options" in values else {}
    return _literal(values.get("default_space")), options


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
