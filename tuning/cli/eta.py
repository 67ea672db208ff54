"""When a study will have ended: what its stages have taken so far, and what its plan says of the rest."""

from __future__ import annotations

import statistics

from tuning.config.schema import StudyConfig
from tuning.journal.run import History
from tuning.search.race import LEAST_SEEDS
from tuning.search.timeplan import TimePlan, planned


def ends_at_s(run: History, config: StudyConfig, used_s: float) -> float | None:
    """Returns when the study will have ended, in seconds of the run of which `used_s` are over.

    At the most it is search.max_time, as long as that is not over. None while nothing is known: neither a limit, nor
    the speed of a probe or trial.
    """
    plan = planned(run, config, None if run.study is None else run.study.horizon_samples)
    if not plan.training_s or not run.stages:
        return config.search.max_time_s
    stage, spent_s, left_s = run.stage, used_s - run.stages[-1].at_s, 0.0
    if stage in ("estimate", "probe"):
        left_s = max(0.0, plan.probes_s - (spent_s if stage == "probe" else 0.0))
    if stage in ("estimate", "probe", "search"):
        if not run.begun and plan.training_s > plan.limit_s - used_s - left_s - plan.least_rounds_s:
            left_s += plan.least_rounds_s  # nothing can be trained in the time
        else:
            left_s += plan.confirm_s + _search_left_s(run, plan, spent_s if stage == "search" else 0.0)
    if stage == "confirm":
        left_s = max(0.0, min(_confirm_left_s(run, plan), plan.share_s - spent_s))
    return used_s + left_s if used_s > plan.limit_s else min(used_s + left_s, plan.limit_s)


def _search_left_s(run: History, plan: TimePlan, spent_s: float) -> float:
    """Returns what the trials that are left take in their slots, by the mean of those that ended."""
    left = max(0, plan.trials - len(run.searched))
    took = [end.setup_s + end.train_s + end.evaluate_s for trial in run.trials.values() for end in trial.ends]
    if took:
        return statistics.fmean(took) * left / plan.slots
    return max(0.0, plan.training_s * left / plan.slots - spent_s)


def _confirm_left_s(run: History, plan: TimePlan) -> float:
    """Returns what is left of confirming: trainings as long as those so far, then windows as long as those so far."""
    windows_s = [window.wall_s for window in run.windows if run.has_begun("confirm", window)]
    took = [again.train_s or plan.training_s for again in run.confirmed]
    missing = 0 if windows_s else max(0, 2 * LEAST_SEEDS - len(took))
    each_s = (any(windows_s) and statistics.fmean(windows_s)) or plan.round_s / plan.turns
    windows = max(0, plan.rounds * plan.turns - len(windows_s))
    return (statistics.fmean(took) if took else plan.training_s) * missing + each_s * windows
