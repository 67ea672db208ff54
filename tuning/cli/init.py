"""python -m tuning init [FOLDER]: writes one training in both ways, by the contract and by a loop of its own."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tuning.config import atomic
from tuning.config.errors import ConfigError

FILES = {
    "my_workload.py": "the contract: model, data, loss and quality; the loop is cardtune's",
    "my_loop.py": "a loop of its own: def train(run)",
}
"""The files that are written, by name, each with a description."""


def main(arguments: Sequence[str]) -> int:
    """Writes the files and returns the exit code; raises ConfigError where one of them is there, or none can be."""
    does = "Writes an example that runs as it stands, to put yours in its place. Overwrites nothing."
    made = argparse.ArgumentParser(prog="python -m tuning init", description=does)
    made.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where to write it  [this folder]")
    folder = Path(made.parse_args(arguments).folder)
    if reason := atomic.unwritable(folder):
        what = f"{folder} cannot be written: {reason}"
        raise ConfigError(what, allowed="a folder of yours", remedy="python -m tuning init FOLDER, another one")
    for name in FILES:
        if (folder / name).exists() or (folder / name).is_symlink():
            what = f"{folder / name} is there already, and nothing is overwritten"
            raise ConfigError(what, remedy="python -m tuning init FOLDER, another one")
    with atomic.folder(folder, "init"):
        for name, what in FILES.items():
            text = (resources.files("tuning") / "examples" / name).read_text(encoding="utf-8")
            print(f"wrote {atomic.write_text(folder / name, text)}: {what}")
    for name in FILES:
        print(f"next: python -m tuning.run workload={shlex.quote(str(folder / name))} search.max_time=2m")
    return 0
