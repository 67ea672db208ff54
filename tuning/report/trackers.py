"""A run in an experiment tracker: a run for each trial, with its settings, curve, speed and memory, and one for all.

Everything is read from a `Summary`, and what a tracker has already is left out, so that a run can be written while it
goes on, and again afterwards. Nothing leaves this machine unless the tracker was told to send it: MLflow and W&B by
their own environment variables.
"""

from __future__ import annotations

import importlib
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuning.config.errors import ConfigError, PreflightError, TuningError
from tuning.journal.events import Config
from tuning.journal.run import History
from tuning.report import sentences
from tuning.report.summary import Summary
from tuning.report.trial_views import SPEED
from tuning.search import optuna_study


@dataclass(frozen=True)
class TrackedRun:
    """A trial that has ended, or the whole search (`name` is the run's id): `curve` is (samples, value of `objective`).

    `tags` hold how it ended, and which of the answers it is.
    """

    name: str
    config: Config
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    objective: str
    curve: tuple[tuple[int, float], ...] = ()


def trials_of(found: Summary) -> Iterator[TrackedRun]:
    """Yields each trial that has ended."""
    for one in found.trials:
        figures = {**one.values, SPEED: one.known_per_s, "peak_allocated_bytes": one.peak_allocated_bytes}
        tags = {"outcome": one.outcome or "ok", "reference": one.named, "message": one.message}
        yield TrackedRun(
            name=one.trial,
            config=one.config,
            metrics={name: float(value) for name, value in figures.items() if value is not None},
            tags={name: value for name, value in tags.items() if value},
            objective=found.objective,
            curve=found.curves.get(one.trial, ()),
        )


def whole(found: Summary) -> TrackedRun:
    """Returns the search itself: the configuration that it picked, what that gains, and the answer in a sentence."""
    best, reference = found.best, found.reference
    gain = found.gain("best", reference.name) if best and reference else None
    metrics = {f"{name} on fresh seeds": own.mean for name, own in best.quality.items()} if best else {}
    metrics |= {"speed over the reference": gain.ratio} if gain else {}
    picked = {"pick": best.trial or best.name} if best else {}
    tags = {"workload": found.workload, "answer": sentences.answer(found), **picked}
    return TrackedRun(found.id, best.config if best else {}, metrics, tags, found.objective)


class Tracker(ABC):
    """Takes a search. `place` is how it is looked at."""

    place: str

    def take(self, run: History, found: Summary) -> int:
        """Returns how many trials were written: those that have ended and are not there yet."""
        missing = [one for one in trials_of(found) if not self.has(one.name)]
        for one in missing:
            self.trial(one)
        return len(missing)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Returns whether a trial is there already."""

    @abstractmethod
    def trial(self, one: TrackedRun) -> None:
        """Writes a trial."""

    @abstractmethod
    def end(self, search: TrackedRun) -> None:
        """Writes the search itself, anew each time, and closes what is open."""


class OptunaStorage(Tracker):
    """A study with a trial for each of ours, for optuna-dashboard: in a file of the run's folder, or a database."""

    def __init__(self, run: str, folder: Path, place: str | None) -> None:
        where, self._name = place or str(folder / "optuna.log"), f"{folder.parent.name} {run}"
        self._storage = optuna_study.opened(where)
        self.place = f"optuna-dashboard {shlex.quote(where)}"

    def take(self, run: History, found: Summary) -> int:
        """Returns how many trials were written."""
        before = optuna_study.trials_in(self._storage, self._name)
        optuna_study.mirrored(run, self._name, self._storage)
        return optuna_study.trials_in(self._storage, self._name) - before

    def has(self, name: str) -> bool:
        """Returns False: a study knows its own trials."""
        return False

    def trial(self, one: TrackedRun) -> None:
        """Does nothing: `take` writes them."""

    def end(self, search: TrackedRun) -> None:
        """Does nothing: a study has no pick."""


class TensorBoard(Tracker):
    """A folder for each trial, with its curve over samples, and its settings on the page HPARAMS."""

    def __init__(self, run: str, folder: Path, place: str | None) -> None:
        _imported("tensorboard", "tensorboard")
        self._writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = Path(place) if place else folder / "tensorboard"
        self.place = f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def has(self, name: str) -> bool:
        """Returns whether the trial has a folder."""
        return (self._folder / name).is_dir()

    def trial(self, one: TrackedRun) -> None:
        """Writes the folder of a trial."""
        with self._writer(str(self._folder / one.name)) as writer:
            for samples, value in one.curve:
                writer.add_scalar(one.objective, value, samples)
            writer.add_text("outcome", "  \n".join(f"{name}: {value}" for name, value in one.tags.items()))
            writer.add_hparams(dict(one.config), dict(one.metrics), run_name=".")

    def end(self, search: TrackedRun) -> None:
        """Writes the answer as a text."""
        with self._writer(str(self._folder / "search")) as writer:
            writer.add_text("answer", "  \n".join(f"{name}: {value}" for name, value in search.tags.items()))


