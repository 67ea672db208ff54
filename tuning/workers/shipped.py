"""The files that travel to the nodes of a cluster: our packages, and a user's workload with the files beside it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import tuning
from trainables.our_knobs import OURS
from trainables.source import OWN_PACKAGES, PACKAGE_FOLDERS
from tuning.config.errors import ConfigError
from tuning.workers.worker_config import WorkerConfig

BESIDE = "shipped_workload"
"""The folder that a workload's file travels in, with all that lies beside it."""
MOST_BYTES = 100 * 2**20
"""More than that is data, which belongs on the nodes; Ray itself takes 512 MiB."""


def stage(ref: str, folder: Path, leave_out: Path) -> str:
    """Copies what travels into `folder`, an empty one, and returns the workload's reference there.

    Left out are hidden files, caches, virtual environments, `leave_out`, and what is installed. Raises ConfigError
    where more than `MOST_BYTES` would travel.
    """
    for name in OWN_PACKAGES:
        _copy(_home(name), folder / name, leave_out)
    if ref in OURS:
        return ref
    if ref.endswith(".py"):
        path = Path(ref).resolve()
        _copy(path.parent, folder / BESIDE, leave_out)
        return f"{BESIDE}/{path.name}"
    top = ref.partition(".")[0]
    home = _home(top)
    if top not in OWN_PACKAGES and not any(part in PACKAGE_FOLDERS for part in home.parts):
        _copy(home, folder / (top if home.is_dir() else home.name), leave_out)
    return ref


def arrived(config: WorkerConfig) -> WorkerConfig:
    """Returns the configuration as a worker on this node is to have it, whose modules travelled here.

    It works in the folder of the one who began the study where this node has it too, else in the workload's.
    """
    root = Path(tuning.__file__).resolve().parents[1]
    is_file = config.workload.endswith(".py")
    own = root / BESIDE if is_file else root
    folder = config.folder if config.folder and Path(config.folder).is_dir() else str(own)
    return replace(config, workload=str(root / config.workload) if is_file else config.workload, folder=folder)


def _home(name: str) -> Path:
    """Returns the folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    if spec is None or spec.origin is None:
        raise ConfigError(f"workload={name} cannot travel: it is no file", remedy="a workload in a file or a package")
    return Path(spec.origin).resolve()


def _copy(source: Path, target: Path, leave_out: Path) -> None:
    if source.is_file():
        shutil.copyfile(source, target)
        return
    files = list(_files(source, leave_out.resolve()))
    sizes = {path: path.stat().st_size for path in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise ConfigError(
            f"cluster: {source} would travel to each node, and holds {sum(sizes.values()) / 2**20:.0f} MiB; most of it "
            f"is {largest.relative_to(source)}",
            allowed=f"{MOST_BYTES >> 20} MiB",
            remedy="put data into a folder that every node has, and name it: workload.data=PATH",
        )
    for path in files:
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)


def _files(source: Path, leave_out: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(source):
        here = Path(folder)
        below[:] = [n for n in below if not _is_idle(here / n) and here / n != leave_out]
        yield from (here / n for n in names if not n.startswith(".") and (here / n).is_file())


def _is_idle(folder: Path) -> bool:
    """Returns whether a folder holds nothing that a workload reads: hidden, a cache, or a virtual environment."""
    return folder.name.startswith(".") or folder.name == "__pycache__" or (folder / "pyvenv.cfg").exists()
