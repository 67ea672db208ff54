"""Our search as a searcher of Ray Tune: what is faster than the best so far, and may be as good as the reference."""

from __future__ import annotations

import math
import pickle
import shutil
import statistics
import tempfile
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.tune.search import Searcher

from trainables.knobs import Scalar
from tuning.config.errors import ConfigError, PreflightError
from tuning.config.schema import PickSection, validated
from tuning.journal.events import ProbeRecord, RefusedRecord
from tuning.journal.records import Journal
from tuning.memory.groups import guard
from tuning.memory.guard import MemoryGroup, MemoryGuard
from tuning.memory.oom import Outcome
from tuning.ray import measuring
from tuning.ray.spaces import TuneSpace
from tuning.ray.training import parts_of
from tuning.search.protocols import TrialPlan, TrialRequest, TrialState
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.search.selection import so_far
from tuning.search.throughput import FEW_RATIOS

MANY = 1_000_000
"""Trials without a limit of ours: `num_samples` of Tune is one."""
REFERENCE = "reference"
PICK_DEFAULTS: Mapping[str, Any] = {"tolerance": 0.0, "at_least": None, "goal": "speed"}
SLOWER = 1.2
"""A trial ends at a rung if it is so many times as slow as the best so far: a probe is off by as much at most times."""


@dataclass(frozen=True)
class RayPick:
    """The fastest configuration that is as good as the reference, by one seed: train both again on fresh seeds.

    `config` is what the function takes, `value` its metric, `samples_per_s` its speed (steps a second without a batch
    size in the space). `reference_value` and `reference_per_s` are the reference's, None if it came to no end.
    """

    config: Mapping[str, Scalar]
    value: float
    samples_per_s: float
    reference_value: float | None
    reference_per_s: float | None


class WholeBatches(MemoryGuard):
    """A guard of functions that train each batch in one piece: what does not fit is not cut."""

    def __init__(self, learned: MemoryGuard) -> None:
        """Takes over what another guard has learned."""
        vars(self).update(vars(learned))

    def fitting(self, group: MemoryGroup, micro_batch: int) -> int:
        """Returns the micro-batch if it fits, else 0."""
        return micro_batch if super().fitting(group, micro_batch) == micro_batch else 0


@dataclass
class _Live:
    """A trial that Tune runs: its name in the search, and the speeds of its beginning, of itself and of the best."""

    name: str
    expected_per_s: float
    best_per_s: float
    rungs: int = 0
    is_slow: bool = False


