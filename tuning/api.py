"""The Python API, the same engine as the command line: `tune` runs a study, `read_run` and `load_best` read one.

    from tuning import tune, load_best, read_run

Errors are those of `tuning.config.errors`, each with its remedy. No signal handler is installed: Ctrl-C raises
KeyboardInterrupt, after best.yaml was written with what is known.
"""

from __future__ import annotations

import functools
import html
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from safetensors import SafetensorError

from trainables import checkpoint, workload_files
from trainables import workload as contract
from trainables.knobs import Knobs, Scalar, complete
from tuning.cli import runs
from tuning.cli.terminal import Terminal
from tuning.config import best_file, yaml_files
from tuning.config.errors import ConfigError, require_platform
from tuning.config.load import load
from tuning.config.resolve import flat
from tuning.journal.events import Config
from tuning.journal.runs import JOURNAL, find_run
from tuning.report import sentences, summary, tables
from tuning.report.answers import AnswerView
from tuning.report.named import Named
from tuning.report.summary import Summary
from tuning.report.trial_views import SPEED, TrialView
from tuning.stats.uncertainty import Gain
from tuning.study import study
from tuning.workers.own_workload import UserFile

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Configuration:
    """Knobs, complete, and what was measured of them: samples a second, quality by objective, peak bytes.

    The speed is of windows in turns, else of whole trainings, else of its probe; of a trial what the search went by.

    `name` is a trial's, or that of a configuration given by hand; what was not measured is None or lacking.
    `is_confirmed` says whether it was trained again on fresh seeds.
    """

    name: str
    knobs: Mapping[str, Scalar]
    samples_per_s: float | None
    quality: Mapping[str, float]
    peak_allocated_bytes: int | None
    is_confirmed: bool


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run, in its folder; `summary` has all there is to say about it."""

    folder: Path
    summary: Summary

    @property
    def is_finished(self) -> bool:
        """Returns whether the study came to its end."""
        return self.summary.is_finished

    @property
    def id(self) -> str:
        """Returns the run's id."""
        return self.summary.id

    @property
    def best(self) -> Configuration | None:
        """Returns the pick, of an unfinished run the best so far, None where nothing was measured."""
        return None if self.summary.best is None else self._named(self.summary.best)

    @property
    def best_at_speed(self) -> Configuration | None:
        """Returns the best quality that is no slower than what is trained today, None if that is the pick."""
        return self._answer("best_at_speed")

    @property
    def most_accurate(self) -> Configuration | None:
        """Returns the best quality, None if that is an earlier answer."""
        return self._answer("most_accurate")

    @property
    def answers(self) -> dict[str, AnswerView]:
        """Returns "best" and the two others beside what is trained today: gain in speed, quality, time to it."""
        return dict(self.summary.answers)

    @property
    def named(self) -> dict[str, Configuration]:
        """Returns the configurations given by hand, such as `before`, by name."""
        return {one.name: self._named(one) for one in self.summary.given()}

    @property
    def front(self) -> list[Configuration]:
        """Returns the trials that no other beats in both speed and quality, the fastest first."""
        found = [self._trial(one) for one in self.summary.trials if one.on_front]
        return sorted(found, key=lambda one: -(one.samples_per_s or 0.0))

    @property
    def gains(self) -> dict[str, Gain]:
        """Returns how many times as fast the best is as each configuration given by hand, with the 95 % interval."""
        return {gain.over: gain for gain in self.summary.gains if gain.of == "best"}

    @property
    def trials(self) -> list[dict[str, Scalar | None]]:
        """Returns each trial that ended: outcome, objectives, speed, memory, samples, seed and its knobs."""
        return [self._row(one) for one in self.summary.trials]

    def to_pandas(self) -> pd.DataFrame:
        """Returns the trials as a table; raises ImportError where pandas is not installed."""
        import pandas  # no dependency of ours

        return pandas.DataFrame(self.trials)

    def __repr__(self) -> str:
        """Returns what the run found in a sentence, and what speaks against it; its fields are pages."""
        cautions = "".join(f" But: {said}." for said in sentences.cautions(self.summary))
        return f"run {self.id}: {sentences.answer(self.summary)}{cautions}"

    def _repr_html_(self) -> str:
        """Returns the answer and the table of what there is to choose from, for a notebook."""
        grid = tables.answers(self.summary, brief=True)
        lines = [f"<p>{html.escape(str(self))}</p>"]
        if grid is not None:
            rows = [("th", grid.head), *(("td", row) for row in grid.rows)]
            cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in rows)
            lines.append(f"<table>{''.join(f'<tr>{own}</tr>' for own in cells)}</table>")
        return "\n".join(lines)

    def _answer(self, name: str) -> Configuration | None:
        return self._named(self.summary.named[name]) if name in self.summary.answers else None

    def _knobs(self, config: Config) -> dict[str, Scalar]:
        knobs = complete(config, self.summary.table)
        return {name: value for name, value in knobs.items() if self.summary.asks_for(name)}

    def _named(self, one: Named) -> Configuration:
        quality = {name: found.mean for name, found in one.quality.items()}
        confirmed = any(found.confirmed for found in one.quality.values())
        is_confirmed = confirmed and not (one.name == "best" and self.summary.provisional)
        name, peak = one.trial or one.name, one.peak_allocated_bytes
        return Configuration(name, self._knobs(one.config), one.samples_per_s, quality, peak, is_confirmed)

    def _trial(self, one: TrialView) -> Configuration:
        values = {name: value for name, value in one.values.items() if value is not None}
        return Configuration(
            one.trial, self._knobs(one.config), one.samples_per_s, values, one.peak_allocated_bytes, False
        )

    def _row(self, one: TrialView) -> dict[str, Scalar | None]:
        figures = (SPEED, "peak_allocated_bytes", "samples", "stopped_at", "seed", "on_front", "message")
        own = {"trial": one.trial, "outcome": one.outcome, **one.values}
        return {**own, **{name: getattr(one, name) for name in figures}, **self._knobs(one.config)}


