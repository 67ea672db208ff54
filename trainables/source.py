"""Whether a workload's code is the same in two places: a hash of its file and of the user's own modules it imports."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from trainables.workload import OwnLoop, Workload

OWN_PACKAGES = ("tuning", "trainables", "search_spaces")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Where installers put what is imported."""
MOST_FILES = 1000
"""So many are read; more are a library's, wherever it lies."""


def source_hash(workload: Workload | OwnLoop) -> str:
    """Returns a sha256 of the file that defines the workload and of the modules that it imports, "" without a file.

    Left out are Python's modules, ours, what is installed, whose versions are another matter, and what cannot be read.
    """
    try:
        path = workload.path if isinstance(workload, OwnLoop) else inspect.getsourcefile(type(workload))
    except TypeError:
        return ""
    return file_hash(Path(path)) if path else ""


def file_hash(path: Path) -> str:
    """Returns the sha256 of a file and of the user's own modules that it imports; raises OSError."""
    digest = hashlib.sha256(path.read_bytes())
    for name, content in sorted(_imported(path.resolve()).items()):
        digest.update(f"\n{name}\n".encode() + content)
    return digest.hexdigest()


def _imported(first: Path) -> dict[str, bytes]:
    """Returns what a file imports, and what that imports, each by its dotted name."""
    found: dict[str, bytes] = {}
    root, package = first.parent, list[str]()
    while (root / "__init__.py").exists() and root.name:
        root, package = root.parent, [root.name, *package]
    places = [*sys.path, *(str(p) for p in (first.parent, root) if str(p) not in sys.path)]
    waiting = [(first.read_bytes(), ".".join(package))]
    while waiting and len(found) < MOST_FILES:
        text, inside = waiting.pop()
        for name in _names(text, inside):
            for known, path in _files(name, places):
                if path == first or known in found:
                    continue
                try:
                    found[known] = path.read_bytes()
                except OSError:  # in an archive, or not ours to read
                    continue
                waiting.append((found[known], known if path.name == "__init__.py" else known.rpartition(".")[0]))
    return found


def _names(text: bytes, package: str) -> Iterator[str]:
    """Yields the dotted names that a file of a package may import, as they stand in it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            yield from (f"{base}.{one.name}".strip(".") for one in node.names)


@functools.cache
def _installed() -> frozenset[str]:
    """Returns the first names of what is installed, also from a folder elsewhere."""
    return frozenset(packages_distributions())


def _files(name: str, places: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields the modules of a dotted name that are the user's, its packages first; a last part may be no module."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] in OWN_PACKAGES:
        return
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(parts[count - 1], places)
        if (
            spec is None
            or spec.origin == "frozen"
            or (spec.origin and set(PACKAGE_FOLDERS) & set(Path(spec.origin).parts))
        ):
            return
        if count == 1 and parts[0] in _installed():
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield ".".join(parts[:count]), Path(spec.origin).resolve()
        if not spec.submodule_search_locations:
            return
        places = [str(place) for place in spec.submodule_search_locations]
