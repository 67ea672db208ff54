"""The reports of a training while it runs, and how whoever hears them ends it, for our loop and for custom loops.

train(state, hear)      # hear(READY), then hear(Window | Evaluation) for each; hear returns True to end it there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from trainables.evaluation import Evaluation
from trainables.stopwatch import Window

READY: Literal["ready"] = "ready"
"""Reported once before the first batch: model and data are there. `state.epoch` and `state.ranks` may be set then."""
Event = Window | Evaluation | Literal["ready"]
Hear = Callable[[Event], bool | None]


class Ended(BaseException):
    """Raised inside a training once it is over; code that catches it does not prolong the training."""


class Report:
    """Passes events on; raises Ended in the training if whoever hears them ends it or fails, then for every event."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self.is_over = False
        self.failure: BaseException | None = None
        """The exception that hearing an event raised: a custom loop could catch it."""
        self.at_end: Callable[[], None] = lambda: None
        """Is called once, when the training is over."""

    def __call__(self, event: Event) -> None:
        """Reports an event; raises Ended if the training is over."""
        if not self.is_over:
            try:
                self.is_over = bool(self._hear(event))
            except BaseException as error:
                self.is_over, self.failure = True, error
            if self.is_over:
                self.at_end()
        if self.is_over:
            raise Ended


@contextmanager
def reporting(hear: Hear) -> Iterator[Report]:
    """Yields what reports to `hear`; an end inside the block ends the block. Raises what hearing an event raised."""
    report = Report(hear)
    with suppress(Ended):
        yield report
    if report.failure is not None:
        raise report.failure


def unheard(event: Event) -> None:
    """Hears nothing, so that a training goes on to its end."""
