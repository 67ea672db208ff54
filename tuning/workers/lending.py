"""A warm process, lent by the study that probed in it to the Ray actor that trains next. Needs neither torch nor Ray.

What has loaded torch, data and model for the probes need not load them a second time for the first trial. The process
stays the study's child and ends with it; it ends, too, with the actor it was lent to.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.workers.worker_config import Shrink


@dataclass(frozen=True)
class Failed:
    """An exception of the other process, in words: what a user's file defines cannot be loaded here."""

    kind: str
    text: str
    traceback: str


class LostError(Exception):
    """The lent process is gone."""


@dataclass(frozen=True)
class Door:
    """Where a lent process waits for whoever has the key: a socket file in a folder of its user's own."""

    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ct-"))  # mode 0700
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def _address(self) -> str:
        return str(Path(self.folder) / "door")

    def listener(self) -> Listener:
        """Returns what listens behind the door."""
        return Listener(self._address, "AF_UNIX", authkey=self.key)

    def borrow(self) -> Borrowed | None:
        """Returns the process behind the door; None where somebody has it already, or it is gone."""
        try:
            return Borrowed(Client(self._address, "AF_UNIX", authkey=self.key))
        except (OSError, EOFError, AuthenticationError):  # the last: a file that another listens behind
            return None

    def close(self) -> None:
        """Removes it."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)


class Borrowed:
    """A process of trials as `workers.session.Session` is within its own; one trial at a time.

    Every method raises LostError where the process is gone, RuntimeError where it failed in a way that is no result.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def use_threads(self, count: int) -> None:
        """Does as `Session.use_threads`."""
        self.ask("use_threads", count)

    def trial(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int, *, shrink: Shrink = "all") -> BorrowedTrial:
        """Returns a trial that has not begun."""
        self.ask("begin", dict(knobs), plan, seed, shrink)
        return BorrowedTrial(self)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Returns the answer to a request."""
        try:
            self._connection.send((method, arguments))
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            raise LostError from error
        if isinstance(answer, Failed):
            raise RuntimeError(f"{answer.kind}: {answer.text}")
        return answer


@dataclass(frozen=True)
class BorrowedTrial:
    """A trial in a lent process, as `session.Trial`."""

    process: Borrowed

    def advance(self, beat_s: float) -> dict[str, Any]:
        """Returns `Trial.advance`."""
        found: dict[str, Any] = self.process.ask("advance", beat_s)
        return found

    def end(self) -> dict[str, Any]:
        """Returns `Trial.end`."""
        found: dict[str, Any] = self.process.ask("finish")
        return found
