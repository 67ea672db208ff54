"""Loops of frameworks as loops of one's own: theirs runs, and `run` sets, counts, times and ends it."""
