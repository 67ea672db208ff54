"""A command as a custom loop, without an edit of it: knobs are its arguments, its steps are counted from outside.

    train = Program(
        "python train.py --lr {learning_rate} --batch-size {batch_size} --seed {seed}",
        metrics={"accuracy": r"val_acc=([0-9.]+)"},
        epochs=5,
    )

Each training is a process of its own. `hook/sitecustomize.py` tells of its steps; each line that it prints is searched
for the metrics, and one that has them is a report. Knobs of SPACE that are no arguments are set from outside where that
is possible (`HOOKED`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import select
import selectors
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from trainables import hook
from trainables.hook import GIVEN, HOOKED, OF_THE_LOADER
from trainables.knob_columns import Scalar
from trainables.own_run import Run
from trainables.reports import Ended
from trainables.workload import LoopError, NotIndependent, WorkloadError

ORDER = "CARDTUNE_OUTSIDE"
"""The variable by which the hook hears what it is to do."""
ENDLESS_EPOCHS = 10_000
"""The epochs of a probe, which is ended once its speed is known."""
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory|MemoryError|bad_alloc", re.IGNORECASE)
LAST_LINES = 20
"""Lines that are kept of what it prints, for its error."""
SILENT_S = 0.2
"""How often it is looked whether a silent process has ended."""
HELD_S = 1.0
"""How long a printed line waits for the hook to tell of the steps before it, which it does every 50 ms."""
WRITES_S = 20.0
"""The time that it has after its last report to write what it writes at its end, if it was told its epochs."""


class Program:
    """A function `train(run)` that runs a command; `{name}` in it is the value of a knob, `{{` a brace.

    `metrics` are regular expressions with one group, a number, by the name of an objective. `epochs` is how many the
    command trains today; with `{epochs}` in the command, trials may be shorter. `env` are variables for the process,
    with placeholders likewise. `samples` is the size of an epoch, for a program without a DataLoader: each of its steps
    counts `batch_size` samples, or 1. Raises WorkloadError for a pattern or a command that cannot be read.
    """

    is_outside = True

    def __init__(
        self,
        command: str | Sequence[str],
        metrics: Mapping[str, str],
        *,
        epochs: float,
        env: Mapping[str, str] | None = None,
        samples: int | None = None,
    ) -> None:
        self.words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        self._env, self.epochs, self.samples = dict(env or {}), epochs, samples
        if not self.words:
            raise WorkloadError("Program: the command is empty")
        self.patterns = {name: _pattern(name, text) for name, text in metrics.items()}
        self.placeholders = tuple(dict.fromkeys(itertools.chain(*map(_names, (*self.words, *self._env.values())))))
        self._loader: int | None = None
        """Which of its loaders trains, by the order in which they are made; None before that was seen."""
        self.first_step_at: float | None = None
        """When a training of this process first stepped, in Unix seconds: what was written since is a training's."""

    def saw(self, loader: int | None) -> None:
        """Takes which loader trained in a first step."""
        self._loader = self._loader if loader is None else loader
        self.first_step_at = self.first_step_at or time.time()

    def __call__(self, run: Run) -> None:
        """Runs the command until the run is over, or it ends; raises WorkloadError if it fails."""
        names = [name for name in self.placeholders if name not in GIVEN]
        hooked = [name for name in run.searched if name in HOOKED and name not in names]
        if self._loader is None and OF_THE_LOADER & set(hooked):
            with tempfile.TemporaryDirectory(prefix="ct-program-") as folder:
                self._run(_Looking(self, run), Path(folder), {})
        with tempfile.TemporaryDirectory(prefix="ct-program-") as folder:
            self._run(_Following(self, run), Path(folder), {HOOKED[name]: run[name] for name in hooked})

    @property
    def typed(self) -> tuple[str, ...]:
        """Returns the words of the command with its placeholders, variables first."""
        env = [f"{name}={text}" for name, text in self._env.items()]
        return (*(["env", *env] if env else []), *self.words)

    def _run(self, hearer: _Following, folder: Path, settings: Mapping[str, Scalar]) -> None:
        """Runs the command, and ends it with all that it has started once the training is over."""
        values, (told, tells) = self._values(hearer.run, folder), os.pipe()
        order: dict[str, object] = {"settings": dict(settings), "loader": self._loader, "stream": tells}
        order["out"] = str(folder / "steps")
        order |= {} if self.first_step_at is None else {"since": self.first_step_at}
        order["cap_bytes"] = hearer.run.cap_bytes
        env = {**os.environ, **{name: text.format(**values) for name, text in self._env.items()}}
        env = {**hook.environment(env, folder), ORDER: json.dumps(order), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                [word.format(**values) for word in self.words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[tells],
                start_new_session=True,  # it is ended with its loader's processes
            )
        except OSError as error:
            os.close(told)
            raise WorkloadError(f"{self.words[0]} cannot be started: {error.strerror}") from None
        finally:
            os.close(tells)
        try:
            hearer.follow(process, told)
        finally:
            _end(process, str(folder))
            os.close(told)
            process.stdout.close()  # type: ignore[union-attr]  # it is a pipe

    def _values(self, run: Run, folder: Path) -> dict[str, object]:
        """Returns the value of each placeholder."""
        epochs = math.ceil(run.samples / run.pass_samples if run.pass_samples else self.epochs)
        kept = os.environ.get(hook.OUT_FOLDER, folder)
        given = {"seed": run.seed, "folder": kept, "epochs": min(ENDLESS_EPOCHS, max(1, epochs))}
        try:
            return {name: given[name] if name in GIVEN else run[name] for name in self.placeholders}
        except LoopError as error:
            raise LoopError("the command: " + re.sub(r"run\['(\w+)'\]", r"{\1}", str(error))) from None


class _Following:
    """Tells `run` of the steps and the metrics of a process, in the order in which they came."""

    def __init__(self, program: Program, run: Run) -> None:
        self.program, self.run = program, run
        self._values: dict[str, float] = {}
        """The metrics of the report that is not complete yet."""
        self._latest: dict[str, float] = {}
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._held: deque[tuple[float, str]] = deque()
        """Lines that were printed since the hook wrote last, and when: steps before them may not be known yet."""
        self._steps = 0

    def follow(self, process: subprocess.Popen[bytes], told: int) -> None:
        """Returns once the process has ended; raises what its end means, and Ended where the training is over."""
        self._process, output = process, process.stdout.fileno() if process.stdout is not None else -1
        rest, selector = {told: b"", output: b""}, selectors.DefaultSelector()
        for descriptor in rest:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = [key.fd for key, _ in selector.select(SILENT_S)]
            if not ready and process.poll() is not None:  # its loader's processes may hold both ends
                break
            for descriptor in ready:
                data = os.read(descriptor, 1 << 16)
                if not data:
                    selector.unregister(descriptor)
                *lines, rest[descriptor] = re.split(rb"[\r\n]", rest[descriptor] + data)
                texts = [
                    line.decode(errors="replace").strip() for line in [*lines, *([] if data else [rest[descriptor]])]
                ]
                if descriptor == told and not all(self._told(text) for text in texts if text.startswith("[")):
                    return
                if descriptor == output:
                    self._held += [(time.perf_counter(), text) for text in texts if text]
                    self._lines += [text for text in texts if text]
            self._print_until(time.perf_counter() - HELD_S if self._steps else math.inf)
        self._print_until(math.inf)
        self._ended(process.wait())

    def _told(self, line: str) -> bool:
        """Takes a line of the hook; returns whether to go on."""
        now, peak_bytes, entries = json.loads(line)
        for kind, at, *rest in entries:
            self._print_until(at)
            self.run.outside_at = at
            if kind == "begins":
                self._begins(*rest)
            elif kind == "step" and not self.run.is_done:
                self._step(peak_bytes, *rest)
            elif kind == "rests":
                self.run.rests()
            elif kind == "goes on":
                self.run.goes_on()
        self._print_until(now)
        return True

    def _step(self, peak_bytes: int, samples: int, backwards: int, waited_s: float, optimizer_s: float) -> None:
        """Takes a step; of a program without a loader each call of backward has a batch of its own."""
        self._steps += 1
        if self._steps == 2 and samples:  # at the first, some loops have read batches ahead
            self._facts |= {"batch_size": samples, "micro_batch_size": samples}
        self.run.stepped_outside(samples or self._batch_size * max(1, backwards), waited_s, optimizer_s)
        self.run.saw_outside(self._facts, peak_bytes)

    def _begins(self, seen: Mapping[str, Any]) -> None:
        """Takes the facts of the first step, and starts the clock."""
        program, run = self.program, self.run
        if seen["reread"]:
            raise NotIndependent(
                f"the command goes on from {seen['reread'][0]}, which an earlier training of it wrote: give it a "
                "folder of each training's own, {folder} in the command, or a switch that starts anew; and delete that "
                "file before you train, as it is of a run of this search"
            )
        program.saw(seen.get("loader"))
        of_loader = int(seen.get("batch_size") or 1)
        self._batch_size = int(run["batch_size"]) if "batch_size" in program.placeholders else of_loader
        size = program.samples or int(seen.get("samples") or 0)
        if seen.get("drops_last") and seen.get("batch_size") and not program.samples:
            size -= size % of_loader
        if not size:
            raise LoopError(
                "no DataLoader of the command tells how many samples an epoch has: samples=N says it, beside the "
                "command, or in Program(..., samples=N); a loop without epochs has one of all its samples"
            )
        workers = int(seen.get("num_workers") or 0)
        loading = ("prefetch_factor", "persistent_workers") if workers else ()
        self._facts = {"workers": workers, **{name: seen.get(name) for name in loading}}
        run.begin(None, size)
        if "seed" not in program.placeholders:  # it draws its numbers as it likes
            self._facts["seed"] = -1

    def _print_until(self, at: float) -> None:
        """Takes the lines that were printed by then."""
        while self._held and self._held[0][0] <= at:
            self._printed(self._held.popleft()[1])

    def _printed(self, line: str) -> None:
        """Takes a line that the program printed."""
        for name, pattern in self.program.patterns.items():
            if found := pattern.search(line):
                self._values[name] = _number(name, found.group(1))
        if self._values.keys() >= set(self.run.objectives):
            self._latest, self._values = self._values, {}
            if self._steps:
                self._report()

    def _report(self) -> None:
        """Reports the metrics; if that is the end, the process has some time to end by itself."""
        try:
            self.run.report(**self._latest)
        except Ended:
            if self.run.is_over:
                self._leave(WRITES_S if "epochs" in self.program.placeholders else SILENT_S)
            raise

    def _leave(self, most_s: float) -> None:
        """Gives the process so much time to end by itself, and reads what it prints meanwhile."""
        until, output = time.monotonic() + most_s, self._process.stdout
        while self._process.poll() is None and (left_s := until - time.monotonic()) > 0 and output is not None:
            if select.select([output], [], [], min(SILENT_S, left_s))[0] and not os.read(output.fileno(), 1 << 16):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(left_s)

    def _ended(self, code: int) -> None:
        """Takes that the process has ended; raises what that means."""
        said = f"it printed last: {self._lines[-1][:300]}" if self._lines else "it printed nothing"
        if code:
            print("\n".join(self._lines), file=sys.stderr, flush=True)
            lacks = next((line for line in reversed(self._lines) if OUT_OF_MEMORY.search(line)), "")
            if "CUDA" in lacks or "OutOfMemoryError" in lacks:
                raise torch.OutOfMemoryError(lacks)
            if lacks:
                raise MemoryError(lacks)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            places = [line for line in self._lines if line.startswith("File ") and "site-packages" not in line]
            at = f" at {places[-1]}" if places else ""
            raise WorkloadError(f"the command failed with {how}{at}; {said}")
        if not self._steps:
            raise LoopError(f"no step of a training with torch was seen in the command; {said}")
        if self.run.evaluate_now and self._latest:
            self._report()
        if not self._latest:
            wanted = " and ".join(pattern.pattern for pattern in self.program.patterns.values())
            raise LoopError(f"no line of the command's output has {wanted}; {said}")


class _Looking(_Following):
    """Waits for the first step alone, which shows the loader that trains."""

    def _told(self, line: str) -> bool:
        """Returns False once the first step has come."""
        (_, _, facts), *_ = json.loads(line)[2]
        self.program.saw(facts.get("loader"))
        return False

    def _printed(self, line: str) -> None:
        """Takes a line for an error alone."""


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends a process with all that it has started: its group, and what has left it and has the `mark` of its hook."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in one.environ().get(ORDER, ""):
                one.kill()


def _names(text: str) -> list[str]:
    """Returns the placeholders of a text; raises WorkloadError for one that cannot be filled in."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise WorkloadError(f"Program: {text!r}: {error}; a brace of the command itself is {{{{ or }}}}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if wrong := [name for name in names if not name.isidentifier()]:
        what = f"Program: {text!r}: {{{wrong[0]}}} is no knob's name"
        raise WorkloadError(f"{what}; a brace of the command itself is {{{{ or }}}}")
    return names


def _pattern(name: str, text: str) -> re.Pattern[str]:
    try:
        found = re.compile(text)
    except re.error as error:
        raise WorkloadError(f"Program: metrics: {name}={text!r} is no regular expression: {error}") from None
    if found.groups != 1:
        raise WorkloadError(f"Program: metrics: {name}={text!r} has {found.groups} groups; give one around the number")
    return found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise LoopError(f"the pattern of {name} found {text!r}, which is no number") from None
