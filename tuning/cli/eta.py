"""When a study will have ended, by what its stages have taken so far and what is left of each."""

from __future__ import annotations

import math
import statistics

from tuning.config.resolve import measured_beside
from tuning.config.schema import StudyConfig
from tuning.journal.run import History
from tuning.memory.oom import Outcome
from tuning.search import confirm
from tuning.search.probe import probes_s
from tuning.search.race import LEAST_SEEDS

FIRST_WINDOW_COST_S = 0.5
"""What a window takes beside its own length, before any was seen: 0.2 to 1 s."""


def ends_at_s(run: History, config: StudyConfig, used_s: float) -> float | None:
    """Returns when the study will have ended, in seconds of the run of which `used_s` are over.

    At the most it is search.max_time, as long as that is not over. None while nothing is known: neither a limit, nor
    the speed of a probe or trial.
    """
    horizon, limit_s = None if run.study is None else run.study.horizon_samples, config.search.max_time_s
    speeds = [measured.samples_per_s for measured in (*run.probes, *run.ended) if measured.samples_per_s]
    if not horizon or not speeds or not run.stages:
        return limit_s
    stage, began_s = run.stage, run.stages[-1].at_s
    spent_s, training_s = used_s - began_s, confirm.MORE * horizon / max(speeds)
    left_s = 0.0
    if stage in ("estimate", "probe") and config.search.strategy == "staged":
        left_s += _probe_left_s(config, began_s, spent_s if stage == "probe" else 0.0)
    if stage in ("estimate", "probe", "search"):
        count = len(turns(run, config))
        windows_s = confirm.LEAST_ROUNDS * count * (config.budget.confirm.window_s + FIRST_WINDOW_COST_S)
        if not run.begun and (limit_s is not None and training_s > limit_s - used_s - left_s - windows_s):
            left_s += windows_s  # nothing can be trained in the time
        else:
            left_s += _confirming_s(config, horizon, max(speeds))
            left_s += _search_left_s(run, config, training_s, spent_s if stage == "search" else 0.0)
    if stage == "confirm":
        left_s += _confirm_left_s(run, config, training_s, spent_s)
    ends_s = used_s + left_s
    return ends_s if limit_s is None or used_s > limit_s else min(ends_s, limit_s)


def _probe_left_s(config: StudyConfig, began_s: float, spent_s: float) -> float:
    """Returns what is left for probes, which have their budget and a share of the time at the most."""
    return max(0.0, probes_s(config, (config.search.max_time_s or math.inf) - began_s) - spent_s)


def _search_left_s(run: History, config: StudyConfig, training_s: float, spent_s: float) -> float:
    """Returns what the trials that are left take in their slots, by the mean of those that ended."""
    left: int = config.search.most_trials - len(run.searched)
    slots = (run.study.concurrency if run.study else None) or 1
    ended = [end for trial in run.trials.values() for end in trial.ends]
    if not ended:
        return max(0.0, training_s * left / slots - spent_s)
    took_s = sum(end.setup_s + end.train_s + end.evaluate_s for end in ended)
    return took_s / len(ended) * max(0, left) / slots


def _confirming_s(config: StudyConfig, horizon: int, samples_per_s: float) -> float:
    """Returns what confirming takes: the pick and the reference are trained on a few seeds, then windows."""
    budget, limit_s = config.budget.confirm, config.search.max_time_s
    alone_s = confirm.expected_s(budget, len(config.named) + 1, horizon, samples_per_s)
    return alone_s if limit_s is None else min(alone_s, confirm.SHARE * limit_s)


def _confirm_left_s(run: History, config: StudyConfig, training_s: float, spent_s: float) -> float:
    """Returns what is left of confirming: trainings as long as those so far, then windows as long as those so far.

    No round of windows is begun that cannot be ended in the share of search.max_time.
    """
    budget, limit_s = config.budget.confirm, config.search.max_time_s
    windows_s = [window.wall_s or budget.window_s for window in run.windows if run.has_begun("confirm", window)]
    whole_s = [end.train_s or training_s for end in run.ended if end.outcome == Outcome.OK]
    took = [again.train_s or training_s for again in run.confirmed]
    trainings_s = 0.0
    if whole_s and not windows_s:
        trainings_s = statistics.fmean(took or whole_s) * max(0, 2 * LEAST_SEEDS - len(took))
    each_s = statistics.fmean(windows_s) if windows_s else budget.window_s + FIRST_WINDOW_COST_S
    count = len(turns(run, config))
    rest = -len(windows_s) % count  # of the round that has begun
    rounds = (budget.windows if whole_s else confirm.LEAST_ROUNDS) - (len(windows_s) + rest) // count
    if limit_s is not None:
        share_s = max(0.0, confirm.SHARE * limit_s - spent_s)
        trainings_s = min(trainings_s, max(0.0, share_s - confirm.LEAST_ROUNDS * count * each_s))
        rounds = min(rounds, int((share_s - trainings_s - rest * each_s) / (count * each_s)))
    return trainings_s + (rest + max(0, rounds) * count) * each_s


def turns(run: History, config: StudyConfig) -> list[str]:
    """Returns the names of the configurations that take turns in windows: those named, and "best" or several trials."""
    named = measured_beside(config)
    own = [window.name for window in run.windows if run.has_begun("confirm", window)]
    return [*named, *(dict.fromkeys(name for name in own if name not in named) or ["best"])]
