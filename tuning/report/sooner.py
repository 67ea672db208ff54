"""How much sooner the pick is as good as the reference at its end: a learning rate may buy more than speed does.

Known from the rungs of trainings of the search's one seed, and from what loops of one's own reported between them, so
samples are those of the first report that was as good. Where that is its very first, nothing tells when it was.
"""

from __future__ import annotations

import math

from tuning.report.format import duration, plain
from tuning.report.named import speeds
from tuning.report.sentences import called
from tuning.report.summary import Summary


def sooner_sentence(found: Summary) -> str:
    """Returns in what time the pick comes to the reference's quality, "" where it takes as long, or nothing tells.

    Seconds are samples over the speeds of both that were measured alike; evaluations are in none.
    """
    best, reference = found.best, found.reference
    if best is None or reference is None or (measured := speeds(best, reference)) is None:
        return ""
    theirs = next((t for t in found.trials if t.named == reference.name and t.outcome == "ok"), None)
    aim = None if theirs is None else theirs.values.get(found.objective)
    if theirs is None or aim is None or theirs.trial == best.trial:
        return ""
    curve = found.curves.get(best.trial, ())
    sign = 1.0 if found.objectives[found.objective] == "max" else -1.0
    if not found.repeats or not curve or sign * curve[-1][1] < sign * aim:
        return ""  # a lucky report on the way is no answer
    ours, usual = _reached(found, best.trial, aim), _reached(found, theirs.trial, aim)
    if ours is None or usual is None or ours >= usual or ours == _reached(found, best.trial, -sign * math.inf):
        return ""  # it was as good when it was first looked at: nobody saw when it came to that
    (kind, ours_per_s), (other, theirs_per_s) = measured
    ours_s, usual_s = ours / ours_per_s, usual / theirs_per_s
    if kind != other:
        return ""  # a probe reads otherwise than a training
    if (times := usual_s / ours_s) < 1.05:
        return ""  # `ours` is the latest that it may be: that it is later is not known
    who = called(reference.name)
    aimed = f"{plain(found.objective)} {aim:.3f}, to which {who} came in the search,"
    took = f"within {ours:,} samples ({duration(ours_s)}), {who} within {usual:,} ({duration(usual_s)})"
    return f"It comes to {aimed} {took}: {times:.1f} times sooner, by one seed"


def _reached(found: Summary, trial: str, aim: float) -> int | None:
    """Returns the samples at the first report at which a trial was as good as `aim`."""
    sign = 1.0 if found.objectives[found.objective] == "max" else -1.0
    own = next((t for t in found.trials if t.trial == trial), None)
    curve = list(found.curves.get(trial, ()))
    for samples, values in own.reports if own is not None else ():
        value = values.get(found.objective)
        curve += [] if value is None else [(samples, value)]
    return min((samples for samples, value in curve if sign * value >= sign * aim), default=None)
