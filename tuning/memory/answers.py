"""Answers of `python -m tuning estimate`, kept on disk: replaying a large model's log for each cell takes its time."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tuning.memory import calibration

_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
_HERE = Path(__file__).parent


def fingerprint(workload: str, options: Mapping[str, object]) -> str:
    """Returns a hash of what an answer depends on beside its question.

    These are the packages' versions, our own sources, the workload's file, what was measured of CUDA's libraries, and
    of files and folders that its options name the size and the time of the last change.
    """
    found = hashlib.sha256()
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for path in _sources(workload):
        found.update(path.name.encode() + path.read_bytes())
    for measured in calibration.known(calibration.folder()):
        found.update(json.dumps(asdict(measured), sort_keys=True).encode())
    for value in options.values():
        with contextlib.suppress(OSError, ValueError):
            status = Path(str(value)).stat()
            found.update(f"{value} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def kept(cache: Path, key: str) -> dict[str, Any] | None:
    """Returns the answer kept under a key; None where there is none, or none that can be read."""
    try:
        return cast(dict[str, Any], json.loads(_path(cache, key).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def keep(cache: Path, key: str, answer: Mapping[str, Any]) -> None:
    """Writes an answer whole; where it cannot be written, it is worked out again the next time."""
    path = _path(cache, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(answer, out)
        Path(draft).replace(path)


def _path(cache: Path, key: str) -> Path:
    return cache / "answers" / f"{key}.json"


def _sources(workload: str) -> Iterable[Path]:
    ours = importlib.util.find_spec("trainables")
    folders = [Path(place) for place in ours.submodule_search_locations or []] if ours is not None else []
    yield from sorted(
        path for folder in [*folders, _HERE] for path in folder.rglob("*") if path.suffix in (".py", ".cpp")
    )
    if workload.endswith(".py"):
        yield Path(workload)
    elif "." in workload:
        spec = importlib.util.find_spec(workload)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)
