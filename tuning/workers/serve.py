"""What runs in the worker's process: a session that answers the study, or then the Ray actor it is lent to.

`Worker` starts it; FD is the socket of requests and answers:

    python -m tuning.workers.serve FD
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.workers.lending import Door, Failed
from tuning.workers.session import Session, Trial
from tuning.workers.worker_config import Shrink

_DOORS: list[Door] = []
"""Of this process, to be removed with it."""


class Lendable(Session):
    """A session with a trial of its own, for who cannot hold one: another process."""

    _trial: Trial

    def begin(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int, shrink: Shrink) -> None:
        """Takes the next trial."""
        self._trial = self.trial(knobs, plan, seed, shrink=shrink)

    def advance(self, beat_s: float) -> dict[str, Any]:
        """Returns `Trial.advance`."""
        return self._trial.advance(beat_s)

    def finish(self) -> dict[str, Any]:
        """Returns `Trial.end`."""
        return self._trial.end()

    def make_way(self) -> dict[str, Any]:
        """Gives back what measuring before has left, and is the first to go where memory ends, as Ray's workers are."""
        self._clear()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        with contextlib.suppress(OSError):  # what the kernel ends first; the study, whose child this is, lives on
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        return {}


def serve(connection: Connection) -> None:
    """Answers the study until it ends or lends the process to another, whose requests are the last."""
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            session = Lendable(connection.recv())
            session.warm({})
        except Exception as error:  # whatever a workload's loading raises: the study says it
            connection.send(_failed(error))
            return
        connection.send({})
        door = _answered(session, connection)
        if door is None:
            return
        session.make_way()
        _DOORS.append(door)
        with door.listener() as listener:
            connection.send({})
            borrower = listener.accept()
        door.close()
        threading.Thread(target=_end_with, args=(borrower.fileno(),), daemon=True).start()
        _answered(session, borrower)


def _answered(session: Lendable, connection: Connection) -> Door | None:
    """Returns the door at which to wait for another, once that is asked for; None where there is nobody left."""
    while True:
        method, arguments = connection.recv()
        if method == "lend":
            door: Door = arguments[0]
            return door
        try:
            answer = getattr(session, method)(*arguments)
        except Exception as error:  # likewise, where it is no result
            answer = _failed(error)
        try:
            connection.send(answer)
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # a value of a user's file
            connection.send(_failed(error))


def _failed(error: BaseException) -> Failed:
    return Failed(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _end_with(borrower: int) -> None:
    """Ends this process as soon as the other end of the socket is closed, in the middle of a step too."""
    poll = select.poll()
    poll.register(borrower, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(1)


def _end_with_the_study() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    for door in _DOORS:
        door.close()
    os._exit(1)


def main() -> None:
    """Serves the study that started this process, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is heard by the study, which ends this process
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
