"""The handle of a worker process, which has one device or a share of it. Needs neither torch nor Ray.

A stage or an executor asks a `Worker` for work and waits; in the process `serve.py` answers, with one `Session`. The
process ends with the one that started it; after a loss the handle starts another.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning import search_path
from tuning.config.environment import of_one_process
from tuning.config.errors import ConfigError, PreflightError, UserCodeError
from tuning.journal.events import Timed, WorkerAnswer
from tuning.memory import oom
from tuning.memory.measure import Footprint
from tuning.memory.oom import Fault, Outcome
from tuning.search.protocols import TrialState
from tuning.workers import leftovers, machine, user_code
from tuning.workers.nvml import VISIBLE
from tuning.workers.worker_config import (
    ChangedKnobs,
    Description,
    Failed,
    Following,
    RankEnd,
    Refused,
    TrialOrder,
    Untrained,
    WorkerConfig,
)

if TYPE_CHECKING:
    from tuning.config.complete import Declared

HUNG = Fault("process hung", Outcome.TIMEOUT)
LATE = Fault("search.max_time was over", Outcome.CUT)
PAUSE_AFTER_S, LEAST_PAUSE_AFTER_S = 5.0, 0.5
"""So often a training answers, at the end of a window; the time that takes is inside no window."""
HANG_TIMES = 10
"""A process may take so many times its longest answer so far, and so many times `hang_s` to load the workload."""
COMPUTES_FRAC = 0.1
"""A process that uses that share of a core, its loader's processes included, hangs only after `HANG_TIMES` as long.

Ten busy processes on two cores leave each a fifth of one.
"""
COUNTED_AFTER_S = 8.0
"""The processor time of a process and its children is read where an answer takes this long, or `hang_s` / 5.

