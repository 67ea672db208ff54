"""A training in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


def trained(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the result of `python ARGUMENTS --out FOLDER --json`, the folder being temporary.

    `arguments` begin with `-m tuning train`; `environment` is added to this process's own. Raises RuntimeError with the
    training's last words where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *arguments, "--out", f"{folder}/train", "--json"]
        everything = {**os.environ, **(environment or {})}
        done = subprocess.run(command, env=everything, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))
