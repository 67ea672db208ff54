"""best.yaml, written and read by one model: strict types for every key, so a slip is named and not trained."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainables.knobs import Knobs, KnobTable, Options, Scalar
from trainables.our_knobs import EVERY
from tuning.config import yaml_files
from tuning.config.errors import ConfigError, allowed_by
from tuning.config.shareable import at_home, is_masked

SCHEMA: Literal[1] = 1
Status = Literal["confirmed", "probed", "unconfirmed", "trained"]
"""confirmed: trained again on fresh seeds. probed: its speed alone is known. unconfirmed: the run ended before."""
REMEDY = "undo the edit, or export it again: python -m tuning report ID"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class WorkloadPart(_Part):
    """Which workload, as `workload_files.load` takes it, and its options."""

    ref: str = Field(min_length=1)
    options: Options


class TrainPart(_Part):
    """How it was trained: samples seen (None if the run did not say), and the seed."""

    samples: int | None = Field(ge=1)
    seed: int = Field(ge=0)


class SpeedPart(_Part):
    """Samples a second of whole trainings, or of windows if there are none, or of a probe.

    `shown` is the one speed that every page has: beside the reference, its speed times the gain; None in older files.
    `spread` is the half-width of the 95 % interval of their mean, None with fewer than three. The windows are those in
    which configurations took turns: for comparing them, not for what a training will show.
    """

    shown: float | None = Field(default=None, ge=0)
    median: float | None = Field(ge=0)
    spread: float | None = Field(ge=0)
    trainings: list[float]
    windows: list[float]
    status: Literal["confirmed", "probed", "from the search"]


class QualityPart(_Part):
    """An objective; `interval` is the range that is expected of a new run, `method` what it rests on."""

    mean: float
    interval: list[float] | None = Field(min_length=2, max_length=2)
    by_seed: dict[str, float]
    status: Literal["confirmed", "from the search"]
    method: str


class BesideQualityPart(_Part):
    """A quality beside today's: means over as many `seeds` as both have (0: over others).

    `half_width` is that of the 95 % interval of the mean difference; `verdict` is missing in older files.
    """

    mean: float
    reference: float
    difference: float | None
    half_width: float | None
    seeds: int
    verdict: str = ""


class SecondsPart(_Part):
    """Seconds of training until today's final quality: medians over so many `seeds`, of which `missed` never got there.

    `reference` are those of today's own training.
    """

    median: float | None
    reference: float | None
    seeds: int
    missed: int


class BesidePart(_Part):
    """A configuration beside today's."""

    reference: str
    objective: str
    quality: BesideQualityPart | None
    seconds_to_it: SecondsPart | None


class GainPart(_Part):
    """A gain in speed: how many times as fast, with its interval, from so many rounds and whole trainings."""

    ratio: float | None
    low: float | None
    high: float | None
    rounds: int
    trainings: int = 0


class MeasuredPart(_Part):
    """Measurements of the configuration, and the device they were made on."""

    samples_per_s: SpeedPart
    quality: dict[str, QualityPart]
    samples: int | None = None
    """The mean samples of trainings that ended by themselves, None if none did."""
    beside_today: BesidePart | None = None
    """None of what is no answer."""
    peak_allocated_bytes: int | None = Field(ge=0)
    device: str
    target: str = ""
    devices_per_trial: int = 1
    card: str
    virtual: bool
    cap_bytes: int | None
    says: str


class ProvenancePart(_Part):
    """The study and the versions that a file comes from."""

    study: str
    trial: str
    created: str
    cardtune: str
    versions: dict[str, str | None]
    command: str
    git: str | None
    search_seed: int | None
    trials: dict[str, int]
    workload_sha256: str = ""  # earlier versions had none


class BestFile(_Part):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    status: Status = "confirmed"
    workload: WorkloadPart
    knobs: dict[str, Scalar]
    train: TrainPart
    measured: MeasuredPart
    compared: dict[str, GainPart]
    """The gain over each other configuration by its name."""
    provenance: ProvenancePart
    sha256: str = ""


