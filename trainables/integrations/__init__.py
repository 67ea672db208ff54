"""Loops of frameworks as loops of one's own: theirs runs, and `run` sets, counts, times and ends it."""

from __future__ import annotations

from trainables.workload import LoopError

SECOND = "a second Trainer began after the end of the run: only the first is tuned"


def refuse_resumed(steps: int, argument: str) -> None:
    """Raises LoopError for a training that begins behind so many steps of another."""
    if steps:
        raise LoopError(
            f"the Trainer goes on from a checkpoint, behind its step {steps}: a training of a study begins with the "
            f"model that train(run) makes; leave out {argument}"
        )
