"""Counts and times the steps of a training that knows nothing of it. Python itself imports this file at its start.

Whoever starts the program puts this folder first on PYTHONPATH, and into CARDTUNE_OUTSIDE which settings are changed
and where the figures go. `tuning.outside.runs` asks for the figures of some steps, after which the program waits to be
ended; `trainables.integrations.program` for a line after each step (`_Stream`), and the program goes on to its end. It
imports nothing of ours, as the Python of the command may be another, and never torch by itself.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

ASKED: dict[str, Any] = json.loads(os.environ.get("CARDTUNE_OUTSIDE", "{}"))
LEFT_OUT_STEPS = 3
"""Steps before any are counted: the first allocate, choose kernels, and say which loader trains."""
QUEUES = 3
"""So many times the batches that workers hold ready are also left out: they were made while the training started."""
SPLIT_STEPS = 8
"""Steps on a card whose parts are timed apart, after those that tell the speed: each part waits for the card."""
BACKWARDS = 8
"""After so many calls of `backward` without any optimiser each is a step: some programs update weights by hand."""
MEMORY_EVERY = 8
"""Memory is read after so many steps."""
TELL_S = 0.05
"""How often the steps are told to whoever counts them."""
clock = time.perf_counter
OPEN = builtins.open


def _torch() -> Any:
    return sys.modules["torch"]


class _Watch:
    """Loaders and optimisers of the training as they are made, then its steps."""

    def __init__(self) -> None:
        self.settings = dict(ASKED["settings"])
        self.loaders: list[dict[str, Any]] = []
        self.known: dict[tuple[Any, ...], int] = {}
        self.optimizers: list[dict[str, Any]] = []
        self.reread: list[str] = []
        self.training: set[int] = set()
        self.first: int | None = None
        self.backwards = 0
        self.is_ready = False
        self.model: dict[str, Any] = {}
        self.steps = self.counted = self.samples = self.pending = self.batches = self.new_batches = 0
        self.is_mixed = self.is_split = self.is_done = self.is_ours = self.has_cuda = False
        self.begun = self.last = self.pre = self.measured_s = 0.0
        self.parts = {"waiting": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.split_s = 0.0
        self.split_steps = 0
        self.step_s: list[float] = []
        self.memory: list[tuple[int, int]] = []

    def part(self, name: str, seconds: float) -> None:
        """Adds the seconds of a part of the step."""
        if self.is_split and not self.is_mixed:
            self.parts[name] += seconds

    def now(self) -> float:
        """Returns the time; where parts are timed apart, that at which the card has done what it was given."""
        if self.is_split and self.has_cuda:
            _torch().cuda.synchronize()
        return clock()

    def yielded(self, index: int | None, batch: Any) -> None:
        """Takes that a loader has given a batch."""
        is_theirs = index is None or not _torch().is_grad_enabled()
        if is_theirs or (self.steps >= LEFT_OUT_STEPS and index not in self.training):
            self.is_mixed = True  # an evaluation: the time of this step is not that of a step
            return
        if self.steps < LEFT_OUT_STEPS:
            self.training.add(int(index or 0))
        if index == min(self.training):
            self.pending += _size(batch)
            self.new_batches += 1

    def begins_pass(self, index: int | None) -> None:
        """Takes that a loader is gone over anew, before which an evaluation has ended."""
        if index in self.training and self.is_mixed:
            self.last, self.is_mixed = clock(), False

    def went_back(self, loss: Any) -> None:
        """Takes that `backward` was called."""
        self.backwards += 1
        if (self.first is None and self.backwards >= BACKWARDS) or self.first == id(self):
            self.stepped(self, loss.is_cuda)

    def stepped(self, optimizer: Any, is_cuda: bool = False) -> None:
        """Takes that an optimiser has stepped: the first that did marks the end of a step."""
        if self.first is None:
            self.first = id(optimizer)
            builtins.open = io.open = OPEN
            self.is_ours = self._claims()
            groups = getattr(optimizer, "param_groups", ())
            self.has_cuda = is_cuda or any(p.is_cuda for group in groups for p in group["params"])
        if id(optimizer) == self.first and self.is_ours and not self.is_done:
            self.steps += 1
            self.ends_step(clock())

    def ends_step(self, now: float) -> None:
        """Takes that a step has ended, and counts it once those before it have warmed up."""
        if self.steps < LEFT_OUT_STEPS + QUEUES * self._ready_batches():
            self._next_step()
            return
        if not self.begun:
            self._begin()
        elif not self.is_mixed:
            self._count(now)
        self._next_step()

    def _next_step(self) -> None:
        self.last, self.pending, self.new_batches, self.is_mixed = clock(), 0, 0, False

    def _claims(self) -> bool:
        """Returns whether this process is the one that is looked at: of several the first that steps."""
        try:
            os.close(os.open(ASKED["out"] + ".claim", os.O_CREAT | os.O_EXCL))
        except OSError:
            return False
        atexit.register(self.write)
        return True

    def _ready_batches(self) -> int:
        loaders = [self.loaders[n] for n in self.training]
        return max(((one["num_workers"] or 0) * (one["prefetch_factor"] or 0) for one in loaders), default=0)

    def _begin(self) -> None:
        if self.has_cuda:
            _torch().cuda.synchronize()
            _torch().cuda.reset_peak_memory_stats()
        self.begun = clock()
        self.is_split = not self.has_cuda

    def _count(self, now: float) -> None:
        if self.is_split:
            self.split_s += now - self.last
            self.split_steps += 1
        if not self.is_split or not self.has_cuda:
            self.counted += 1
            self.samples += self.pending
            self.batches += self.new_batches
            self.measured_s += now - self.last
            self.step_s = [*self.step_s[-199:], now - self.last]
        if self.counted % MEMORY_EVERY == 1:
            self.memory.append((self.counted, self._held()))
        is_enough = self.measured_s >= ASKED["window_s"] and self.counted >= ASKED["steps"] and self._has_passed()
        if is_enough or now - self.begun > ASKED["longest_s"]:
            if self.has_cuda and not self.is_split:
                _torch().cuda.synchronize()
                self.measured_s += clock() - now
                self.is_split = True
            elif not self.has_cuda or self.split_steps >= SPLIT_STEPS:
                self.write()
                while True:  # whoever asked ends this program; what it would write at its end is not written
                    time.sleep(60)

    def _has_passed(self) -> bool:
        """Returns whether a whole pass was counted, with what its beginning costs; True for a long one."""
        in_pass = self.loaders[min(self.training)]["batches"] if self.training else 0
        pass_s = in_pass * self.measured_s / max(1, self.batches)
        return self.batches >= in_pass or pass_s > ASKED["longest_s"]

    def _held(self) -> int:
        if self.has_cuda:
            return int(_torch().cuda.memory_allocated())
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def write(self) -> None:
        """Writes the figures, once."""
        if self.is_done or not self.is_ours:
            return
        self.is_done, torch = True, _torch()
        named = ("loaders", "optimizers", "model", "counted", "samples", "measured_s", "parts", "split_s", "step_s")
        found = {name: getattr(self, name) for name in named}
        found |= {"training": sorted(self.training), "memory": self.memory, "reread": self.reread}
        found |= {"steps": self.steps, "first_step_s": (self.begun or clock()) - START, "torch": torch.__version__}
        found["threads"] = torch.get_num_threads()
        if self.has_cuda:
            found["device"] = torch.cuda.get_device_name()
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        part = ASKED["out"] + ".part"
        Path(part).write_text(json.dumps(found), encoding="utf-8")
        Path(part).replace(ASKED["out"])


class _Stream(_Watch):
    """Tells of the training as it goes, on the file descriptor that was asked for.

    A line is written every `TELL_S`: the time, the peak of memory in bytes, and a list of events, each with its time by
    `perf_counter`, which all processes of a machine share:

        begins    facts of loaders, optimiser and model, before the first step
        step      samples, calls of backward, seconds of waiting for data and of the optimiser
        rests     an evaluation begins
        goes on   the training continues

    A line for each step would wake the reader, and so take a core, too often for steps of a few milliseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"waiting": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.entries: list[tuple[Any, ...]] = []
        self.writing = threading.Lock()
        self.backwards_before = 0

    def tell(self, *entry: Any) -> None:
        """Takes what has happened; the first entry starts the thread that writes them."""
        self.entries.append(entry)
        if entry[0] == "begins":
            threading.Thread(target=self._write_on, daemon=True).start()

    def _write_on(self) -> None:
        while True:
            self.write()
            time.sleep(TELL_S)

    def part(self, name: str, seconds: float) -> None:
        """Adds the seconds of a part of the step: the host's alone, so that a card is not waited for."""
        if not self.is_mixed and (name == "waiting" or not self.has_cuda):
            self.seconds[name] += seconds

    def yielded(self, index: int | None, batch: Any) -> None:
        """Takes that a loader has given a batch; an evaluation may begin or end with it."""
        was_mixed = self.is_mixed
        if was_mixed and index in self.training and _torch().is_grad_enabled():
            self._goes_on()
        super().yielded(index, batch)
        if self.is_mixed and not was_mixed and self.steps >= LEFT_OUT_STEPS:
            self.tell("rests", clock())

    def begins_pass(self, index: int | None) -> None:
        """Takes that a loader is gone over anew, before which an evaluation has ended."""
        if index in self.training and self.is_mixed:
            self._goes_on()

    def _goes_on(self) -> None:
        self.is_mixed, self.seconds = False, dict.fromkeys(self.seconds, 0.0)
        if self.steps >= LEFT_OUT_STEPS:
            self.tell("goes on", clock())

    def ends_step(self, now: float) -> None:
        """Tells of a step."""
        if self.steps == 1:
            self.tell("begins", now, self._facts())
        calls, self.backwards_before = self.backwards - self.backwards_before, self.backwards
        self.tell("step", now, self.pending, calls, self.seconds["waiting"], self.seconds["optimizer"])
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._next_step()

    def _facts(self) -> dict[str, Any]:
        first = min(self.training, default=None)
        fused = self.optimizers[0]["fused"] if self.optimizers else None
        found = {"loader": first, "model": self.model, "fused": fused, "reread": self.reread}
        return found | ({} if first is None else self.loaders[first])

    def _peak(self) -> int:
        if self.has_cuda:
            return int(_torch().cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def write(self) -> None:
        """Writes what was not written yet; ends the program if whoever counts is gone."""
        with self.writing:
            now, entries, self.entries = clock(), self.entries, []
            line = json.dumps([now, self._peak(), entries]).encode() + b"\n"
            try:
                while line:
                    line = line[os.write(ASKED["stream"], line) :]
            except OSError:
                os._exit(1)


def _size(batch: Any) -> int:
    """Returns the samples of a batch: the length of the first tensor that is found in it, 0 if there is none."""
    if hasattr(batch, "shape") and hasattr(batch, "device"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    parts = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return next((size for part in parts if (size := _size(part))), 0)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return 0


def _site() -> tuple[str, int]:
    """Returns file and line of the user's code that is running: outside of installed packages and of this file."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = f"{os.sep}site-packages{os.sep}" in name or STANDARD_LIBRARY in name
        if not (is_library or name == __file__ or name.startswith("<")):
            return str(Path(name).resolve()), frame.f_lineno
        frame = frame.f_back
    return "", 0


def _lines() -> tuple[tuple[str, int], ...]:
    """Returns the lines that are running, the innermost first."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _watch_loaders(module: Any) -> None:
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    made, begins, begun, following = loader.__init__, loader.__iter__, iterator.__init__, iterator.__next__
    signature = inspect.signature(made)

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = signature.bind(self, *args, **kwargs)
        # One that is made again in each epoch is the same; of several made in one line the samplers differ.
        samplers = (asked.arguments.get("shuffle"), type(asked.arguments.get("sampler")).__name__)
        index = WATCH.known.setdefault((*_lines(), *samplers), len(WATCH.loaders))
        own = {name: asked.arguments.get(name) for name in ("batch_size", "shuffle", "num_workers", "prefetch_factor")}
        if index == ASKED["loader"]:
            changed = {name: value for name, value in WATCH.settings.items() if name in signature.parameters}
            asked.arguments.update(changed)
            if not asked.arguments.get("num_workers"):
                asked.arguments.pop("prefetch_factor", None)
                asked.arguments.pop("persistent_workers", None)
        made(*asked.args, **asked.kwargs)
        _get_ready()
        file, line = _site()
        is_stream = not hasattr(self.dataset, "__getitem__")
        facts = {"file": file, "line": line, "is_stream": is_stream, "is_batched": self.batch_sampler is not None}
        for name in ("batch_size", "num_workers", "persistent_workers", "prefetch_factor"):
            facts[name] = getattr(self, name, None)
        facts["batches"] = 0 if is_stream else _length(self)
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        facts |= {"samples": 0 if is_stream else _length(sampler), "drops_last": bool(self.drop_last)}
        facts |= {"pin_memory": bool(self.pin_memory), "asked": {n: v for n, v in own.items() if v is not None}}
        if index == len(WATCH.loaders):
            WATCH.loaders.append(facts)
        self.__dict__["_outside"] = index

    def iterate(self: Any) -> Any:
        WATCH.begins_pass(self.__dict__.get("_outside"))
        start = WATCH.now()
        found = begins(self)
        WATCH.part("waiting", WATCH.now() - start)
        return found

    def begin(self: Any, loader: Any, *args: Any) -> None:
        begun(self, loader, *args)
        self._outside = loader.__dict__.get("_outside")

    def follow(self: Any) -> Any:
        start = WATCH.now()
        batch = following(self)
        WATCH.yielded(self._outside, batch)
        WATCH.part("waiting", clock() - start)
        return batch

    loader.__init__, loader.__iter__, iterator.__init__, iterator.__next__ = init, iterate, begin, follow


def _watch_optimizers(module: Any) -> None:
    base = module.Optimizer
    made = base.__init__

    def init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if WATCH.settings.get("fused") and "fused" in defaults and not defaults["fused"]:
            defaults |= {"fused": True, "foreach": False}
        made(self, params, defaults)
        file, line = _site()
        able = "fused" in defaults
        facts = {"name": type(self).__name__, "file": file, "line": line, "fused": defaults.get("fused"), "able": able}
        WATCH.optimizers.append(facts)
        _get_ready()

    def before(*_: Any) -> None:
        WATCH.pre = WATCH.now()

    def after(optimizer: Any, *_: Any) -> None:
        WATCH.part("optimizer", WATCH.now() - WATCH.pre)
        WATCH.stepped(optimizer)

    base.__init__ = init
    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _watch_backward(module: Any) -> None:
    backward = module.Tensor.backward

    @functools.wraps(backward)
    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        _get_ready()
        start = WATCH.now()
        backward(self, *args, **kwargs)
        WATCH.part("backward", WATCH.now() - start)
        WATCH.went_back(self)

    module.Tensor.backward = timed


def _get_ready() -> None:
    """Sets what can be set once torch is loaded, and looks for the model."""
    if WATCH.is_ready:
        return
    WATCH.is_ready = True
    torch, asked = _torch(), WATCH.settings
    if "threads" in asked:
        torch.set_num_threads(asked["threads"])
    if asked.get("flush_denormal"):
        torch.set_flush_denormal(True)
    if asked.get("tf32"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if asked.get("cudnn_benchmark"):
        torch.backends.cudnn.benchmark = True
    if ASKED.get("cap_bytes") and torch.cuda.is_available():
        whole_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, ASKED["cap_bytes"] / whole_bytes))

    def called(module: Any, _: Any) -> None:
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        handle.remove()
        parameters = list(module.parameters())
        has_images = any(p.dim() == 4 for p in parameters)
        WATCH.model = {"name": type(module).__name__, "parameters": sum(p.numel() for p in parameters)}
        WATCH.model["has_images"] = has_images
        if asked.get("channels_last") and has_images:
            module.to(memory_format=torch.channels_last)
        if asked.get("compile"):
            module.compile()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(called)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module right after it was loaded."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module to be changed; None for any other."""
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _watch_files() -> None:
    """Notes which files of earlier runs are read before the first step. An audit hook could never be taken back."""

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("mode", args[0] if args else "r")
        if WATCH.first is None and isinstance(file, str | os.PathLike) and "w" not in str(mode):
            path = os.path.realpath(file)
            if (path in WROTE or _is_later(path)) and path not in WATCH.reread:
                WATCH.reread.append(path)
        return OPEN(file, *args, **kwargs)

    builtins.open = io.open = opened


def _is_later(path: str) -> bool:
    """Returns whether a file below the working folder was written after the first step of an earlier run."""
    if "since" not in ASKED or not path.startswith(HERE) or path.endswith((".py", ".pyc")):
        return False
    try:
        return bool(Path(path).stat().st_mtime > ASKED["since"])
    except OSError:
        return False


def _theirs() -> None:
    """Imports the module that this one stands before, if there is one."""
    here = str(Path(__file__).parent)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


START = clock()
STANDARD_LIBRARY = f"{os.sep}lib{os.sep}python{sys.version_info[0]}.{sys.version_info[1]}{os.sep}"
if ASKED:
    WATCH = _Stream() if "stream" in ASKED else _Watch()
    WROTE, HERE = frozenset(ASKED.get("wrote", ())), f"{Path.cwd()}{os.sep}"
    if WROTE or "since" in ASKED:
        _watch_files()
    _targets = {"torch.utils.data.dataloader": _watch_loaders, "torch.optim.optimizer": _watch_optimizers}
    _targets["torch._tensor"] = _watch_backward
    sys.meta_path.insert(0, _AfterImport(_targets))
_theirs()
