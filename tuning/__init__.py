"""Finds the fastest configuration of a training loop that keeps its accuracy and fits its card."""

import importlib
import os
import sys
from pathlib import Path

__version__ = "0.1.0"
_API = ("Configuration", "LoadedBest", "Result", "load_best", "load_model", "read_run", "tune")


def __getattr__(name: str) -> object:
    """Returns a name of `tuning.api`, loaded when it is asked for: `--help` must not wait for it."""
    if name in _API:
        return getattr(importlib.import_module("tuning.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])


def search_path() -> str:
    """Returns where this process finds modules, as PYTHONPATH has it: a process of ours is to find the same."""
    return os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)


def _behind_the_library(folders: list[str]) -> list[str]:
    """Returns the folders of modules with the first, the working folder, behind Python's own and before others."""
    installed = next((n for n, folder in enumerate(folders) if folder.endswith("-packages")), len(folders))
    return [*folders[1:installed], folders[0], *folders[installed:]]


if sys.argv[:1] == ["-m"] and sys.path[:1] == [str(Path.cwd())]:
    # `python -m tuning.run` where a file called argparse.py stands: Python looks there first, and would take it.
    sys.path[:] = _behind_the_library(sys.path)
