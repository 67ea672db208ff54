"""Small working stand-ins: a workload that trains in milliseconds, and a profiler that answers from a formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainables import draws, loop, own_loop
from trainables.evaluation import Evaluation
from trainables.knob_columns import Knob
from trainables.knobs import Knobs, Scalar
from trainables.our_knobs import EVERY, OURS, ROWS
from trainables.plan import Plan
from trainables.reports import Event
from trainables.state import State
from trainables.stopwatch import Window
from trainables.training import AnyState
from trainables.workload import Config, Split
from tuning.journal.events import StudyRecord, Timed
from tuning.journal.format import Record
from tuning.memory.measure import Footprint
from tuning.search.protocols import TrialState
from tuning.workers.session import Session
from tuning.workers.worker_config import Description, TrialOrder


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 1 to 9 numbers with their sum as the target."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self._lengths = torch.randint(1, 10, (count,), generator=random).tolist()
        self._values = torch.randn(count, 9, generator=random)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = self._values[index, : self._lengths[index]]
        return values, values.sum()


def knobs_of(**values: Scalar) -> Knobs:
    """Returns knobs with these values, by the table of all our workloads."""
    return Knobs.of(values, EVERY)


class Sums:
    """Learns to add: one weight, whose right value is 1. `poison` makes the loss NaN or raises, by option."""

    objectives: ClassVar[Mapping[str, Any]] = {"error": "min"}
    knobs: ClassVar[Mapping[str, Knob]] = {"dropout": ROWS["dropout"]}
    default_space: ClassVar[Mapping[str, Any]] = {"learning_rate": [0.1, 0.01], "batch_size": [8, 16]}
    options: ClassVar[Mapping[str, Any]] = {"poison": "", "count": 64}

    def model(self, config: Config) -> nn.Module:
        """Returns a model with a ModuleList of two blocks, as deep as checkpointing needs."""
        return Adder(config.knobs.dropout)

    def dataset(self, config: Config, split: Split) -> Lines:
        """Returns 64 sequences to train on, 32 to validate."""
        return Lines(int(config.options.get("count", 64)) if split == "train" else 32, seed=int(split == "val"))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Returns values padded with zeros, shape (batch, longest), and targets, shape (batch,)."""
        values = nn.utils.rnn.pad_sequence([v for v, _ in samples], batch_first=True)
        return {"values": values, "target": torch.stack([t for _, t in samples])}

    def length(self, sample: tuple[Tensor, Tensor]) -> int:
        """Returns how many numbers a sample has."""
        return len(sample[0])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean squared error."""
        loss: Tensor = (model(batch["values"]) - batch["target"]).square().mean()
        return loss

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Returns the root of the mean squared error."""
        total, count = 0.0, 0
        for batch in batches:
            total += float((model(batch["values"]) - batch["target"]).square().sum())
            count += len(batch["target"])
        return {"error": math.sqrt(total / count)}


class Noisy(Sums):
    """Sums with an augmentation, and with two phases: the first learns nothing but counts its batches."""

    knobs: ClassVar[Mapping[str, Knob]] = OURS["signals"].own

    def augment(self, batch: dict[str, Tensor], keys: Tensor, config: Config, phase: str) -> dict[str, Tensor]:
        """Returns the batch with noise on its values, and on which phase it belongs to."""
        values = batch["values"]
        noise = 0.1 * config.knobs.augmentation * draws.normal(keys, values.shape[1:], stream=0) * (values != 0)
        values = values.add_(noise) if config.knobs.inplace_augmentation else values + noise
        return {**batch, "values": values, "first": torch.tensor(float(phase == "first"))}

    def phases(self, config: Config) -> dict[str, float]:
        """Returns a first phase of the length of the knob."""
        return {"first": config.knobs.encoder_frac, "second": 1.0 - config.knobs.encoder_frac}

    def phase_rounds(self, config: Config) -> int:
        """Returns the rounds of the knob."""
        return int(config.knobs.phase_rounds)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean squared error, times 1,000 in the first phase, so that it shows in the windows."""
        return super().loss(model, batch) * (1.0 + 999.0 * batch["first"])


class Adder(nn.Module):
    """Two blocks in a ModuleList, then a sum."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Scale()])
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        """Returns shape (batch,) from (batch, time)."""
        for block in self.blocks:
            values = block(values)
        return self.dropout(values).sum(dim=1)


