"""Signals during a training: the first is kept until a whole step is saved, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP ended the training: what became of it, and a line on how to go on, if it had begun."""

    def __init__(self, signum: int, said: str, go_on: str = "") -> None:
        super().__init__(f"{signal.Signals(signum).name}{said}")
        self.signum, self.go_on = signum, go_on


class StopSignals:
    """Hears SIGINT, SIGTERM and SIGHUP: the first is kept in `signum`, a second ends the process at once.

    While `at_once` holds, the first one raises Interrupted: before the first step there is nothing to save.
    """

    def __init__(self) -> None:
        self.signum, self.at_once, self.go_on = 0, True, ""
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # nohup has SIGHUP ignored. A shell's background has SIGINT ignored, and whoever sends one wants it heard.
        heard = [n for n in names if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._before = {name: signal.signal(name, self._heard) for name in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A loader's worker, which inherits this. Ctrl-C reaches it too, and it must live until the checkpoint.
            if signum != signal.SIGINT:
                os._exit(128 + signum)
        elif self.signum:
            os.write(2, f"\nended at once{self.go_on and '; resume with: '}{self.go_on}\n".encode())
            os._exit(128 + signum)
        else:
            self.signum = signum
            if self.at_once:
                raise Interrupted(signum, " before the first step")
