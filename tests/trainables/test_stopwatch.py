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
        """Returns milliseconds, as torch's events do."""
        return 1000.0 * (later.at - self.at)


def test_on_cuda_a_step_is_what_the_device_took_since_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([Event(at) for at in (0.0, 0.5, 0.6, 2.0, 2.0, 2.1, 3.0, 3.5)])
    monkeypatch.setattr(Stopwatch, "_record", lambda self: next(moments))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = Stopwatch(torch.device("cuda"), each_step=True)
    for _ in range(2):
        watch.lap("data_wait")
        watch.lap("transfer")
        watch.lap("forward_backward")
    watch.lap("optimizer")
    window = watch.window(0.0)
    assert window.micro_steps_s == pytest.approx((2.0, 1.0))
    assert window.optimizer_steps_s == pytest.approx((0.5,))
    assert window.forward_backward_s == pytest.approx(1.4 + 0.9)


def test_a_pause_is_in_no_span_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("trainables.stopwatch.time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"), each_step=True)

    def step() -> None:
        for span, took in (("data_wait", 1.0), ("forward_backward", 2.0), ("optimizer", 0.5)):
            now[0] += took
            watch.lap(span)  # type: ignore[arg-type]  # a name of its own
        watch.samples += 8

    step()
    watch.pause()
    now[0] += 100.0
    assert watch.elapsed_s() == pytest.approx(3.5)
    watch.go_on()
    step()
    window = watch.window(0.0)
    assert (window.samples, window.wall_s) == (16, pytest.approx(7.0))
    assert (window.data_wait_s, window.forward_backward_s) == (pytest.approx(2.0), pytest.approx(4.0))
    assert window.optimizer_steps_s == pytest.approx((0.5, 0.5))
    watch.restart()
    watch.go_on()
    assert watch.elapsed_s() == 0.0
