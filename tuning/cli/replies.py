"""The objects that `--json` prints, one class for each command; `python -m tuning schema COMMAND` describes it.

`schema` is the version: it goes up if a field goes or means something else, and stays if one comes. Units are those of
the names; what is not known is null.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainables.knobs import Scalar
from tuning.config.errors import TuningError
from tuning.journal.events import Facts, Importances
from tuning.journal.timeline import Times
from tuning.memory.fitting import Fit, Kernels
from tuning.outside.runs import Look
from tuning.report import sentences
from tuning.report.answers import AnswerView
from tuning.report.estimate_lines import Estimated, Remedy
from tuning.report.format import differing
from tuning.report.summary import Place, Summary
from tuning.report.trial_views import TrialView
from tuning.search.ablation import AblationResult
from tuning.stats.uncertainty import Gain, Quality
from tuning.workers.doctor import Check

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of any command."""

    schema: int = VERSION


@dataclass(frozen=True, kw_only=True)
class ErrorReply(Reply):
    """Why a command has no reply, and what to do; `exit_code` as in `python -m tuning.run --help`."""

    error: str
    allowed: str
    remedy: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run: `state` is finished, unfinished, unreadable or other version; `began` is UTC in ISO 8601."""

    id: str
    workload: str
    state: str
    trials: int = 0
    began: str = ""
    day: str = ""
    found: str = ""
    """Its gain and the settings that differ from the reference, in words."""


@dataclass(frozen=True, kw_only=True)
class ListReply(Reply):
    """The runs, the newest last."""

    runs: Sequence[ListedRun]


@dataclass(frozen=True, kw_only=True)
class ConfigurationReply:
    """A configuration that has a name; `samples_per_s` is the one speed that is shown of it.

    `quality` is by objective; `labels` are the names under which it was trained on fresh seeds.
    """

    name: str
    trial: str
    outcome: str
    config: Mapping[str, Scalar]
    samples_per_s: float | None
    quality: Mapping[str, Quality]
    peak_allocated_bytes: int | None
    labels: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RunReply(Reply):
    """The findings of a run: the answer in a sentence, what speaks against it, and what to `set` (the rest as in the
    reference).

    `command` is what is typed if the workload is a command, else "". `next` are commands of ours that are of use next.

    `gain` is the speed of the best over the reference's. `answers` are the pick, the best quality at today's speed and
    the best quality, as far as they differ. `named` has each with its configuration, the reference, too.
    """

    id: str
    workload: str
    state: str
    answer: str
    cautions: Sequence[str]
    set: Mapping[str, object]
    command: str
    reference: str
    gain: Gain | None
    folder: str
    best_yaml: str | None
    next: Sequence[str]
    objectives: Mapping[str, str]
    baselines: Mapping[str, Mapping[str, float]]
    place: Place
    named: Mapping[str, ConfigurationReply]
    answers: Mapping[str, AnswerView]
    gains: Sequence[Gain]
    ablation: Sequence[AblationResult]
    rule: str
    notes: Sequence[str]
    trial_counts: Mapping[str, int]
    probe_counts: Mapping[str, int]
    trials: Sequence[TrialView]
    importances: Importances
    times: Times


@dataclass(frozen=True, kw_only=True)
class AblateReply(Reply):
    """The worth of each knob; `idle` says of those that change nothing why. No device if nothing was measured."""

    device: Facts | None
    ablation: Sequence[AblationResult]
    idle: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CompareReply(Reply):
    """Runs side by side: the cells of each row by its name, in the order of `runs`; a note on what they are."""

    runs: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    note: str


@dataclass(frozen=True, kw_only=True)
class DoctorReply(Reply):
    """The findings; `state` is OK, WARN or FAIL."""

    checks: Sequence[Check]


@dataclass(frozen=True, kw_only=True)
class CardReply:
    """A card: `typed` is what the command line says of it beside its name, `usable_bytes` its memory less a context."""

    name: str
    typed: str
    memory_bytes: int | None
    usable_bytes: int | None
    capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class EstimateReply(Reply):
    """Which micro-batches fit a card: a row for each memory group, and `remedies` if no row fits one sample.

    `answer` is the value that was asked for by "?", in a sentence.
    """

    answer: str
    workload: str
    ref: str
    card: CardReply
    kernels: Kernels
    knobs: Mapping[str, Scalar]
    searched: Mapping[str, Sequence[Scalar]]
    notes: Sequence[str]
    rows: Sequence[Fit]
    remedies: Sequence[Remedy]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EditReply:
    """The arguments that a call in the user's file is to have."""

    file: str
    line: int
    call: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ProbeReply(Reply):
    """The findings of a probe: the answer in a sentence, the settings to `set`, and where they are written.

    `gain` is over the script as it is; `runs` has the samples or steps a second of each run, by what was changed.
    """

    command: Sequence[str]
    answer: str
    set: Mapping[str, Scalar]
    gain: Gain | None
    where: Sequence[EditReply]
    today: Look
    runs: Mapping[str, Sequence[float]]
    failed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class FilesReply(Reply):
    """The files that were written."""

    files: Sequence[str]


