"""The worker: a warm process beside the study, which has the machine to itself while it measures. No Ray here.

What runs in it is `measuring.py`. A training from best.yaml, `python -m tuning train`, runs in such a process too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from typing import Any, cast

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.config.errors import PreflightError
from tuning.workers.lending import Borrowed, Door, Failed
from tuning.workers.worker_config import WorkerConfig


class Worker:
    """The process as a stage sees it (`search.protocols.Profiler`): started by `start` or the first call, or anew.

    Every method raises PreflightError where the workload fails in a way that is no result, or the process is lost.
    """

    def __init__(self, setting: WorkerConfig, *, start_timeout_s: float = 180.0) -> None:
        self._setting, self._timeout_s = setting, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lent: tuple[subprocess.Popen[bytes], Door] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)

    @property
    def cap_bytes(self) -> int | None:
        """What a trial may take that has the device to itself."""
        return self._setting.cap_bytes

    def describe(self, knobs: Mapping[str, Scalar]) -> dict[str, Any]:
        """Returns what the process knows of device and workload; the first call waits for its imports."""
        return self._ask("describe", dict(knobs))

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns `Session.footprint`."""
        return self._ask("footprint", dict(knobs), list(micro_batches))

    def probe(
        self, knobs: Mapping[str, Scalar], time_s: float, spread_frac: float, best_samples_per_s: float
    ) -> dict[str, Any]:
        """Returns `Session.probe`."""
        return self._ask("probe", dict(knobs), time_s, spread_frac, best_samples_per_s)

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns `Session.window`."""
        return self._ask("window", dict(knobs), window_s, seed)

    def train(self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns `Session.train`."""
        plan = Plan(samples=samples, milestones=tuple(milestones), cap_bytes=self._setting.cap_bytes)
        return self._ask("train", dict(knobs), plan, seed)

    def trainer(self) -> Borrowed:
        """Returns the process for trials, a new one where there is none: until `end`, or a measurement asked for here.

        It gives back what measuring has left, and is from then on the first to go where the machine's memory ends.
        """
        had_one = self._process is not None
        try:
            self._ask("make_way")
        except PreflightError:
            if not had_one:
                raise
            self._ask("make_way")  # it was lost since it measured
        return Borrowed(self._connection)

    def last_words(self) -> str:
        """Returns how a process that was lost has ended, and the last line it wrote; the next call starts another.

        Raises RuntimeError where there was none.
        """
        if self._process is None:
            raise RuntimeError("nothing was started that could be lost")
        code = self._process.wait()
        self.end()
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return f"{how}; {last}" if last else how

    def lend(self) -> Door | None:
        """Returns where the process is to be had by another, once; None where there is none.

        It ends with the one who takes it, at the latest with the next call here, which starts a new one.
        """
        if self._process is None or not self._is_ready:
            self.end()
            return None
        door = Door()
        try:
            self._ask("lend", door)
        except PreflightError:  # it was lost, and is ended: who would have had it loads for itself
            door.close()
            return None
        except BaseException:
            door.close()
            raise
        self._lent, self._process = (self._process, door), None
        self._connection.close()
        return door

    def end(self) -> None:
        """Ends the process, and leaves its memory, on a card its context too, to whoever measures next."""
        if self._lent is not None:
            process, door = self._lent
            _end(process)
            door.close()
            self._lent = None
        if self._process is not None:
            _end(self._process)
            self._connection.close()
            self._process = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._said.close()

    def start(self) -> None:
        """Starts the process where there is none, and does not wait until it has loaded torch, data and model."""
        if self._process is not None:
            return
        self.end()
        ours, theirs = Pipe()
        self._said.truncate(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tuning.workers.serve", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written to: its end tells the process that we are gone
            stdout=self._said,
            stderr=self._said,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._connection = ours
        self._connection.send(self._setting)
        self._is_ready = False

    def _await(self) -> None:
        if not self._connection.poll(self._timeout_s):
            self.end()
            raise PreflightError(
                f"the measuring process was not ready after {self._timeout_s:.0f} s",
                remedy="look at the machine's load",
            )
        self._answer("the measuring process cannot start")
        self._is_ready = True

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.start()
        if not self._is_ready:
            self._await()
        try:
            self._connection.send((method, arguments))
        except OSError:
            self._lost()
        answer = self._answer("the workload failed while it was measured")
        if answer.get("retire"):  # its device context is lost, or memory: the next call starts another
            self.end()
        return answer

    def _answer(self, failed: str) -> dict[str, Any]:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._lost()
        if isinstance(answer, Failed):
            self.end()
            raise PreflightError(
                f"{failed}: {answer.kind}: {answer.text}", remedy="run the workload contract suite on it, see README.md"
            ) from RuntimeError(answer.traceback)
        return cast(dict[str, Any], answer)

    def _lost(self) -> None:
        killed = self._process is not None and self._process.wait() == -signal.SIGKILL
        remedy = "less memory: a smaller micro_batch_size" if killed else "mend what it names"
        raise PreflightError(f"the measuring process was lost: {self.last_words()}", remedy=remedy)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    cast(Any, process.stdin).close()
