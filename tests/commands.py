"""Our commands as a person runs them: own process, own folder, and a way to wait for a condition."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tuning.memory.tracing import shim

ROOT = Path(__file__).parent.parent
MINE = ROOT / "tests" / "data" / "mine.py"


def share_library(folder: Path) -> None:
    """Puts the library of fake CUDA, which takes 10 s to compile, into `folder`/cache, once made for all tests."""
    with suppress(shim.NoShim):
        made = shim.library().parent
        own = folder / "cache" / "cardtune"
        own.mkdir(parents=True)
        (own / made.name).symlink_to(made)


@contextmanager
def heard_interrupts() -> Iterator[None]:
    """Processes started within hear SIGINT, though a shell's `make test &` has it ignored, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start(module: str, arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Returns the running command, its output in `folder`/out and /err, in a process group of its own.

    `module` may be the path of a script.
    """
    # A cache of its own: what one test's run learns about memory is not to be known to another's.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    if module == "pytest":  # a session of its own, which does not end what is left of ours
        del environment["CARDTUNE_TEST_SESSION"]
    with heard_interrupts(), (folder / "out").open("a") as out, (folder / "err").open("a") as err:
        command = [sys.executable, *([module] if os.sep in module else ["-m", module]), *arguments]
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=err, text=True, start_new_session=True
        )


def run(module: str, arguments: Sequence[str], folder: Path, timeout_s: float = 280.0) -> int:
    """Returns the exit code of a whole command; what it printed is in `folder`/out and /err."""
    process = start(module, arguments, folder)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120.0) -> bool:
    """Returns True once the condition holds, False when the process ended before; raises TimeoutError."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return condition()
        pause.wait(0.005)
    raise TimeoutError(f"nothing came of it in {timeout_s:.0f} s")
