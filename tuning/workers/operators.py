"""The operators that some steps of a training spend their time in, by torch's profiler."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch.profiler import profile

from trainables import training
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.reports import READY, Event
from trainables.stopwatch import Window
from trainables.workload import WorkloadError
from tuning.workers.session import Session

# fmt: off
_WORDS = {
    "dataloader": "waiting for batches", "synchronize|local_scalar": "waiting for the device",
    "launch": "starting kernels", "attention": "attention", "conv": "convolution", "lstm|gru|rnn": "recurrent network",
    "optimizer|adam|foreach": "optimiser's step", "backward": "gradients", "mm$|matmul|linear": "matrix product",
    "copy|^to$|clone": "copy", "norm|softmax": "normalisation", "embedding|index|gather": "selection",
}  # what an operator does, by the first pattern that its name has, in small letters
# fmt: on


class OperatorTime(NamedTuple):
    """The own time of an operator, without what it calls, as a share of the steps' time, on `place`: host or device."""

    name: str
    does: str
    place: str
    calls: int
    frac: float


def operators(
    session: Session, knobs: Mapping[str, Scalar], steps: int, trace: Path
) -> tuple[Window, list[OperatorTime]]:
    """Returns the window of about `steps` warm steps, and its operators, the longest first; writes a trace of it.

    On CUDA the times of device and host overlap. Raises WorkloadError if the training ends before.
    """
    config, windows = session.config(knobs), list[Window]()
    plan = Plan(1_000_000_000, ((1 + steps) * config.knobs.batch_size,), math.inf, mixed_phases=True)
    profiler = profile()  # of every kind of device that there is

    def heard(event: Event) -> bool:
        if event == READY:
            profiler.prepare_trace()
        elif isinstance(event, Window):  # the first is of the steps that warm up
            windows.append(event)
            profiler.start_trace() if len(windows) == 1 else profiler.stop_trace()
        return len(windows) == 2

    session.run(training.prepare(session.resident, config, plan), heard)
    if len(windows) < 2:
        raise WorkloadError(f"the training ended before {steps} steps; --steps takes fewer")
    profiler.export_chrome_trace(str(trace))
    rows = list[OperatorTime]()
    for one in (found for found in profiler.key_averages() if found.device_type.name == "CPU"):
        name = re.sub("^(aten::|autograd::engine::evaluate_function: )", "", one.key)
        does = next((words for pattern, words in _WORDS.items() if re.search(pattern, name.lower())), "")
        for place, us in (("host", one.self_cpu_time_total), ("device", one.self_device_time_total)):
            rows.append(OperatorTime(name, does, place, one.count, us / 1e6 / windows[1].wall_s))
    rest = max(0.0, 1.0 - sum(row.frac for row in rows if row.place == "host"))
    rows.append(OperatorTime("the rest", "Python between operators", "host", 0, rest))
    return windows[1], sorted(rows, key=lambda row: -row.frac)
