"""What is known of a trial before it has ended: its speed, whether it fits, what it may come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainables.knobs import Scalar
from tuning.memory.frontier import Frontier
from tuning.pareto import Mode
from tuning.policies.oom import Outcome
from tuning.policies.outlook import Outlook
from tuning.policies.throughput import Probed, Rates
from tuning.records import Record
from tuning.space import Space
from tuning.stages.estimate import key_of


class Foresight:
    """Chooses what to train next, and says what can be given up, from probes, footprints and trials.

    `probes` are those of the space, none of them in a joint search: then no speed is known before it is measured.
    """

    def __init__(
        self,
        space: Space,
        names: Sequence[str],
        probes: Sequence[Probed],
        frontier: Frontier,
        objectives: Mapping[str, Mode],
        samples: int,
        seed: int,
    ) -> None:
        self._space, self._frontier = space, frontier
        self._rates = Rates(probes, space)
        self._objective, mode = next(iter(objectives.items()))
        self._may_give_up = bool(probes) and len(objectives) == 1  # by a second quality a trial may yet reach the front
        self._outlook = Outlook(space, names, mode, samples, seed)

    def rate_of(self, knobs: Mapping[str, Scalar], result: Mapping[str, Any]) -> float | None:
        """Returns what a probe found for these very knobs, else what the trial measured beside its neighbours."""
        known = self._rates.of(knobs)
        return known if known is not None else result.get("measured_samples_per_s")

    def choose(self, candidates: Sequence[Mapping[str, Scalar]]) -> int:
        """Returns which of them is expected to add most to the front for its time, the speed of each being known."""
        fitting: dict[Any, int] = {}

        def speed(values: Mapping[str, Scalar]) -> float | None:
            choice = self._rates.expected(values)
            if choice is None:
                return None
            micro = int(choice.system["micro_batch_size"])
            asked = key_of({**self._space.fixed, **values}), micro
            if asked not in fitting:
                fitting[asked] = self._frontier.fitting(*asked)
            # A smaller micro-step takes no longer, so that the speed falls with it at most.
            return choice.samples_per_s * fitting[asked] / micro if fitting[asked] else None

        return self._outlook.choose(candidates, [speed(c) for c in candidates])

    def begun(self, trial: str, knobs: Mapping[str, Scalar]) -> None:
        """Takes a trial that is under way."""
        self._outlook.begun(trial, knobs)

    def rung(self, trial: str, milestone: int, values: Mapping[str, float | None]) -> None:
        """Takes what a trial came to on the way."""
        self._outlook.rung(trial, milestone, values.get(self._objective))

    def hopeless(
        self, knobs: Mapping[str, Scalar], milestone: int, values: Mapping[str, float | None], rate: float
    ) -> str:
        """Returns why a trial cannot come to the front any more, "" where it can or nothing may be said of it."""
        if not self._may_give_up:
            return ""
        return self._outlook.hopeless(knobs, milestone, values.get(self._objective), rate)

    def ended(self, record: Record) -> None:
        """Takes how a trial ended, from its record."""
        trial, knobs, outcome = record["trial"], record["config"], record["outcome"]
        if outcome == Outcome.OK:
            self._rates.learn(knobs, record.get("measured_samples_per_s"))
            self._outlook.ended(trial, knobs, record["samples_per_s"], record["values"].get(self._objective))
        elif outcome == Outcome.STOPPED:
            self._outlook.stopped(trial, knobs)
        elif outcome in (Outcome.DIVERGED, Outcome.CRASH):
            self._outlook.failed(trial, knobs)
        else:
            self._outlook.dropped(trial)