class MLflow(Tracker):
    """A run with a nested run for each trial, in the experiment `cardtune`; without a place in the run's folder."""

    def __init__(self, run: str, folder: Path, place: str | None) -> None:
        mlflow = _imported("mlflow", "mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        uri = place or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self.place = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name("cardtune")
        self._experiment = known.experiment_id if known else self._client.create_experiment("cardtune")
        mine = f"tags.cardtune_run = '{run}'"
        found = self._client.search_runs([self._experiment], mine, max_results=10_000)
        self._ids = {one.data.tags["mlflow.runName"]: one.info.run_id for one in found}
        self._run = run
        self._parent = self._ids.get(run) or self._made(run, {})

    def _made(self, name: str, tags: Mapping[str, str]) -> str:
        named = {"mlflow.runName": name, "cardtune_run": self._run, **tags}
        return str(self._client.create_run(self._experiment, tags=named).info.run_id)

    def has(self, name: str) -> bool:
        """Returns whether the experiment has a run of this name."""
        return name in self._ids

    def trial(self, one: TrackedRun) -> None:
        """Writes a nested run."""
        self._ids[one.name] = made = self._made(one.name, {"mlflow.parentRunId": self._parent, **one.tags})
        last = one.curve[-1][0] if one.curve else 0
        points = [(one.objective, value, samples) for samples, value in one.curve]
        points += [(name, value, last) for name, value in one.metrics.items()]
        metrics = [self._entities.Metric(name, value, 0, samples) for name, value, samples in points]
        params = [self._entities.Param(name, str(value)) for name, value in one.config.items()]
        self._client.log_batch(made, metrics, params)
        self._client.set_terminated(made, "FINISHED" if one.tags["outcome"] in ("ok", "stopped") else "FAILED")

    def end(self, search: TrackedRun) -> None:
        """Writes the pick and the answer."""
        for name, said in search.tags.items():
            self._client.set_tag(self._parent, name, said)
        for name, value in search.metrics.items():
            self._client.log_metric(self._parent, name, value)
        self._client.set_terminated(self._parent)


class WandB(Tracker):
    """A run for each trial in the project `cardtune`, a group for a search; offline unless WANDB_MODE is set."""

    def __init__(self, run: str, folder: Path, place: str | None) -> None:
        self._wandb: Any = _imported("wandb", "wandb")
        self._folder, self._group = Path(place) if place else folder, run
        self._mode = os.environ.get("WANDB_MODE", "offline")
        self.place = f"wandb sync {self._folder / 'wandb'}/offline-run-*" if self._mode == "offline" else "wandb.ai"

    def has(self, name: str) -> bool:
        """Returns whether the trial's run has a folder here."""
        return any(self._folder.glob(f"wandb/*run-*-{self._group}-{name}"))

    def _written(self, one: TrackedRun) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(silent=True, console="off")
        run = self._wandb.init(
            project="cardtune",
            group=self._group,
            id=f"{self._group}-{one.name}",
            name=one.name,
            dir=str(self._folder),
            mode=self._mode,
            config=dict(one.config),
            tags=[one.tags.get("outcome", "search")],
            notes=one.tags.get("answer") or one.tags.get("message", ""),
            settings=settings,
        )
        for samples, value in one.curve:
            run.log({one.objective: value, "samples": samples})
        run.summary.update(dict(one.metrics))
        run.finish()

    def trial(self, one: TrackedRun) -> None:
        """Writes a run."""
        self._written(one)

    def end(self, search: TrackedRun) -> None:
        """Writes the run of the search, and ends W&B's own process."""
        self._written(search)
        self._wandb.teardown()


TRACKERS: Mapping[str, Callable[[str, Path, str | None], Tracker]] = {
    "optuna": OptunaStorage,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""The trackers by the word of `python -m tuning log --to`: of a run's id, its folder, and a place if one is named."""


def _imported(module: str, package: str) -> Any:
    """Returns a module; raises PreflightError if its package is not installed, or does not load."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the package raises, as at a version of protobuf that it does not know
        what = f"--to {package} needs the package {package}, which does not load: {error}"
        raise PreflightError(what[:300], remedy=f"pip install {package}") from error


def write(tracker: Tracker, run: History, found: Summary) -> int:
    """Returns how many trials a tracker took; raises ConfigError with what it raised."""
    try:
        return tracker.take(run, found)
    except TuningError:
        raise
    except Exception as error:  # such as a server that cannot be reached
        what = f"{type(tracker).__name__} took not every trial: {type(error).__name__}: {error}"
        raise ConfigError(what[:400], remedy="the same command again writes what is missing") from error