class KnownSpeedSearcher(Searcher):
    """Searches for the fastest configuration whose `metric` is as good as that of the `reference`.

    `measure` is called first: it learns what fits, and how fast it is. Then the reference is trained, and after it only
    what fits and is expected to be faster than the best so far; a Gaussian process tells what may be as good. It ends
    if nothing is worth a training, or after `num_samples`; `stop_reason` says why, `best` what was found. It needs
    trials that are `measured`. Tune saves and restores it with the experiment.
    """

    def __init__(
        self,
        space: Mapping[str, object],
        metric: str,
        mode: Literal["min", "max"],
        *,
        reference: Mapping[str, Scalar] | None = None,
        learning: Collection[str] = (),
        system: Collection[str] = (),
        pick: Mapping[str, float | str] | None = None,
        seed: int = 0,
    ) -> None:
        """`space` maps names of the config to `tune.choice`, `loguniform` and the like, or lists.

        `lr`, `bs` and the names of cardtune's knobs are known. Any other changes speed, memory and what is learned,
        unless it is in `learning` (neither speed nor memory) or `system` (nothing that is learned). `reference` is the
        config of today; what it leaves out starts where the space does. `pick` may have "tolerance", the loss of the
        metric that is accepted in its own unit; "at_least", a value in place of the reference's; and "goal": "quality"
        for the best metric that is no slower than the reference. Raises ConfigError for what cannot be searched.
        """
        if mode not in ("min", "max") or not isinstance(metric, str):
            what = f"metric={metric!r}, mode={mode!r}"
            raise ConfigError(what, allowed="the name of one reported metric; min or max", remedy="'accuracy', 'max'")
        super().__init__(metric, mode)
        self._space, self._seed = TuneSpace.parse(space, learning, system), seed
        self._reference = self._space.knobs(reference or {})
        asked = validated(
            PickSection,
            {**PICK_DEFAULTS, **(pick or {})},
            "pick",
            {},
            {f"pick.{n}": v for n, v in PICK_DEFAULTS.items()},
        )
        self._goal, self._objectives = asked.goal, {metric: mode}
        config, table = {"pick": asked.model_dump()}, self._space.space.table
        self._study = {"objectives": self._objectives, "knobs": table.as_raw(), "config": config}
        self._plan = TrialPlan(MANY, (MANY,), shrink=False, concurrency=2, threads=1)
        self._time = "training_iteration"
        self._most: int | None = None
        self._lines = b""
        """The journal of what was measured, or of an earlier session."""
        self._live: dict[str, _Live] = {}
        """By Tune's id."""
        self._waiting: list[TrialRequest] = []
        self._slowdowns: list[float] = []
        """The speeds of whole trainings, each over the speed that its probe let expect."""
        self._journal: Journal | None = None
        self._search: TrialScheduler | None = None

    def measure(self, trainable: Any, *, num_cpus: float = 1.0, num_gpus: float = 0.0, limit_s: float = 60.0) -> None:
        """Runs the `measured` function for a few steps at a time, in one Ray task with these resources of a trial.

        Memory first, at batch sizes from 2 up, then speeds; what is predicted not to fit is not run. It takes about
        `limit_s`, and less for a small space. Raises ConfigError for what is not `measured` by this metric, what
        `learn` raises, PreflightError if the task was lost, and what the function raises.
        """
        train, metric, cap_bytes = parts_of(trainable)
        if metric != self.metric:
            what = f"measured(metric={metric!r}), and the searcher has {self.metric!r}"
            raise ConfigError(what, allowed="one metric", remedy=f"measured(train, metric={self.metric!r})")
        task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(measuring.measure)
        try:
            lines = ray.get(task.remote(train, cap_bytes, self._space, self._study, self._reference, limit_s))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            what = f"the process that measured was lost: {str(error).strip().splitlines()[0][:200]}"
            raise PreflightError(what, remedy="smaller batches in the space, or a smaller cap_bytes=") from error
        self.learn(lines)

    def learn(self, lines: bytes) -> None:
        """Takes the journal of a measurement, as `measuring.measure` returns it.

        Raises ConfigError if the reference has no speed, as if it does not fit: nothing could be compared with it.
        """
        self._lines, self._journal, self._search = lines, None, None
        found = (e for e in self.journal.run.events if isinstance(e, ProbeRecord | RefusedRecord))
        first = next(found, None)
        if not isinstance(first, ProbeRecord) or not first.samples_per_s:
            why = first.message if isinstance(first, ProbeRecord) else "" if first is None else first.reason
            what = f"the reference {self._space.config(self._reference)} could not be measured: {why}"
            raise ConfigError(what, allowed="a config that fits and trains", remedy="reference= your current settings")

    @property
    def stop_reason(self) -> str:
        """Returns why no further trial begins, "" while more may."""
        return self._search.stop_reason if self._search is not None else ""

    @property
    def journal(self) -> Journal:
        """Returns the records of what was measured, refused, trained and stopped, each with its reason.

        Raises ConfigError if nothing was measured.
        """
        if self._journal is None:
            if not self._lines:
                what = "KnownSpeedSearcher knows no speed: nothing was measured"
                raise ConfigError(what, remedy="searcher.measure(train) before Tuner(...).fit()")
            folder = Path(tempfile.mkdtemp(prefix="cardtune-"))
            (folder / "trials.jsonl").write_bytes(self._lines)
            self._journal = Journal.open(folder / "trials.jsonl")
            weakref.finalize(self._journal, shutil.rmtree, folder, ignore_errors=True)
        return self._journal

    @property
    def best(self) -> RayPick | None:
        """Returns the pick so far, the reference if nothing faster is fairly sure to be as good; None before an end."""
        run = self.journal.run
        today, found = run.reference, so_far(run)
        end = run.trials[found.best].end if found is not None else None
        if today is not None and self._goal == "speed":
            end = run.trials[self._searching().pick()].end
        if today is not None and (end is None or (end.samples_per_s or 0.0) < (today.samples_per_s or 0.0)):
            end = today
        value, before = (None if one is None else one.values.get(self.metric) for one in (end, today))
        if end is None or value is None:
            return None
        today_per_s = None if today is None else today.samples_per_s
        return RayPick(self._space.config(end.config), value, end.samples_per_s or 0.0, before, today_per_s)

    # -- what Tune calls -----------------------------------------------------------------------------------------------

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Takes how many trials run at once, from `max_concurrent_trials`."""
        self._most = max_concurrent
        self._plan = replace(self._plan, concurrency=max_concurrent)
        return True

    def suggest(self, trial_id: str) -> Any:
        """Returns the config of the next trial, None while there is none, FINISHED at the end of the search."""
        search = self._searching()
        if self._most is not None and len(self._live) >= self._most:
            return None
        request = self._waiting.pop(0) if self._waiting else search.next_trial()
        if request is None:
            return None if self._live else Searcher.FINISHED
        begun = next(r.fields for r in reversed(self.journal.records) if r.fields.get("trial") == request.trial)
        expected, best = (float(begun.get(name) or 0.0) for name in ("expected_per_s", "pick_per_s"))
        self._live[trial_id] = _Live(request.trial, expected, best)
        return self._space.config(request.knobs)

    def goes_on(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Returns whether a trial goes on after a result, by speed, quality and memory; `OomAwareScheduler` asks it.

        At a rung it stops if it is behind the reference's curve by more than others made up for, or clearly slower than
        the best was when it began. Raises ConfigError for a result that `tuning.ray.report` did not make.
        """
        search, live = self._searching(), self._live.get(trial_id)
        if live is None or self._outcome(result) != Outcome.OK:
            return True  # it ends by itself
        state = self._state(result, str(Outcome.OK))
        if state.samples >= self._plan.samples:
            return False
        if sum(rung <= state.samples for rung in self._plan.milestones) <= live.rungs:
            return search.goes_on(live.name, state)
        live.rungs = sum(rung <= state.samples for rung in self._plan.milestones)
        if not search.at_rung(live.name, state):
            return False
        alone = statistics.median(self._slowdowns) if len(self._slowdowns) >= FEW_RATIOS else 0.0
        live.is_slow = 0 < (state.measured_samples_per_s or 0.0) * SLOWER < live.best_per_s * alone
        return not live.is_slow

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Takes how a trial ended: an OOM is a constraint by the bytes that it was over."""
        search, live = self._searching(), self._live.pop(trial_id, None)
        if live is None:
            return
        if error:
            said = "its function raised an error, which Tune has in the trial's error.txt"
            state = TrialState(outcome=str(Outcome.CRASH), done=True, message=said)
        elif not result:  # Tune ended it before its first report
            state = TrialState(outcome=str(Outcome.CUT), done=True)
        else:
            outcome = self._outcome(result)
            if outcome == Outcome.OK and not math.isfinite(float(result.get(self.metric, math.nan))):
                outcome = str(Outcome.DIVERGED)
            elif outcome == Outcome.OK and (live.is_slow or not result.get("done")):
                outcome = str(Outcome.STOPPED if live.is_slow else Outcome.CUT)
            state = self._state(result, outcome)
            if live.is_slow:
                state = replace(state, message=f"slower than the best, which has {live.best_per_s:.4g} samples/s")
        search.ended(live.name, state)
        if state.outcome == Outcome.OK and live.expected_per_s and state.measured_samples_per_s:
            self._slowdowns.append(state.measured_samples_per_s / live.expected_per_s)
        if search.has_nothing_better:  # what has just ended may have changed that
            search.stop_reason, search.has_nothing_better = "", False

    def save(self, checkpoint_path: str) -> None:
        """Writes all that the search knows."""
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__getstate__()))

    def restore(self, checkpoint_path: str) -> None:
        """Reads what `save` wrote; trials that ran then are known again by Tune's ids."""
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))  # noqa: S301  (Tune's own state is one)

    def __getstate__(self) -> dict[str, Any]:
        lines = self._lines if self._journal is None else self._journal.path.read_bytes()
        return {**self.__dict__, "_lines": lines, "_journal": None, "_search": None}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def rungs(self, time_attr: str, max_t: int, steps: tuple[int, ...]) -> None:
        """Takes at which values of `time_attr` a trial is judged and ends; `OomAwareScheduler` sets them."""
        self._time, self._plan = time_attr, replace(self._plan, samples=max_t, milestones=(*steps, max_t))

    def _outcome(self, result: Mapping[str, Any]) -> str:
        if "outcome" not in result or self._time not in result:
            what = f"a result has no {'outcome' if self._time in result else self._time}: {sorted(result)[:8]}"
            raise ConfigError(
                what, allowed="results of tuning.ray.report", remedy="report(...) in place of tune.report"
            )
        return str(result["outcome"])

    def _state(self, result: Mapping[str, Any], outcome: str) -> TrialState:
        value = result.get(self.metric)
        return TrialState(
            outcome=outcome,
            samples=int(result.get(self._time) or 0),
            done=True,
            values={self.metric: None if value is None or not math.isfinite(value) else float(value)},
            measured_samples_per_s=result.get("samples_per_s"),
            peak_allocated_bytes=result.get("peak_bytes"),
            wanted_bytes=result.get("wanted_bytes"),
            cap_bytes=self.journal.run.study.cap_bytes if self.journal.run.study else None,
            message=str(result.get("message") or ""),
            train_s=float(result.get("time_total_s") or 0.0),
        )

    def _searching(self) -> TrialScheduler:
        """Returns the search, made of the journal; trials that run by Tune's word are taken up again."""
        if self._search is None:
            run, space = self.journal.run, self._space.space
            terms = SearchTerms(
                MANY, None, self._seed, self._objectives, reference=self._reference, reference_name=REFERENCE
            )
            known = WholeBatches(guard(run, run.study.cap_bytes if run.study else None))
            self._search = TrialScheduler(self.journal, space, known, terms, self._plan, lambda event: None)
            running = {live.name for live in self._live.values()}
            for _ in running:
                if (request := self._search.next_trial()) is not None and request.trial not in running:
                    self._waiting.append(request)
        return self._search
