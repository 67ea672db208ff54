"""Whether a workload's code is the same in two places: a hash of its file and of the user's own modules it imports."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from trainables.workload import OwnLoop, Workload

_OURS = frozenset({"trainables", "tuning", "search_spaces"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def source_hash(workload: Workload | OwnLoop) -> str:
    """Returns a sha256 of the file that defines the workload and of the modules that it imports, "" without a file.

    Left out are Python's modules, ours, and what is installed: its versions are another matter.
    """
    try:
        path = workload.path if isinstance(workload, OwnLoop) else inspect.getsourcefile(type(workload))
    except TypeError:
        return ""
    if not path:
        return ""
    digest = hashlib.sha256(Path(path).read_bytes())
    for name, file in sorted(_imported(Path(path).resolve()).items()):
        digest.update(f"\n{name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _imported(first: Path) -> dict[str, Path]:
    """Returns the files that a file imports, and those that these import, each by its dotted name."""
    found: dict[str, Path] = {}
    waiting = [(first, "")]
    while waiting:
        file, package = waiting.pop()
        for name in _names(file, package):
            for known, path in _files(name, first.parent):
                if path != first and known not in found:
                    found[known] = path
                    waiting.append((path, known if path.name == "__init__.py" else known.rpartition(".")[0]))
    return found


def _names(file: Path, package: str) -> Iterator[str]:
    """Yields the dotted names that a file of a package may import, as they stand in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            yield from (f"{base}.{one.name}".strip(".") for one in node.names)


def _files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the modules of a dotted name that are the user's, its packages first; a last part may be no module."""
    parts, places = name.split("."), [str(folder), *sys.path]
    if parts[0] in sys.stdlib_module_names or parts[0] in _OURS:
        return
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(parts[count - 1], places)
        if spec is None or spec.origin == "frozen" or (spec.origin and _INSTALLED & set(Path(spec.origin).parts)):
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield ".".join(parts[:count]), Path(spec.origin).resolve()
        if not spec.submodule_search_locations:
            return
        places = [str(place) for place in spec.submodule_search_locations]
