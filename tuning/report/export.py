"""The files of a run for other programs: best.yaml and its alternatives, which train as they stand, and front.csv."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainables.knobs import Knobs, Scalar
from tuning import __version__
from tuning.config import atomic, best_file
from tuning.config.best_file import (
    BesidePart,
    BesideQualityPart,
    BestFile,
    GainPart,
    MeasuredPart,
    ProvenancePart,
    QualityPart,
    SecondsPart,
    SpeedPart,
    Status,
    TrainPart,
    WorkloadPart,
)
from tuning.config.choices import available
from tuning.config.errors import ConfigError, NoUsableTrial
from tuning.config.shareable import masked, shareable, shareable_value
from tuning.report.format import SHOWN_FROM, plain
from tuning.report.named import PICKS, WORDS, Named
from tuning.report.sentences import beside_command, command_with, file_of, kinds, place_sentence, train_command
from tuning.report.summary import Summary
from tuning.report.trial_views import MEASURED, SPEED
from tuning.stats.uncertainty import Quality

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_GIT_TIMEOUT_S = 5


def write_best(summary: Summary, path: Path, *, name: str = "best") -> Path:
    """Returns `path`, where the configuration `name` now stands with what was measured and where it comes from.

    Raises NoUsableTrial where the run picked none, and ConfigError where the file cannot be written.
    """
    named = summary.named.get(name)
    if named is None:
        what = f"run {summary.id} has no {name} configuration: nothing was measured yet"
        raise NoUsableTrial(what, remedy=f"python -m tuning.run resume={summary.id}")
    file = _file(summary, named, datetime.now(UTC))
    whose = f"{WORDS.get(name, name)} configuration of run {plain(summary.id)}"
    head = f"# The {whose}; it trains as it stands, where the run was started:\n#   {train_command(summary, name)}\n"
    if summary.study.program:
        by_hand = [command_with(summary, named.config), *beside_command(summary, named.config)]
        head += "# Or by hand:\n" + "".join(f"#   {text}\n" for text in by_hand)
    return atomic.write_text(path, head + best_file.text_of(file))


def write_others(summary: Summary, folder: Path) -> list[Path]:
    """Returns the files of the other answers, such as most_accurate.yaml; one that is none any more is removed."""
    written = []
    for name in PICKS[1:]:
        path = folder / file_of(name)
        if name in summary.answers:
            written.append(write_best(summary, path, name=name))
        elif path.is_file() and not path.is_symlink():
            path.unlink()
    return written


def write_all(summary: Summary, folder: Path) -> list[Path]:
    """Returns what was written into the folder: best.yaml, the other answers, those named by hand, front.csv."""
    best = write_best(summary, folder / "best.yaml")
    given = [write_best(summary, folder / file_of(one.name), name=one.name) for one in summary.given()]
    return [best, *write_others(summary, folder), *given, write_front(summary, folder / "front.csv")]


def write_front(summary: Summary, path: Path) -> Path:
    """Returns `path`, a CSV with a row for each trial that ended: outcome, objectives, speed, memory, knobs."""
    knobs = list(dict.fromkeys(name for t in summary.trials for name in t.config))
    picks = {summary.named[name].trial: name for name in reversed(list(summary.answers))}
    objectives = list(summary.objectives)
    figures = (SPEED, MEASURED, "peak_allocated_bytes", "samples", "stopped_at", "seed")
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    header = ["trial", "outcome", "on_front", "pick", *objectives, *figures, *knobs, "message"]
    rows.writerow([_cell(name) for name in header])
    for trial in summary.trials:
        row = [trial.trial, trial.outcome, trial.on_front, picks.get(trial.trial, "")]
        row += [trial.values.get(name) for name in objectives] + [getattr(trial, name) for name in figures]
        row += [trial.config.get(name) for name in knobs] + [trial.message]
        rows.writerow([_cell(value) for value in row])
    return atomic.write_text(path, out.getvalue())


def _file(summary: Summary, named: Named, created: datetime) -> BestFile:
    study, ref = summary.study, shareable_value(summary.ref)
    return BestFile(
        schema=best_file.SCHEMA,
        status=status_of(summary, named),
        workload=WorkloadPart(ref=str(ref), options=_of_texts(masked(summary.options), shareable_value)),
        knobs=_every_knob(summary, named),
        train=TrainPart(
            samples=summary.horizon_samples or study.train_samples or None,
            seed=named.seed or 0,
        ),
        measured=_measured(summary, named),
        compared={
            gain.over: GainPart(
                ratio=_short(gain.ratio),
                low=_short(gain.low),
                high=_short(gain.high),
                rounds=gain.rounds,
                trainings=gain.trainings,
            )
            for gain in summary.gains
            if gain.of == named.name
        },
        provenance=ProvenancePart(
            study=summary.id,
            trial=named.trial,
            created=created.astimezone(UTC).isoformat(timespec="seconds"),
            cardtune=__version__,
            versions=dict(study.versions),
            command=shareable(study.command),
            git=_git(summary.ref),
            search_seed=study.seed,
            trials=dict(summary.trial_counts),
            workload_sha256=study.workload_sha256,
        ),
    )


def status_of(summary: Summary, named: Named) -> Status:
    """Returns whether the study came to its pick, and trained the configuration again on fresh seeds.

    A configuration that was never trained is "probed": its speed alone is known. The reference, and one that was only
    measured beside the pick, is "trained" if no fresh seed tells of it.
    """
    reference = summary.reference
    is_pick = named.name in PICKS and not (reference and reference.name in named.labels)
    if summary.provisional and is_pick:
        return "unconfirmed"
    if not named.quality:
        return "probed"
    if any(quality.confirmed for quality in named.quality.values()):
        return "confirmed"
    return "unconfirmed" if is_pick else "trained"


def _every_knob(summary: Summary, named: Named) -> dict[str, Scalar]:
    """All knobs that the workload reads, so that a later version with other defaults trains the same."""
    try:
        knobs = Knobs.of(named.config, summary.table).as_dict()
        return {name: value for name, value in knobs.items() if summary.asks_for(name)}
    except ValueError as error:
        remedy = "export it with the version that made the run"
        raise ConfigError(f"{named.name}: {error}", remedy=remedy) from None


def _measured(summary: Summary, named: Named) -> MeasuredPart:
    place, speed, windows = summary.place, named.speed, named.throughput
    is_confirmed = bool(windows or any(quality.confirmed for quality in named.quality.values()))
    says = " ".join([place_sentence(place), *(f"{said}." for said in kinds(summary.kinds))])
    return MeasuredPart(
        samples_per_s=SpeedPart(
            shown=_short(named.samples_per_s),
            median=_short(speed.median if speed else named.probed_samples_per_s),
            spread=_short(speed.half_width) if speed and len(speed.windows) >= SHOWN_FROM else None,
            trainings=_shorts(named.trained.windows) if named.trained else [],
            windows=_shorts(windows.windows) if windows else [],
            status="probed" if speed is None else "confirmed" if is_confirmed else "from the search",
        ),
        quality={name: _quality(found) for name, found in named.quality.items()},
        samples=named.samples,
        beside_today=_beside_today(summary, named),
        peak_allocated_bytes=named.peak_allocated_bytes,
        device=place.device,
        target=place.target,
        devices_per_trial=place.devices_per_trial,
        card=place.card,
        virtual=place.virtual,
        cap_bytes=place.cap_bytes,
        says=shareable(says),
    )


def _beside_today(summary: Summary, named: Named) -> BesidePart | None:
    """Returns an answer beside today's configuration; None for another configuration."""
    answer, reference = summary.answers.get(named.name), summary.reference
    if answer is None or reference is None:
        return None
    quality, seconds = None, None
    if (own := answer.quality) is not None:
        quality = BesideQualityPart(
            mean=own.own,
            reference=own.reference,
            difference=_short(own.difference),
            half_width=_short(own.half_width),
            seeds=own.seeds,
            verdict=own.verdict,
        )
    if (time := answer.time) is not None:
        seconds = SecondsPart(
            median=_short(time.own.median_s),
            reference=_short(time.reference.median_s),
            seeds=len(time.own.by_seed),
            missed=time.own.missed,
        )
    return BesidePart(reference=reference.name, objective=summary.objective, quality=quality, seconds_to_it=seconds)