Reading it scans all processes of the machine: 8 ms with about 100 of them, under the profiler.
"""
LAST_S = 5.0
"""The seconds that an answer may take after the deadline: `search.max_time` is passed by little more."""
_ENDED_S = 10.0
"""How long a killed process is waited for; one that a driver holds cannot be killed, and is left behind."""
_LIBRARY = f"{os.sep}lib{os.sep}python"
"""In the path of every module that is Python's or installed, and in none of a user's own."""
TRIES = 2
"""A trial whose process was lost is run once more, in a new one."""
AnswerT = TypeVar("AnswerT", bound=WorkerAnswer)


@dataclass(frozen=True)
class Asked:
    """The present work of a process: its method, "import" or "load" while it begins, "" for none; and the knobs."""

    method: str = ""
    knobs: Mapping[str, Scalar] = field(default_factory=dict)


class WorkerLost(Exception):
    """The process ended, hung, or failed beside its work; `fault` says which. A new one can be asked."""

    def __init__(self, fault: Fault, said: str) -> None:
        last = said.strip().rpartition("\n")[2]
        begin = "the process was lost" if fault is oom.PROCESS_LOST else fault.name
        super().__init__((f"{begin}: {last}" if begin and last else begin or last)[:500])
        self.fault = fault

    def result(self, kind: type[AnswerT], wall_s: float = 0.0) -> AnswerT:
        """Returns the result of a kind that has this as its outcome."""
        outcome = str(self.fault.outcome)
        return kind(outcome=outcome, fault=self.fault.name, message=str(self), wall_s=wall_s)


class WorkerFailed(WorkerLost):
    """The process answered with an exception that is no outcome; `failed` is that in words."""

    def __init__(self, failed: Failed) -> None:
        said = f"{failed.kind}: {failed.text}"
        super().__init__(oom.fault(RuntimeError(said)), said)
        self.failed = failed


class Worker:
    """The handle of a process that is started by `start` or the first call, and anew after it was lost or ended.

    As a profiler (`search.protocols.Profiler`) it measures once more what its process was lost over; lost again, that
    is the measurement's outcome. UserCodeError says that the workload's code failed, PreflightError that this machine
    cannot load it. `warn` hears of what was lost.
    After `deadline`, in seconds of the monotonic clock, no answer is waited for longer than `LAST_S`, and nothing is
    tried again.
    `asked` is what the process is at, for whoever shows it.
    """

    def __init__(self, config: WorkerConfig, warn: Callable[[str], None] = lambda text: None) -> None:
        self.config, self.deadline, self.asked = config, cast(float | None, None), Asked()
        self.warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._listens = self._is_told = self._is_ready = self._has_loop = False
        self._retired = ""
        """Why the process that answered last was ended, "" if it was not."""
        self.left_behind = ""
        """What a measurement left in its process although it went well; "" for nothing."""
        self._left: list[tuple[str, str]] = []
        """The event and the reason for which the next trial runs in a new process."""
        self.loaded_at = 0.0
        """When the process had loaded the workload, by the monotonic clock."""
        self._longest_s = 0.0
        self._token = secrets.token_hex(8)
        """By which the processes are found that it has started, whatever has become of them."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)

    # -- measurements --------------------------------------------------------------------------------------------------

    def declared(self) -> Declared:
        """Returns what the file of the user's workload declares; raises ConfigError for what is wrong with it."""
        ref = self.config.workload
        try:
            try:
                answer = self._import(ref)
            except WorkerLost as lost:
                if lost.fault is not oom.PROCESS_LOST:
                    raise
                answer = self._import(ref)
        except WorkerLost as lost:
            what = f"workload={ref} could not be imported: {lost}"
            remedy = 'what is run, downloads or loads belongs into a function, or behind `if __name__ == "__main__":`'
            remedy = f"a larger search.max_time, or {remedy}" if lost.fault is LATE else remedy
            raise ConfigError(what, remedy=remedy) from lost
        if isinstance(answer, Refused):
            self.end()
            refused = ConfigError(answer.what, allowed=answer.allowed, remedy=answer.remedy)
            raise refused from (RuntimeError(answer.traceback) if answer.traceback else None)
        return answer

    def _import(self, ref: str) -> Declared | Refused:
        self.asked = Asked("import")
        self.listen()
        try:
            self._pipe.send(ref)
        except OSError as error:
            raise self._lost() from error
        return cast("Declared | Refused", self._answer(HANG_TIMES * self.config.hang_s))

    def describe(self, knobs: Mapping[str, Scalar]) -> Description:
        """Returns what the process knows of device and workload; the first call waits for its imports."""
        found = self._measured(Description, "describe", dict(knobs))
        fault, mend = found.fault, "mend what it names"
        if self._has_loop and fault in (LATE.name, HUNG.name):
            mend += " (does a train(run) go over run.batches(loader)?)"
        if fault == LATE.name:
            said = found.message.removeprefix(f"{LATE.name}: ")
            remedy = f"{mend}, or " * (self._has_loop or " in File " in said) + "a larger search.max_time"
            raise PreflightError(f"{LATE.name} before the workload was loaded: {said}", remedy=remedy)
        if fault:
            remedy = f"{mend}, or give it more time: search.hang_time=10m"
            raise PreflightError(f"the measuring process failed twice: {found.message}", remedy=remedy)
        return found

    def sanity_check(self, knobs: Mapping[str, Scalar]) -> Untrained:
        """Returns `Session.sanity_check`; raises UserCodeError where it finds something wrong with the code."""
        return self._measured(Untrained, "sanity_check", dict(knobs))

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
        """Returns `Session.kinds`."""
        return self._measured(ChangedKnobs, "kinds", dict(knobs), dict(changes))

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns `Session.footprint`."""
        return self._measured(Footprint, "footprint", dict(knobs), list(micro_batches))

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns `Session.probe`, and where it is known as `others_cpu_frac` the share of the cores that it could use
        which other programs took at the least.
        """
        process, begun = self._process, self._processor_s()
        found = self._measured(Timed, "probe", dict(knobs), time_s, best_samples_per_s, expected_s=time_s)
        busy_s, whole_s, own_s = (now - then for now, then in zip(self._processor_s(), begun, strict=True))
        is_same = self._process is not None and process in (None, self._process)  # else its seconds are gone with it
        if not is_same or whole_s <= 0:
            return found
        cores, own = os.cpu_count() or 1, self.config
        wanted = (1 if own.device == "cuda" else own.threads) * own.ranks + int(knobs.get("num_workers") or 0)
        wanted = min(wanted, cores)
        taken = cores * (busy_s - own_s) / whole_s - (cores - wanted)
        return replace(found, others_cpu_frac=max(0.0, taken / wanted))

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns `Session.window`."""
        return self._measured(Timed, "window", dict(knobs), window_s, seed, expected_s=window_s)

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns the result of a whole training, with everything the device has, or that `left_s` was over: `cut`.

        An OOM of the device is its outcome, since what is confirmed is exported as it stands: no micro-batch is halved.
        """
        plan = Plan(samples=samples, milestones=tuple(milestones), cap_bytes=self.config.cap_bytes)
        order = TrialOrder("", knobs, seed, plan, self.config.threads, "loader")
        until = time.monotonic() + left_s
        return replace(self._twice(TrialState, lambda: self._trained(order, until)), done=True)

    def _trained(self, order: TrialOrder, until: float) -> TrialState:
        states = self._states(order, until)
        for found in states:
            if not found.done and time.monotonic() >= until:
                states.close()
                return replace(found, outcome=str(Outcome.CUT), message="its time was over")
        return found

    # -- trials --------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Returns whether there is a process, as far as is known before it is asked."""
        return self._process is not None

    def trial(self, order: TrialOrder) -> Generator[TrialState]:
        """Yields the states of a trial, at its rungs and every few seconds, the last of them `done`.

        Closing the generator, which is to be done in any case, ends the trial. A process lost is an outcome, and so is
        one that cannot load the workload. `decisions` say what happened to the process since then.
        """
        decisions = [(event, f"{reason}; the trial runs in a new process") for event, reason in self._left]
        self._left, self._retired = [], ""
        if order.left_s is not None:
            self.deadline = time.monotonic() + order.left_s
        for number in range(1, TRIES + 1):
            states = self._states(order)
            try:
                for state in states:
                    yield replace(state, decisions=tuple(decisions))
                break
            except GeneratorExit:
                self._stop(states)
                raise
            except (PreflightError, UserCodeError) as error:
                yield TrialState(
                    outcome=Outcome.CRASH,
                    message=error.what[:500],
                    fatal=error.what,
                    elsewhere=error.elsewhere,
                    done=True,
                    decisions=tuple(decisions),
                )
                break
            except WorkerLost as lost:
                self.end()
                if number == TRIES or lost.fault is LATE:
                    yield replace(lost.result(TrialState), done=True, decisions=tuple(decisions))
                    break
                decisions.append(("lost", f"{lost}; it is run once more"))

    def _stop(self, states: Generator[TrialState]) -> None:
        """Ends a trial, and keeps why the next one runs in a new process, if it does."""
        try:
            states.close()
            self._left = [("retired", self._retired)] if self._retired else []
        except WorkerLost as lost:  # it was judged, and its result stands
            self.end()
            self._left = [("lost", str(lost))]

    def _states(self, order: TrialOrder, until: float = math.inf) -> Generator[TrialState]:
        """Yields the states that a process sends; closing the generator ends the trial. Raises WorkerLost."""
        state = self._ask("trial", order, self._pause_after_s(until))
        while isinstance(state, TrialState):
            try:
                yield state
            except GeneratorExit:
                if not state.done:
                    self._exchange(0.0)
                raise
            if state.done:
                return
            state = self._exchange(self._pause_after_s(until))

    def _pause_after_s(self, until: float) -> float:
        ends = min(until, math.inf if self.deadline is None else self.deadline)
        return min(PAUSE_AFTER_S, max(LEAST_PAUSE_AFTER_S, ends - time.monotonic()))

    def follow(self, training: Following) -> RankEnd:
        """Returns how the process fared in a training of several, once it is over (`Session.follow`)."""
        try:
            return cast(RankEnd, self._ask("follow", training))
        except WorkerLost as lost:
            return lost.result(RankEnd)

    # -- the process ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process where there is none, and does not wait until it has loaded torch, data and model."""
        self.spawn()
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(OSError):  # it is gone, which whoever waits for its answer hears
                self._pipe.send(self.config)

    def spawn(self) -> None:
        """Starts the process where there is none, which imports torch and waits for what is asked."""
        if self._process is not None:
            return
        ours, theirs = Pipe()
        self._said.seek(0)
        self._said.truncate()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tuning.workers.serve", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written to: its end tells the process that we are gone
            stdout=self._said,
            stderr=self._said,
            pass_fds=[theirs.fileno()],
            env=self._environment(),
            cwd=self.config.folder or None,
            process_group=0,  # with its loader's processes, which are ended together
        )
        theirs.close()
        self._connection = ours
        self._listens = self._is_told = self._is_ready = False

    def _environment(self) -> dict[str, str]:
        own = {VISIBLE: self.config.cards} if self.config.cards else {}
        if self.config.ranks > 1:  # DDP remarks on parameters that are all used
            own["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        return leftovers.marked(self._token, {**of_one_process(os.environ), "PYTHONPATH": self._search_path(), **own})

    def _search_path(self) -> str:
        """Returns where the process finds modules: as here, the folder of the workload's file left to its loading.

        A folder called `tuning` beside the file would else be taken for ours.
        """
        ref = self.config.workload
        beside = str(Path(ref).resolve().parent) if ref.endswith(".py") else ""
        return os.pathsep.join(entry for entry in search_path().split(os.pathsep) if entry != beside)

    def end(self) -> None:
        """Ends the process, and leaves its memory, on a card its context too, to whoever measures next."""
        self._killed()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._said.close()

    def _measured(self, kind: type[AnswerT], method: str, *arguments: Any, expected_s: float = 0.0) -> AnswerT:
        return self._twice(kind, lambda: cast(AnswerT, self._ask(method, *arguments, expected_s=expected_s)))

    def _twice(self, kind: type[AnswerT], work: Callable[[], AnswerT]) -> AnswerT:
        """Returns what the work comes to; if its process is lost two times, a result with that as its outcome."""
        begun = time.monotonic()
        try:
            try:
                return work()
            except WorkerFailed:
                raise
            except WorkerLost as lost:
                if lost.fault is LATE:
                    raise
                self.warn(f"{lost}; what it measured is measured once more")
                return work()
        except WorkerFailed as failed:
            raise user_code.error_of(failed.failed, self.config.workload) from None
        except WorkerLost as lost:
            return lost.result(kind, wall_s=time.monotonic() - begun)

    def _ask(self, method: str, *arguments: Any, expected_s: float = 0.0) -> WorkerAnswer:
        self.load()
        order = arguments[0] if arguments else None
        knobs = order.knobs if isinstance(order, TrialOrder | Following) else order
        self.asked = Asked(method, knobs if isinstance(knobs, Mapping) else self.asked.knobs)
        return self._exchange((method, arguments), expected_s)

    def _exchange(self, message: object, expected_s: float = 0.0) -> WorkerAnswer:
        """Returns the answer to a message; a process that is to be retired is ended."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._lost() from error
        answer = self._answer(expected_s + self.config.hang_s)
        is_state = isinstance(answer, TrialState) and not answer.done
        self.asked = self.asked if is_state else Asked("", self.asked.knobs)
        if isinstance(answer, Failed):
            self.end()
            raise WorkerFailed(answer)
        self._retired = answer.retire
        if answer.outcome == Outcome.OK and answer.retire:
            self.left_behind = answer.retire
        if answer.retire:  # its device context is lost, or memory: the next call starts another
            self.end()
        return cast(WorkerAnswer, answer)

    def renew(self) -> None:
        """Does as `load`, with another process where there is none any more."""
        if self._process is not None and self._process.poll() is not None:
            self._killed(is_lost=True)
        self.load()

    def load(self) -> None:
        """Waits until the process has loaded the workload; raises what it says where it cannot."""
        if self._is_ready:
            return
        self.asked = Asked("load")
        self.start()
        self.listen()
        answer = self._answer(HANG_TIMES * self.config.hang_s)
        if isinstance(answer, Failed):
            self.end()
            raise user_code.error_of(answer, self.config.workload)
        self._is_ready, self._has_loop, self.loaded_at = True, bool(answer), time.monotonic()

    def listen(self) -> None:
        """Waits until the process, which is started where there is none, has imported torch."""
        self.spawn()
        if not self._listens:
            self._answer(HANG_TIMES * self.config.hang_s)
            self._listens = True

    def _answer(self, idle_s: float) -> Any:
        """Returns the next answer; raises WorkerLost where the process ends before, or takes longer than it may.

        It hangs where it neither answers nor computes for `idle_s`, or computes for `HANG_TIMES` its longest answer.
        """
        begun = time.monotonic()
        late_at = math.inf if self.deadline is None else self.deadline + LAST_S
        try:
            if not self._pipe.poll(max(0.0, min(COUNTED_AFTER_S, idle_s / 5, late_at - begun))):
                self._watch(begun, idle_s, late_at)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        return answer

    def _watch(self, begun: float, idle_s: float, late_at: float) -> None:
        """Returns once there is an answer to what was asked at `begun`; raises WorkerLost as `_answer` says."""
        most_at = begun + HANG_TIMES * max(self.config.hang_s, self._longest_s)
        idle_since, counted, spent_s = begun, time.monotonic(), self._spent_s()
        while not self._pipe.poll(max(0.0, min(idle_since + idle_s, most_at, late_at) - time.monotonic())):
            now, own_s = time.monotonic(), self._spent_s()
            computes = own_s - spent_s > COMPUTES_FRAC * (now - counted)
            if computes and now < min(late_at, most_at):
                idle_since, counted, spent_s = now, now, own_s
                continue
            said = f"no answer for {now - begun:.0f} s{self._where()}"
            self.end()
            if now >= late_at and (computes or now - begun < idle_s):
                raise WorkerLost(LATE, said)
            raise WorkerLost(HUNG, f"{said}; search.hang_time gives it more time")

    def _spent_s(self) -> float:
        """Returns the processor seconds that the process and its loader's have used, 0 where it is gone.

        Loader processes that have ended are counted in their parent's times.
        """
        if self._process is None:
            return 0.0
        spent_s = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    spent_s += times.user + times.system + times.children_user + times.children_system
        return spent_s

    def _processor_s(self) -> tuple[float, float, float]:
        """Returns the seconds that the machine's cores have been busy, other virtual machines' left out; all that they
        had; and ours of them.
        """
        (busy_s, whole_s, steal_s), own = machine.processor(), os.times()
        return busy_s - steal_s, whole_s, own.user + own.system + self._spent_s()

    @property
    def _pipe(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the worker was not started")
        return self._connection

    def _lost(self) -> WorkerLost:
        """Returns how the process has ended, and the last line it wrote; the next call starts another."""
        code = self._killed(is_lost=True)
        last = self._written().rpartition("\n")[2]
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return WorkerLost(oom.PROCESS_LOST, f"{how}; {last}" if last else how)

    def _where(self) -> str:
        """Returns the line of code in which the process stands, as it tells it on a signal (`serve.main`), or ""."""
        process = self._process
        if process is None or not self._listens:
            return ""
        process.send_signal(signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if places := [line.strip() for line in self._written().splitlines() if line.lstrip().startswith("File ")]:
                return f" in {next((p for p in places if _LIBRARY not in p), places[0])}"
        return ""

    def _written(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()

    def _killed(self, *, is_lost: bool = False) -> int:
        """Ends the process and returns its exit code, 0 where there was none; one that is lost may still be ending."""
        process, self._process, self._is_ready = self._process, None, False
        self._listens = self._is_told = False
        if process is None:
            return 0
        if is_lost:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDED_S)
        with contextlib.suppress(OSError):  # a loader process that waits in the user's code would stay for good
            os.killpg(process.pid, signal.SIGKILL)
        leftovers.end(self._token)
        try:
            process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:
            self.warn(f"process {process.pid} cannot be ended: it waits inside the system")
        cast(Any, process.stdin).close()
        self._pipe.close()
        self._connection = None
        return process.returncode or 0
