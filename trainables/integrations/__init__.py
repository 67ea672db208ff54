"""Loops of frameworks as loops of one's own: theirs runs, and `run` sets, counts, times and ends it."""

SECOND = "a second Trainer began after the end of the run: only the first is tuned"
