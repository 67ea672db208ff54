"""Ends the processes that carry a mark in their environment, whoever is their parent and whatever their session.

A child that began a session of its own is in no group of its worker, and Ray's agents live on for a minute after a
driver that was killed. Run as a program it waits for the end of its standard input, which is that of whoever started
it; it imports nothing of ours, so as to begin at once:

    python leftovers.py TOKEN FOLDER    # then ends the processes and removes the folder
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "CARDTUNE_PROCESSES"
"""The variable: tokens joined by slashes, the last that of the process itself, those before of whoever started it."""
ENDED_S = 5.0
"""How long killed processes are waited for."""


def marked(token: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with one more token in its mark."""
    return {**env, MARK: "/".join(filter(None, [env.get(MARK), token]))}


def end(token: str) -> None:
    """Kills every process with the token but this one, until none is left or `ENDED_S` are over."""
    until = time.monotonic() + ENDED_S
    while (left := list(pids(token.encode()))) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def pids(token: bytes) -> Iterator[int]:
    """Yields the processes of this user with the token; one that has ended has no environment any more."""
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().split(b"\0")
            tokens = next((v.partition(b"=")[2] for v in variables if v.startswith(MARK.encode() + b"=")), b"")
            if token in tokens.split(b"/"):
                yield int(path.name)


def main() -> None:
    """Waits for the one who started this process to end, or to close its standard input."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the study, which ends in order
        signal.signal(name, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    _, token, folder = sys.argv
    end(token)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
