"""The plan of a study's time, by what is known so far: its limits and the time left are read from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuning.config.resolve import measured_beside
from tuning.config.schema import StudyConfig
from tuning.journal.run import History
from tuning.search import confirm
from tuning.search.probe import probes_s
from tuning.search.race import LEAST_SEEDS


@dataclass(frozen=True)
class TimePlan:
    """Seconds of each part; `limit_s` is search.max_time, infinity without.

    `training_s` is one training to its end at the fastest speed that was measured, its evaluations included, and
    `reference_s` one of the reference; both are 0 if no speed is known. `round_s` is a round of `turns` windows.
    """

    limit_s: float
    probes_s: float
    trials: int
    slots: int
    training_s: float
    reference_s: float
    turns: int
    rounds: int
    round_s: float

    @property
    def share_s(self) -> float:
        """Returns the most that confirming may take."""
        return confirm.SHARE * self.limit_s

    @property
    def confirm_s(self) -> float:
        """Returns what confirming takes: the pick and the reference on a few seeds, then rounds. All of its share if
        no speed is known.
        """
        trainings_s = LEAST_SEEDS * (self.training_s + self.reference_s) if self.training_s else math.inf
        return min(confirm.START_S + trainings_s + self.rounds * self.round_s, self.share_s)

    @property
    def least_rounds_s(self) -> float:
        """Returns what the fewest rounds take, which come even if nothing was trained again."""
        return min(confirm.LEAST_ROUNDS, self.rounds) * min(self.round_s, self.share_s / confirm.LEAST_ROUNDS)


def planned(run: History, config: StudyConfig, horizon_samples: int | None, reference_per_s: float = 0.0) -> TimePlan:
    """Returns the plan, as the records and the samples of a whole trial have it; 0 for a speed that is not known."""
    budget, limit_s = config.budget.confirm, config.search.max_time_s
    start_s, rounds = confirm.start_s(run), confirm.rounds(run, budget)
    known = [measured.samples_per_s for measured in (*run.probes, *run.ended) if measured.samples_per_s]
    samples, turns = confirm.MORE * (horizon_samples or 0), len(measured_beside(config)) + 1
    began_s = next((one.at_s for one in run.stages if one.stage == "probe"), run.used_s)
    return TimePlan(
        limit_s=math.inf if limit_s is None else limit_s,
        probes_s=probes_s(config, math.inf if limit_s is None else limit_s - began_s),
        trials=config.search.most_trials,
        slots=(run.study.concurrency if run.study else None) or 1,
        training_s=start_s + samples / max(known) if known else 0.0,
        reference_s=start_s + samples / reference_per_s if reference_per_s else 0.0,
        turns=turns,
        rounds=rounds,
        round_s=turns * (budget.window_s + confirm.WINDOW_COST_S),
    )