REPLIES: Mapping[str, type[Reply]] = {
    "run": RunReply,
    "show": RunReply,
    "list": ListReply,
    "ablate": AblateReply,
    "compare": CompareReply,
    "doctor": DoctorReply,
    "estimate": EstimateReply,
    "probe": ProbeReply,
    "report": FilesReply,
    "error": ErrorReply,
}
"""The reply of each command."""


def as_line(reply: Reply) -> str:
    """Returns a reply as one line of JSON; numbers that are not finite are null."""
    return TypeAdapter(type(reply)).dump_json(reply).decode()


def main(arguments: Sequence[str]) -> int:
    """Prints the JSON Schema of a command's reply, and returns the exit code."""
    made = argparse.ArgumentParser(prog="python -m tuning schema", description="Describes what --json prints.")
    made.add_argument("command", choices=tuple(REPLIES), help="error: any command that fails")
    asked = made.parse_args(arguments)
    print(json.dumps(TypeAdapter(REPLIES[asked.command]).json_schema(mode="serialization"), indent=1))
    return 0


def of_error(error: TuningError) -> ErrorReply:
    """Returns why a command has no reply."""
    return ErrorReply(error=error.what, allowed=error.allowed, remedy=error.remedy, exit_code=error.exit_code)


def of_run(found: Summary, folder: Path, importances: Importances) -> RunReply:
    """Returns what a run found; `importances` are by objective and searched knob."""
    reference, best, file = found.reference, found.best, folder / "best.yaml"
    named = {
        one.name: ConfigurationReply(
            name=one.name,
            trial=one.trial,
            outcome=one.outcome,
            config=one.config,
            samples_per_s=one.samples_per_s,
            quality=one.quality,
            peak_allocated_bytes=one.peak_allocated_bytes,
            labels=sorted(one.labels),
        )
        for one in found.named.values()
    }
    return RunReply(
        id=found.id,
        workload=found.workload,
        state="finished" if found.is_finished else "unfinished",
        answer=sentences.answer(found),
        cautions=list(sentences.cautions(found)),
        set=differing(best.config, reference.config, found.table) if best and reference else {},
        command=sentences.command_with(found, best.config) if best else "",
        reference=reference.name if reference else "",
        gain=found.gain("best", reference.name) if best and reference else None,
        folder=str(folder),
        best_yaml=str(file) if file.exists() else None,
        next=list(sentences.next_commands(found, folder)),
        objectives=found.objectives,
        baselines=found.baselines,
        place=found.place,
        named=named,
        answers=found.answers,
        gains=found.gains,
        ablation=found.ablation,
        rule=found.rule,
        notes=found.notes,
        trial_counts=found.trial_counts,
        probe_counts=found.probe_counts,
        trials=found.trials,
        importances=importances,
        times=found.times,
    )


def of_estimate(answer: Estimated, said: str, seconds: float) -> EstimateReply:
    """Returns what fits a card; `said` is the value that was asked for."""
    about, card = answer.about, answer.about.card
    return EstimateReply(
        answer=said,
        workload=about.workload.name,
        ref=about.workload.ref,
        card=CardReply(
            name=card.name,
            typed=about.card_typed,
            memory_bytes=card.memory_bytes,
            usable_bytes=card.cap_bytes,
            capability=card.capability,
        ),
        kernels=about.kernels,
        knobs=about.knobs,
        searched=about.searched,
        notes=answer.notes,
        rows=answer.rows,
        remedies=answer.remedies,
        seconds=seconds,
    )