@dataclass(frozen=True)
class LoadedBest(best_file.Best):
    """A configuration read from a best.yaml, with all that a program needs to train it."""

    @functools.cached_property
    def workload(self) -> contract.Workload | contract.OwnLoop:
        """Returns the workload that was tuned; raises what its file raises."""
        return workload_files.load(self.ref)

    def config(self, device: str = "cpu") -> contract.Config:
        """Returns the configuration as the workload's methods take it, such as `workload.model(config)`."""
        table = contract.table_of(self.workload)
        knobs = Knobs.of(best_file.completed(self, table).knobs, table)
        return contract.Config(knobs, dict(self.options), self.seed, device)


def tune(
    workload: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    quiet: bool = True,
    **settings: object,
) -> Result:
    """Returns what a study found, once it has ended.

    `workload` is a name, a dotted module or a .py file; `overrides` are the settings of the command line, by dotted key
    or nested, with plain values, lists and {low, high, log}; `settings` are those without a dot, such as card="rtx4060"
    or budget="full". Without `quiet` it says on stderr and stdout what the command line says. Raises TuningError.
    """
    if workload_files.is_importing():  # by us, of a script that calls this without `if __name__ == "__main__":`
        raise workload_files.ImportEnds
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(
            f"overrides={str(overrides)[:100]}: the settings beside the workload are a dict",
            allowed="a dict of settings, by dotted key or nested",
            remedy="such as tune('mine.py', {'search.trials': 12})",
        )
    if workload is not None and not isinstance(workload, str | Path):
        raise ConfigError(
            f"workload={type(workload).__name__}: an object cannot be sent to the processes that train",
            allowed="a name, a dotted module, or the path of a .py file",
            remedy="write its class to a file, in a notebook with %%writefile mine.py, and ask for workload='mine.py'",
        )
    given = {**({} if workload is None else {"workload": workload}), **settings}
    typed = [f"{key}={_text(key, value)}" for part in (given, overrides or {}) for key, value in flat(part)]
    require_platform()
    if workload is None and not any(item.startswith(("workload=", "resume=")) for item in typed):
        raise ConfigError("no workload was given", remedy="tune('mine.py'), or tune(resume='last')")
    started = time.monotonic()
    terminal = Terminal(-1, out=io.StringIO()) if quiet else Terminal()
    workload_files.forget_files()  # a notebook's may have been written anew
    try:
        terminal.begin(started)
        with UserFile() as file:
            folder = study.run(load(typed, file.table), terminal, started, file)
    finally:
        terminal.close()
    return read_run(folder)


