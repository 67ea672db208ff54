"""Loops of frameworks as loops of one's own: theirs runs, and `run` sets, counts, times and ends it."""

from __future__ import annotations

import math


def steps_to(samples: int, pass_samples: int, micro: int, accumulation: int) -> int:
    """Returns the optimiser steps up to so many samples, in a framework that steps at the end of every pass.

    So the last step of a pass may be of fewer micro-batches than `accumulation`, and its last one of fewer than `micro`
    samples.
    """
    passes, left = divmod(samples, pass_samples)
    whole = math.ceil(math.ceil(pass_samples / micro) / accumulation)
    return passes * whole + math.ceil(math.ceil(left / micro) / accumulation)
