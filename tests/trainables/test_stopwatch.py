"""The seconds of each step on a device whose events are read when the window closes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trainables.stopwatch import Stopwatch


@dataclass(frozen=True)
class Event:
    """A moment of a device, in seconds."""

    at: float

    def elapsed_time(self, later: Event) -> float:
        return 1000.0 * (later.at - self.at)  # milliseconds, as torch's events


def on_cuda(monkeypatch: pytest.MonkeyPatch, *moments: float) -> Stopwatch:
    """Returns a stopwatch of a device on which each event takes place at the next of the moments."""
    events = iter([Event(at) for at in moments])
    monkeypatch.setattr(Stopwatch, "_record", lambda self: next(events))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Stopwatch(torch.device("cuda"), each_step=True)


def test_on_cuda_a_step_is_what_the_device_took_since_another(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = on_cuda(monkeypatch, 0.0, 0.5, 0.6, 2.0, 2.0, 2.1, 3.0, 3.5)
    for _ in range(2):
        watch.lap("data_wait")
        watch.lap("transfer")
        watch.micro_steps += 1
        watch.lap("forward_backward")
    watch.lap("optimizer")
    window = watch.window(0.0)
    assert window.micro_steps_s == pytest.approx((2.0, 1.0))
    assert window.optimizer_steps_s == pytest.approx((0.5,))
    assert window.forward_backward_s == pytest.approx(1.4 + 0.9)


def test_on_cuda_a_pass_begins_for_as_long_as_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    watch = on_cuda(monkeypatch, 0.0, 0.0, 1.0, 1.0, 2.0, 2.7, 3.7)  # the host waits from long before 2.0
    for number in range(3):
        if number == 2:
            watch.next_pass()
        watch.lap("data_wait")
        watch.micro_steps += 1
        watch.lap("forward_backward")
    window = watch.window(0.0)
    assert window.pass_starts_s == pytest.approx((0.7,))
    assert window.micro_steps_s == pytest.approx((1.0, 1.0, 1.0))


def test_a_micro_step_of_two_optimisers_has_the_passes_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.5, 2.5, 3.0, 7.0, 8.0, 8.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    watch = Stopwatch(torch.device("cpu"), each_step=True)
    watch.lap("data_wait")
    watch.micro_steps += 1
    for _ in range(2):
        watch.lap("forward_backward")
        watch.lap("optimizer")
    window = watch.window(0.0)
    assert (window.forward_backward_s, window.optimizer_s) == (6.0, 1.5)
    assert (window.micro_steps_s, window.optimizer_steps_s) == ((6.5,), (1.5,))