class Scale(nn.Module):
    """One weight, at 0.5 before training with a little noise that the seed decides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + 0.1 * torch.randn(()))

    def forward(self, values: Tensor) -> Tensor:
        """Returns the values times the weight."""
        return values * self.weight


class Followed(Sums):
    """Sums whose forward pass changes its model: a teacher follows it, a buffer is made, and another grows."""

    def model(self, config: Config) -> nn.Module:
        """Returns a model whose weights differ from one call to the next, but for the seed."""
        return Follower(config.knobs.dropout)


class Follower(nn.Module):
    """An Adder, a frozen teacher that is its running average and takes part, and tables made as they are needed."""

    ones: Tensor | None
    table: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.student, self.teacher = Adder(dropout), Adder(0.0).requires_grad_(False)
        self.register_buffer("ones", None)
        self.register_buffer("table", torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        """Returns shape (batch,) from (batch, time)."""
        if self.ones is None:
            self.ones = torch.ones(())
        if len(self.table) < 9:
            self.table = torch.ones(9)
        for own, led in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(led.data, alpha=0.1)
        found: Tensor = self.student(values * self.ones) + 0.1 * self.teacher(values * self.table[: values.shape[1]])
        return found


def heard(state: AnyState, until: Callable[[Event], Any] = lambda event: False) -> list[Window | Evaluation]:
    """Returns what a training reports, up to its end or the first event of which `until` is true."""
    found: list[Window | Evaluation] = []

    def hear(event: Event) -> bool:
        if isinstance(event, Window | Evaluation):
            found.append(event)
        return isinstance(event, Window | Evaluation) and bool(until(event))

    if isinstance(state, State):
        loop.train(state, hear)
    else:
        own_loop.train(state, hear)
    return found


def told(
    session: Session,
    knobs: Mapping[str, Scalar],
    plan: Plan,
    seed: int = 0,
    *,
    stops: bool = False,
    pause_after_s: float = math.inf,
) -> list[TrialState]:
    """Returns all states of a trial, its result last; one that `stops` is ended at its first rung."""
    found: list[TrialState] = []

    def tell(state: TrialState) -> float:
        found.append(state)
        return 0.0 if stops else pause_after_s

    last = session.trial(TrialOrder("", knobs, seed, plan, 1, "all"), pause_after_s, tell)
    return [*found, last]


def study_of(facts: Mapping[str, Any] | Description) -> StudyRecord:
    """Returns the record of a study of which no more is known than these facts."""
    known = vars(facts) if isinstance(facts, Description) else facts
    return StudyRecord.read(Record(0, "", "study", known))


def no_time() -> float:
    """A clock for those who measure by formulas: on a busy machine a real one ended the probes at another one."""
    return 0.0


class FormulaProfiler:
    """A profiler whose speed and memory are formulas of the knobs, so that the right answer is known."""

    left_behind = ""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.probed: list[dict[str, Scalar]] = []

    def peak_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int) -> int:
        """Returns 100 MB and 10 MB a sample, half of it with checkpointing."""
        per_sample = 5_000_000 if Knobs.of(knobs, EVERY).activation_checkpointing else 10_000_000
        return 100_000_000 + per_sample * micro_batch

    def micro_step_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns 10 ms and 1 ms a sample; workers save 2 ms each, bf16 a third, checkpointing costs a fifth."""
        own = Knobs.of(knobs, EVERY)
        seconds = 0.010 + 0.001 * min(own.micro_batch_size, own.batch_size) - 0.002 * own.num_workers
        seconds *= 2 / 3 if own.amp_dtype == "bf16" else 1.0
        return seconds * (1.2 if own.activation_checkpointing else 1.0)

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns the formula's footprint."""
        measured = tuple((m, self.peak_bytes(knobs, m)) for m in micro_batches)
        return Footprint(outcome="ok", parameter_bytes=60_000_000, optimizer_bytes=20_000_000, measured=measured)

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed, or an OOM above the cap."""
        self.probed.append(dict(knobs))
        own = Knobs.of(knobs, EVERY)
        micro = min(own.micro_batch_size, own.batch_size)
        peak = self.peak_bytes(knobs, micro)
        if self.cap_bytes is not None and peak > self.cap_bytes:
            return Timed(outcome="oom", message="no room")
        seconds = math.ceil(own.batch_size / micro) * self.micro_step_s(knobs) + 0.001
        return Timed(
            outcome="ok",
            samples_per_s=own.batch_size / seconds,
            windows=(own.batch_size / seconds,) * 3,
            micro_step_s=self.micro_step_s(knobs),
            optimizer_step_s=0.001,
            peak_allocated_bytes=peak,
        )

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the formula's speed."""
        return self.probe(knobs, window_s, 0.0)

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns a result whose error falls with the distance of the learning rate from 0.1."""
        rate = Knobs.of(knobs, EVERY).learning_rate
        return TrialState(
            outcome="ok",
            done=True,
            knobs=knobs,
            values={"error": abs(math.log(rate / 0.1)) + 0.01 * seed},
            samples=samples,
            measured_samples_per_s=self.probe(knobs, 0, 0).samples_per_s,
            peak_allocated_bytes=1,
        )


class Nvml:
    """The part of `pynvml` that telemetry reads: each list answers in turn, its last value for ever.

    Calls named in `broken` raise, as they do without a driver, a permission, or the figure.
    """

    class NVMLError(Exception):
        """What every call raises that has no answer."""

    def __init__(self, *, broken: Sequence[str] = (), uuid: str = "", **answers: Sequence[int]) -> None:
        self._broken, self._uuid = broken, uuid
        plain = {"sm": [0], "memory": [0], "power_mw": [0], "temperature": [0], "clock": [0]}
        self._answers: dict[str, list[int]] = {k: list(v) for k, v in {**plain, "reasons": [0], **answers}.items()}
        self.calls: Counter[str] = Counter()
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        """Finds the driver."""
        self._called("nvmlInit")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """Returns the handle of the card."""
        return self._called("nvmlDeviceGetHandleByIndex", index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        """Returns the handle of the card with this UUID, its only one."""
        self.asked.append(uuid)
        if uuid != self._uuid:
            raise self.NVMLError("not found")
        return 1

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """Returns percent of time."""
        self._called("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self._next("sm"), memory=self._next("memory"))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        """Returns milliwatts."""
        return self._called("nvmlDeviceGetPowerUsage") or self._next("power_mw")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        """Returns degrees Celsius."""
        return self._called("nvmlDeviceGetTemperature") or self._next("temperature")

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        """Returns MHz."""
        return self._called("nvmlDeviceGetClockInfo") or self._next("clock")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        """Returns bits."""
        return self._called("nvmlDeviceGetCurrentClocksThrottleReasons") or self._next("reasons")

    def _called(self, name: str, answer: int = 0) -> int:
        self.calls[name] += 1
        if name in self._broken:
            raise self.NVMLError(f"{name}: Not Supported")
        return answer

    def _next(self, name: str) -> int:
        values = self._answers[name]
        return values.pop(0) if len(values) > 1 else values[0]
