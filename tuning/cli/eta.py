"""When a study will have ended, by what its stages have taken so far and what is left of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tuning.config.lenient import finite, whole
from tuning.config.resolve import measured_beside
from tuning.config.schema import StudyConfig
from tuning.journal import timeline
from tuning.journal.records import Record, last, reopened, trained_beside
from tuning.report.trial_views import SPEED
from tuning.search import confirm
from tuning.search.probe import probes_s
from tuning.search.race import LEAST_SEEDS

FIRST_WINDOW_COST_S = 0.5
"""What a window takes beside its own length, before any was seen: 0.2 to 1 s."""


def ends_at_s(records: Sequence[Record], config: StudyConfig, used_s: float) -> float | None:
    """Returns when the study will have ended, in seconds of the run of which `used_s` are over.

    At the most it is search.max_time, as long as that is not over. None while nothing is known: neither a limit, nor
    the speed of a probe or trial.
    """
    study = last(records, "study")
    horizon = None if study is None else whole(study.get("horizon_samples"))
    speeds = [v for r in records if r.event in ("probe", "trial") and (v := finite(r.get(SPEED)))]
    (stage, began_s), limit_s = _latest_stage(records), config.search.max_time_s
    if not horizon or not speeds or not stage:
        return limit_s
    spent_s, training_s = used_s - began_s, confirm.MORE * horizon / max(speeds)
    left_s = 0.0
    if stage in ("estimate", "probe") and config.search.strategy == "staged":
        left_s += _probe_left_s(config, began_s, spent_s if stage == "probe" else 0.0)
    if stage in ("estimate", "probe", "search"):
        count = len(turns(records, config))
        windows_s = confirm.LEAST_ROUNDS * count * (config.budget.confirm.window_s + FIRST_WINDOW_COST_S)
        begun = any(r.event == "trial_start" for r in records)
        if not begun and (limit_s is not None and training_s > limit_s - used_s - left_s - windows_s):
            left_s += windows_s  # nothing can be trained in the time
        else:
            left_s += _confirming_s(config, horizon, max(speeds))
            left_s += _search_left_s(records, config, training_s, spent_s if stage == "search" else 0.0)
    if stage == "confirm":
        left_s += _confirm_left_s(records, config, training_s, spent_s)
    ends_s = used_s + left_s
    return ends_s if limit_s is None or used_s > limit_s else min(ends_s, limit_s)


def _probe_left_s(config: StudyConfig, began_s: float, spent_s: float) -> float:
    """Returns what is left for probes, which have their budget and a share of the time at the most."""
    return max(0.0, probes_s(config, (config.search.max_time_s or math.inf) - began_s) - spent_s)


def _search_left_s(records: Sequence[Record], config: StudyConfig, training_s: float, spent_s: float) -> float:
    """Returns what the trials that are left take in their slots, by the mean of those that ended."""
    ended = [r for r in records if r.event == "trial"]
    left: int = config.search.most_trials - len({r["trial"] for r in ended} - trained_beside(records))
    study = last(records, "study")
    slots: int = (whole(study.get("concurrency")) if study else None) or 1
    if not ended:
        return max(0.0, training_s * left / slots - spent_s)
    took_s: float = sum(finite(r.get(k)) or 0.0 for r in ended for k in ("setup_s", "train_s", "evaluate_s"))
    return took_s / len(ended) * max(0, left) / slots


def _confirming_s(config: StudyConfig, horizon: int, samples_per_s: float) -> float:
    """Returns what confirming takes: the pick and the reference are trained on a few seeds, then windows."""
    budget, limit_s = config.budget.confirm, config.search.max_time_s
    alone_s = confirm.expected_s(budget, len(config.named) + 1, horizon, samples_per_s)
    return alone_s if limit_s is None else min(alone_s, confirm.SHARE * limit_s)


def _confirm_left_s(records: Sequence[Record], config: StudyConfig, training_s: float, spent_s: float) -> float:
    """Returns what is left of confirming: trainings as long as those so far, then windows as long as those so far.

    No round of windows is begun that cannot be ended in the share of search.max_time.
    """
    budget, limit_s, since = config.budget.confirm, config.search.max_time_s, began(records, "confirm")
    windows_s = [finite(r.get("wall_s")) or budget.window_s for r in records[since:] if r.event == "window"]
    whole_s = [finite(r.get("train_s")) or training_s for r in records if r.event == "trial" and r["outcome"] == "ok"]
    own = [r for r in records if r.event == "confirmed"]
    took = [finite(r.get("train_s")) or training_s for r in own]
    trainings_s = 0.0
    if whole_s and not windows_s:
        trainings_s = statistics.fmean(took or whole_s) * max(0, 2 * LEAST_SEEDS - len(took))
    each_s = statistics.fmean(windows_s) if windows_s else budget.window_s + FIRST_WINDOW_COST_S
    count = len(turns(records, config))
    rest = -len(windows_s) % count  # of the round that has begun
    rounds = (budget.windows if whole_s else confirm.LEAST_ROUNDS) - (len(windows_s) + rest) // count
    if limit_s is not None:
        share_s = max(0.0, confirm.SHARE * limit_s - spent_s)
        trainings_s = min(trainings_s, max(0.0, share_s - confirm.LEAST_ROUNDS * count * each_s))
        rounds = min(rounds, int((share_s - trainings_s - rest * each_s) / (count * each_s)))
    return trainings_s + (rest + max(0, rounds) * count) * each_s


def turns(records: Sequence[Record], config: StudyConfig) -> list[str]:
    """Returns the names of the configurations that take turns in windows: those named, and "best" or several trials."""
    named = measured_beside(config)
    own = [str(r["name"]) for r in records[began(records, "confirm") :] if r.event == "window"]
    return [*named, *(dict.fromkeys(name for name in own if name not in named) or ["best"])]


def began(records: Sequence[Record], stage: str) -> int:
    """Returns the place of the record with which a stage begins, since the study was last given more time or trials;
    the end where it has not.
    """
    since = len(records) - len(reopened(records))
    places = (n for n in range(since, len(records)) if records[n].event == "stage" and records[n]["stage"] == stage)
    return next(places, len(records))


def _latest_stage(records: Sequence[Record]) -> tuple[str, float]:
    """Returns the stage that has begun last and when; "" where none has."""
    found = [(str(r["stage"]), at) for r, at in timeline.moments(records) if r.event == "stage"]
    return found[-1] if found else ("", 0.0)