def read_run(run: str | Path, runs_dir: str | Path = "runs") -> Result:
    """Returns what a run found: a finished one, or one that was cut off or still goes on.

    `run` is its id, "last", or its folder. Raises ConfigError where there is none.
    """
    place = _place("run", run, "an id, 'last', or a run's folder")
    folder = Path(place) if Path(place, JOURNAL).is_file() else find_run(str(runs_dir), place)
    return Result(folder, summary.of_run(*runs.runs_of(folder)))


def load_best(path: str | Path) -> LoadedBest:
    """Returns the configuration in a best.yaml, or in that of a run: its folder, or its id in `runs`.

    Raises ConfigError where it is none.
    """
    path = Path(_place("path", path, "the path of a best.yaml, a run's folder, or its id"))
    if not path.suffix and not path.exists():
        path = find_run("runs", str(path))
    if (path / JOURNAL).is_file() and not (path / "best.yaml").exists():
        name = path.absolute().name
        what = f"run {name} has no best.yaml: it ended before its pick, or no trial reached its end"
        raise ConfigError(what, remedy=f"python -m tuning show {name} says how its trials ended")
    found = best_file.read(path / "best.yaml" if path.is_dir() else path)
    return LoadedBest(**vars(found))


def load_model(folder: str | Path, device: str = "cpu") -> contract.Module:
    """Returns the model that `python -m tuning train` wrote to a folder, in eval mode; raises ConfigError."""
    at = Path(_place("folder", folder, "the folder of a training, which --out names"))
    try:
        made = json.loads((at / "result.json").read_text(encoding="utf-8"))
        workload = workload_files.load(made["workload"])
        if isinstance(workload, contract.OwnLoop):
            raise ConfigError(
                f"{folder}: the model of a custom loop is built by its file", remedy="load_state_dict there"
            )
        knobs = Knobs.of(made["knobs"], contract.table_of(workload))
        config = contract.Config(knobs, made["options"], made["seed"], device)
        return checkpoint.loaded(workload, config, (at / "model.safetensors").read_bytes(), is_merged=made["is_merged"])
    except (OSError, KeyError, ValueError, SafetensorError, checkpoint.CheckpointError) as error:
        raise ConfigError(f"{folder} holds no trained model: {error!r}", remedy="the folder of a training") from None


def _place(name: str, value: object, allowed: str) -> str:
    """Returns what names a run or a file as text; raises ConfigError for what is neither text nor a path."""
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name}={str(value)[:100]} is no text and no path", allowed=allowed, remedy=f"{name}='last'")
    return str(value)


def _text(key: str, value: object) -> str:
    """Returns a value as one would type it; raises ConfigError for what cannot be typed."""
    if isinstance(value, str | Path):
        return str(value)
    try:
        return yaml_files.line(_plain(value))
    except yaml.YAMLError:
        what = f"{key}={str(value)[:100]} is no plain value"
        raise ConfigError(what, allowed="a number, text, true, false, None; lists and dicts of these") from None


def _plain(value: object) -> object:
    """Returns the value with NumPy's numbers and arrays, and torch's, as Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else value
