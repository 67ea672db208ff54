"""Hashes a workload's file and the user's own modules it imports, to notice whether code differs in two places."""

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
"""Folders of installed packages."""
MOST_FILES = 1000
"""Modules read at most: more belong to a library, wherever it lies."""


def source_hash(workload: Workload | OwnLoop) -> str:
    """Returns a sha256 of the workload's file and of the modules that it imports; "" without a file.

    Modules of Python, of cardtune, of installed packages (their versions are recorded elsewhere), and modules that
    cannot be read are left out.
    """
    try:
        path = workload.path if isinstance(workload, OwnLoop) else inspect.getsourcefile(type(workload))
    except TypeError:
        return ""
    return file_hash(Path(path)) if path else ""


def file_hash(path: Path) -> str:
    """Returns the sha256 of a file and of the user's own modules that it imports; raises OSError."""
    digest = hashlib.sha256(path.read_bytes())
    for name, content in sorted(_read_imports(path.resolve()).items()):
        digest.update(f"\n{name}\n".encode() + content)
    return digest.hexdigest()


def _read_imports(first: Path) -> dict[str, bytes]:
    """Returns the contents of the modules that a file imports, directly or not, by their dotted names."""
    contents: dict[str, bytes] = {}
    root, package = first.parent, list[str]()
    while (root / "__init__.py").exists() and root.name:
        root, package = root.parent, [root.name, *package]
    places = [*sys.path, *(str(p) for p in (first.parent, root) if str(p) not in sys.path)]
    waiting = [(first.read_bytes(), ".".join(package))]
    while waiting and len(contents) < MOST_FILES:
        text, inside = waiting.pop()
        for name in _names(text, inside):
            for module, path in _files(name, places):
                if path == first or module in contents:
                    continue
                try:
                    contents[module] = path.read_bytes()
                except OSError:  # in an archive, or without permission
                    continue
                waiting.append((contents[module], module if path.name == "__init__.py" else module.rpartition(".")[0]))
    return contents


def _names(text: bytes, package: str) -> Iterator[str]:
    """Yields the absolute dotted names that a file of `package` may import."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


@functools.cache
def _installed_names() -> frozenset[str]:
    """Returns the top-level names of installed packages, including editable ones."""
    return frozenset(packages_distributions())


def _files(name: str, places: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields the user's modules in a dotted name, packages first; its last part need not be a module."""
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
        if count == 1 and parts[0] in _installed_names():
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield ".".join(parts[:count]), Path(spec.origin).resolve()
        if not spec.submodule_search_locations:
            return
        places = [str(place) for place in spec.submodule_search_locations]
