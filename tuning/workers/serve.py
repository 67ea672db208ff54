"""The main program of a worker's process: a session that answers whoever started it, until they are gone.

It says that it listens; the reference of a workload asks for what its file declares, a `WorkerConfig` for the session.

`Worker` starts it; FD is the socket of requests and answers:

    python -m tuning.workers.serve FD
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from tuning.config.complete import Declared
from tuning.config.errors import ConfigError
from tuning.search.protocols import TrialState
from tuning.workers import leftovers, own_workload, user_code
from tuning.workers.worker_config import Refused


def serve(connection: Connection) -> None:
    """Loads the workload, then answers one request after the other until the other end is closed.

    A trial sends its states before its result; what comes back for each is when to send the next (`RunningTrial.run`).
    """
    # They load torch, for seconds; a thread hears meanwhile of a study that ends.
    from trainables.batches import fork_workers
    from trainables.own_count import OwnResident
    from tuning.workers.session import Session

    fork_workers()
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(True)
        while isinstance(asked := connection.recv(), str):
            connection.send(_declared(asked))
        try:
            session = Session(asked)
            session.warm(session.setting.start)
        except (Exception, SystemExit) as error:  # whatever a workload's loading raises: the study says it
            connection.send(user_code.failed(error))
            return
        connection.send(isinstance(session.resident, OwnResident))

        def tell(state: TrialState) -> float:
            connection.send(state)
            return float(connection.recv())

        while True:
            method, arguments = connection.recv()
            _say_where_on_a_signal()
            try:
                answer = getattr(session, method)(*arguments, *([tell] if method == "trial" else []))
            except (Exception, SystemExit) as error:  # likewise, where it is no result
                answer = user_code.failed(error)
            try:
                connection.send(answer)
            except (TypeError, AttributeError, pickle.PicklingError) as error:  # a value of a user's file
                connection.send(user_code.failed(error))


def _declared(ref: str) -> Declared | Refused:
    try:
        return own_workload.declared(ref)
    except ConfigError as error:
        cause = error.__cause__
        shown = "" if cause is None else "".join(traceback.format_exception(cause))
        return Refused(error.what, error.allowed, error.remedy, shown)


def _say_where_on_a_signal() -> None:
    """Has the process write where it stands, for one who waits in vain; Lightning's Trainer has turned that off."""
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def _end_with_the_study() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    leftovers.end(os.environ.get(leftovers.MARK, "").rpartition("/")[2] or "none")
    if os.getpgrp() == os.getpid():  # `Worker` starts it so; loader processes that wait in the user's code end too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _NoTerminal(io.TextIOBase):
    """Standard input of a worker: input() and a debugger would wait for ever."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Raises RuntimeError."""
        raise RuntimeError("input() or a debugger, and there is no terminal here")


def _no_breakpoint(*_: object, **__: object) -> None:
    raise RuntimeError("breakpoint(), and there is no terminal here")


def main() -> None:
    """Serves the one who started this process, and ends with them."""
    sys.stdin, sys.breakpointhook = _NoTerminal(), _no_breakpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is heard by the study, which ends this process
    _say_where_on_a_signal()
    with contextlib.suppress(OSError):  # what the kernel ends first where memory ends; the study lives on
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    del sys.argv[1:]  # a command line that their code reads is empty
    serve(connection)


if __name__ == "__main__":
    main()
