"""A collection has taken place when it returns, whatever other threads do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from trainables import garbage

HELD_S = 2.0
"""Longer than a trial takes that runs out of memory."""


class Circle:
    """What is freed by a collection alone."""

    def __init__(self) -> None:
        self.own = self


class Slow(Circle):
    """A circle whose end takes its time."""

    def __init__(self, begun: threading.Event, go_on: threading.Event) -> None:
        super().__init__()
        self._begun, self._go_on = begun, go_on

    def __del__(self) -> None:
        self._begun.set()
        self._go_on.wait(HELD_S)


@contextmanager
def another_collects() -> Iterator[threading.Event]:
    """Inside the block another thread is in the middle of a collection, for `HELD_S` or until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        Slow(begun, go_on)
        gc.collect()

    thread = threading.Thread(target=work)
    gc.disable()  # or the one who asks may come upon it by chance
    thread.start()
    assert begun.wait(10)
    try:
        yield go_on
    finally:
        gc.enable()
        go_on.set()
        thread.join()


def gone(kept: weakref.ref[Circle]) -> bool:
    return kept() is None


def test_garbage_is_gone_although_another_thread_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    with another_collects() as go_on:
        waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: go_on.set())
        monkeypatch.setattr(garbage, "time", waiting)
        kept = weakref.ref(Circle())
        gc.collect()
        assert not gone(kept), "Python's own does nothing meanwhile"
        garbage.collect()
        assert gone(kept)
    callbacks = len(gc.callbacks)
    garbage.collect()
    assert len(gc.callbacks) == callbacks


def test_a_collection_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LONGEST_S", 0.0)
    with another_collects():
        kept = weakref.ref(Circle())
        garbage.collect()
        assert not gone(kept)
    garbage.collect()
    assert gone(kept)