@dataclass(frozen=True)
class Best:
    """A configuration read back from a best.yaml.

    `knobs` are as the file has them (`completed`), `samples` is what it was trained on, `warnings` are sentences for
    the user.
    """

    path: Path
    ref: str
    options: Options
    knobs: Mapping[str, Scalar]
    samples: int | None
    seed: int
    measured: MeasuredPart
    provenance: ProvenancePart
    warnings: tuple[str, ...]


def text_of(file: BestFile) -> str:
    """Returns the text of a file, whose sha256 is made anew."""
    plain = file.model_dump(by_alias=True, exclude={"sha256"})
    return yaml_files.dump({**plain, "sha256": _sha256(plain)})


def read(path: Path) -> Best:
    """Returns the configuration in a best.yaml; raises ConfigError naming key, value and remedy if it is none.

    A body that does not match its sha256 was edited by hand: that is allowed, and is said in `warnings`.
    """
    raw = yaml_files.read(_text_in(path), str(path))
    file = _parsed(raw, str(path))
    warnings = []
    if _sha256({k: v for k, v in raw.items() if k != "sha256"}) != file.sha256:
        warnings.append(f"{path.name} was edited by hand since it was exported: its sha256 does not match")
    if file.status == "unconfirmed":
        again = f"python -m tuning.run resume={file.provenance.study}"
        said = f"{path.name} is the best so far, and was not trained again on fresh seeds; {again} does that"
        warnings.append(f"{said}, with a larger search.max_time if that was spent")
    options = {name: at_home(value) for name, value in file.workload.options.items()}
    secrets = sorted(name for name, value in options.items() if is_masked(value))
    if secrets:
        warnings.append(
            f"{path.name} does not hold the secrets {', '.join(secrets)}: write them in its workload.options"
        )
    ref, samples, seed = str(at_home(file.workload.ref)), file.train.samples, file.train.seed
    return Best(path, ref, options, dict(file.knobs), samples, seed, file.measured, file.provenance, tuple(warnings))


def completed(best: Best, table: KnobTable) -> Best:
    """Returns it with every knob of its workload's table, those not named at their defaults.

    Knobs of ours that this workload lacks, as after its file was given an optimiser of its own, are left out, with a
    warning. Raises ConfigError for other names that are no knobs, and for values that a knob may not take.
    """
    lacking = [name for name in best.knobs if name not in table and name in EVERY]
    try:
        known = {name: value for name, value in best.knobs.items() if name not in lacking}
        knobs = Knobs.of(known, table).as_dict()
    except ValueError as error:
        raise ConfigError(f"{best.path}: knobs: {error}", remedy=REMEDY) from None
    said = f"{best.path.name} sets {', '.join(lacking)}, which the workload does not have: left out"
    return replace(best, knobs=knobs, warnings=(*best.warnings, *([said] if lacking else [])))


def _text_in(path: Path) -> str:
    """Returns the text of a regular file of at most 64 KiB: a pipe would hang, and a device never ends."""
    remedy = "name the best.yaml of a run"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file", remedy=remedy)
        if status.st_size > yaml_files.MAX_BYTES:
            what = f"{path} has {status.st_size} bytes"
            raise ConfigError(what, allowed=f"at most {yaml_files.MAX_BYTES}", remedy=remedy)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", remedy=remedy) from None


def _sha256(body: Mapping[str, object]) -> str:
    """Returns the sha256 of `body` as JSON with sorted keys, so that layout and comments of the file do not count."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(raw: Mapping[str, object], source: str) -> BestFile:
    """Returns `raw` with its types checked; raises ConfigError for the first fault, with its key and value."""
    try:
        return BestFile.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        raise ConfigError(f"{source}: {key} is missing", remedy=REMEDY)
    if fault["type"] == "extra_forbidden":
        raise ConfigError(f"{source}: there is no key {key} (its value is {_text(fault['input'])})", remedy=REMEDY)
    what = f"{source}: {key}={_text(fault['input'])} is not allowed"
    raise ConfigError(what, allowed=allowed_by(fault), remedy=REMEDY)


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
