"""What runs in the laboratory's process: a session that answers the study's requests.

python -m tuning.backends.measuring FD      # started by `Laboratory`; FD is the socket of requests and answers
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from tuning.backends.laboratory import Failed
from tuning.backends.session import Session


def _serve(connection: Connection) -> None:
    """Answers requests until there are no more; an exception is an answer too."""
    with contextlib.suppress(EOFError):
        try:
            session = Session(connection.recv())
            session.warm({})
        except Exception as error:  # whatever a workload's loading raises: the study says it
            connection.send(Failed.of(error))
            return
        connection.send({})
        while True:
            method, arguments = connection.recv()
            try:
                answer = getattr(session, method)(*arguments)
            except Exception as error:  # likewise, where it is no result
                answer = Failed.of(error)
            connection.send(answer)


def _end_with_the_study() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)


def main() -> None:
    """Serves the study that started this process, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is heard by the study, which ends this process
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
