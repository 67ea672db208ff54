"""When a study will have ended, by what its stages have taken so far and what is left of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tuning.config.lenient import finite, whole
from tuning.config.schema import StudyConfig
from tuning.journal import timeline
from tuning.journal.records import Record, last
from tuning.report.trial_views import SPEED
from tuning.search import confirm


def ends_at_s(records: Sequence[Record], config: StudyConfig, used_s: float) -> float | None:
    """Returns when the study will have ended, in seconds of the run of which `used_s` are over.

    None before a probe or trial has shown a speed. At the most it is search.max_time.
    """
    study = last(records, "study")
    horizon = None if study is None else whole(study.get("horizon_samples"))
    speeds = [v for r in records if r.event in ("probe", "trial") and (v := finite(r.get(SPEED)))]
    stage, began_s = _latest_stage(records)
    if study is None or not horizon or not speeds or not stage:
        return None
    spent_s, training_s, limit_s = used_s - began_s, confirm.MORE * horizon / max(speeds), config.search.max_time_s
    left_s = 0.0
    if stage in ("estimate", "probe", "search"):
        left_s += _confirming_s(config, horizon, max(speeds))
        left_s += _search_left_s(records, config, training_s, spent_s if stage == "search" else 0.0)
    if stage in ("estimate", "probe") and config.search.strategy == "staged":
        left_s += max(0.0, config.budget.probe.max_time_s - (spent_s if stage == "probe" else 0.0))
    if stage == "confirm":
        left_s += _confirm_left_s(records, config, training_s)
    ends_s = used_s + left_s
    return ends_s if limit_s is None else max(used_s, min(ends_s, limit_s))


def _search_left_s(records: Sequence[Record], config: StudyConfig, training_s: float, spent_s: float) -> float:
    """Returns what the trials that are left take in their slots, by the mean of those that ended."""
    ended = [r for r in records if r.event == "trial"]
    left: int = config.search.trials - len({r["trial"] for r in ended})
    left -= sum(r.event == "refused" and r["stage"] == "search" for r in records)
    study = last(records, "study")
    slots: int = (whole(study.get("concurrency")) if study else None) or 1
    if not ended:
        return max(0.0, training_s * left / slots - spent_s)
    took_s: float = sum(finite(r.get(k)) or 0.0 for r in ended for k in ("setup_s", "train_s", "evaluate_s"))
    return took_s / len(ended) * max(0, left) / slots


def _confirming_s(config: StudyConfig, horizon: int, samples_per_s: float) -> float:
    """Returns what confirming takes: a challenger or two are trained beside the pick, as far as its share lasts."""
    budget, limit_s = config.budget.confirm, config.search.max_time_s
    alone_s = confirm.expected_s(budget, len(config.named) + 1, horizon, samples_per_s)
    return alone_s if limit_s is None else min(alone_s, confirm.SHARE * limit_s)


def _confirm_left_s(records: Sequence[Record], config: StudyConfig, training_s: float) -> float:
    """Returns what is left of confirming: trainings as long as those so far, then rounds of windows."""
    budget, configurations = config.budget.confirm, len(config.named) + 1
    took: list[float] = [finite(r.get("train_s")) or training_s for r in records if r.event == "confirmed"]
    trained = 1 + len({r["trial"] for r in records if r.event == "rival" and r["decision"] == "confirm"})
    windows = sum(r.event == "window" for r in records)
    left_s: float = confirm.windows_s(budget, configurations) * max(
        0.0, 1 - windows / (budget.windows * configurations)
    )
    if windows:
        return left_s
    each_s = statistics.fmean(took) if took else training_s
    return left_s + each_s * max(0, trained * budget.seeds - len(took))


def _latest_stage(records: Sequence[Record]) -> tuple[str, float]:
    """Returns the stage that has begun last and when; "" where none has."""
    found = [(str(r["stage"]), at) for r, at, _ in timeline.moments(records) if r.event == "stage"]
    return found[-1] if found else ("", 0.0)
