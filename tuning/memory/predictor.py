"""Predictions of a step's memory, from a process of their own with a time limit; answers are kept on disk.

The process imports torch and patches it (`tuning.memory.tracing`); here nothing does, so that stages may ask.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainables.files import cache_dir, write_whole
from trainables.knobs import KnobTable, Options, Scalar
from trainables.source import file_hash
from tuning import search_path
from tuning.memory.prediction import Prediction

COMPILERS = ("g++", "c++", "clang++")
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "timm")
MOST_ENTRIES = 1000
"""So many files of a folder that an option names are looked at."""


@dataclass(frozen=True)
class Request:
    """A configuration to predict: a workload as in `workload=`, its options, and knobs; others are at their defaults.

    `kernels` says whose are traced: "cuda" those of a card of compute `capability`, also where there is none; "cpu"
    what a virtual card on a machine without one counts. The knob micro_batch_size is ignored: a prediction is for all.
    """

    workload: str
    options: Options
    knobs: Mapping[str, Scalar]
    kernels: Literal["cuda", "cpu"]
    capability: tuple[int, int] = (8, 6)


def default_cache() -> Path | None:
    """Returns the user's folder of predictions; None where there is no home."""
    try:
        return cache_dir() / "predictions"
    except OSError:
        return None


def predict_all(
    requests: Sequence[Request], table: KnobTable, *, cache: Path | None, timeout_s: float = 120.0
) -> list[Prediction]:
    """Returns a prediction for each request, from the `cache` folder where it is known; never raises for what it meets.

    `table` has the knobs of their workload. If a step cannot be traced within `timeout_s` of all, the prediction is of
    confidence "none", and its notes say why. Requests of the same kernels and capability share one process: starting
    it, reading the workload's data and tracing the first step take 4 to 8 s, each further one a second or so.
    """
    deadline = time.monotonic() + timeout_s
    wire = [_wire(request, table) for request in requests]
    found: dict[str, Prediction] = {}
    asked: dict[str, dict[str, str]] = {}
    prints: dict[str, str] = {}
    for request, line in zip(requests, wire, strict=True):
        source = f"{request.workload} {request.options}"
        if source not in prints:  # once for all of them: it reads every module of the user's
            prints[source] = fingerprint(request.workload, request.options)
        key = _key(line, prints[source])
        known = _kept(cache, key)
        if known is not None:
            found[line] = known
        else:
            asked.setdefault(f"{request.kernels} {request.capability}", {})[line] = key
    for keys in asked.values():
        found |= _ask(list(keys), deadline, {line: (cache, key) for line, key in keys.items()})
    return [found[line] for line in wire]


def _wire(request: Request, rows: KnobTable) -> str:
    """Returns the request as a line of JSON, less what does not change its answer."""
    whole = rows.whole(request.knobs)
    knobs: dict[str, Scalar] = {n: whole[n] for n, row in rows.items() if row.memory in ("group", "minor", "switch")}
    for name, value in knobs.items():  # all that matters of such a rate is whether there is one
        if rows[name].domain.type is float and rows[name].memory != "group":
            knobs[name] = (rows[name].default or value) if value else 0.0  # its range may not have any other
    knobs |= {name: request.knobs[name] for name in request.knobs if name not in rows}  # refused there, with words
    asked = {**asdict(request), "options": dict(request.options), "knobs": knobs}
    return json.dumps(asked, sort_keys=True, default=str)


def _ask(lines: list[str], deadline: float, places: Mapping[str, tuple[Path | None, str]]) -> dict[str, Prediction]:
    """Returns the tracing process's answers; one that ends early is started anew behind the line it fell over."""
    found: dict[str, Prediction] = {}
    left = list(lines)
    while left:
        answers, why = _run(left, max(1.0, deadline - time.monotonic()))
        for line, text in zip(left, answers, strict=False):
            with contextlib.suppress(ValueError):
                found[line] = Prediction.from_json(text)
                if found[line].confidence != "none":  # what was wrong may be mended outside of what the key holds
                    _keep(*places[line], text)
        missing = [line for line in left if line not in found]
        for line in missing if time.monotonic() >= deadline - 1.0 else missing[:1]:
            found[line] = Prediction("none", (why,), ())
        left = [line for line in missing if line not in found]
    return found


_tracing: set[subprocess.Popen[str]] = set()


def interrupt() -> None:
    """Ends what traces for other threads, which then raise KeyboardInterrupt."""
    for process in list(_tracing):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)


def _run(lines: Sequence[str], limit_s: float) -> tuple[list[str], str]:
    """Returns the lines that the tracing process wrote, and how it ended; at the limit it is killed."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # a card that is there would answer for one that is not
        "PYTHONPATH": search_path(),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tuning.memory.tracing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    _tracing.add(process)
    try:
        out, errors = process.communicate("\n".join(lines) + "\n", timeout=limit_s)
        last = errors.strip().splitlines()[-1:]
        why = f"the tracing process ended with {process.returncode}" + "".join(f": {line[:300]}" for line in last)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        why = f"tracing took longer than {limit_s:.0f} s and was stopped"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        _tracing.discard(process)
    if process.returncode == -signal.SIGINT:  # by `interrupt`, from another thread
        raise KeyboardInterrupt
    return [line for line in out.splitlines() if line.startswith("{")], why


def compiler(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the command of the C++ compiler, what $CXX names or the first of `COMPILERS` that is there; else []."""
    named = shlex.split(env.get("CXX", ""))
    return next((c for c in (named, *([name] for name in COMPILERS)) if c and shutil.which(c[0])), [])


def _key(line: str, source: str) -> str:
    found = os.environ.get("CXX", "") + str(bool(compiler()))
    return hashlib.sha256(f"{line} {source} {found}".encode()).hexdigest()


def fingerprint(workload: str, options: Mapping[str, object]) -> str:
    """Returns a hash of what a prediction depends on beside its request.

    These are the packages' versions, our own sources, the workload's file with what it imports of the user's, and size
    and time of the last change of files and folders that its options name, and of the files in those folders.
    """
    found = hashlib.sha256()
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for path in _sources():
        found.update(path.name.encode() + path.read_bytes())
    if own := _file(workload):
        found.update(file_hash(own).encode())
    for value in filter(None, options.values()):
        for path in _named(Path(str(value))):
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                found.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _named(path: Path) -> Iterable[Path]:
    """Yields a file, or a folder and what is in it, as far as `MOST_ENTRIES`."""
    yield path
    with contextlib.suppress(OSError, ValueError):
        yield from sorted(itertools.islice(path.iterdir(), MOST_ENTRIES))


def _sources() -> Iterable[Path]:
    ours = importlib.util.find_spec("trainables")
    folders = [Path(place) for place in ours.submodule_search_locations or []] if ours is not None else []
    found = (path for folder in [*folders, Path(__file__).parent] for path in folder.rglob("*"))
    yield from sorted(path for path in found if path.suffix in (".py", ".cpp"))


def _file(workload: str) -> Path | None:
    """Returns the file of a workload of the user's own, None of one of ours."""
    if workload.endswith(".py"):
        return Path(workload)
    spec = importlib.util.find_spec(workload) if "." in workload else None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _kept(cache: Path | None, key: str) -> Prediction | None:
    """Returns the prediction kept under a key; None where there is none, or none that can be read."""
    if cache is None:
        return None
    try:
        return Prediction.from_json((cache / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _keep(cache: Path | None, key: str, text: str) -> None:
    """Writes an answer whole; where it cannot be written, it is traced again the next time."""
    if cache is None:
        return
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(cache / f"{key}.json", text.encode())