def _quality(found: Quality) -> QualityPart:
    return QualityPart(
        mean=found.mean,
        interval=None if found.low is None or found.high is None else _shorts([found.low, found.high]),
        by_seed={str(seed): value for seed, value in found.by_seed.items()},
        status="confirmed" if found.confirmed else "from the search",
        method=found.method,
    )


def _of_texts(value: Any, of_text: Callable[[str], str]) -> Any:
    """Returns plain data, each text by `of_text`."""
    if isinstance(value, Mapping):
        return {str(k): _of_texts(v, of_text) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_of_texts(v, of_text) for v in value]
    return of_text(value) if isinstance(value, str) else value


def _cell(value: object) -> str:
    """A CSV cell that a spreadsheet takes as what it is: text that reads as a formula gets a quote before it."""
    if isinstance(value, float):
        return repr(value)
    text = "" if value is None else plain(value)
    return f"'{text}" if isinstance(value, str) and value.startswith(_FORMULA) else text


def _short(value: float | None) -> float | None:
    """Six significant digits: more than was measured, and few enough to read."""
    return None if value is None else float(f"{value:.6g}")


def _shorts(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _git(ref: str) -> str | None:
    """Returns the commit of the checkout that has the workload's file, with "-dirty" if files were changed; else None.

    For a packaged workload it is that of this package, None if it is installed; for a module by its name None.
    """
    git, root = shutil.which("git"), Path(__file__).resolve().parents[2]
    if ref.endswith(".py"):
        root = Path(ref).resolve().parent
    elif ref not in available("workload") or not (root / ".git").exists():
        return None
    if git is None:
        return None
    command = [git, "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
