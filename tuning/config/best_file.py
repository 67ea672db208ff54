"""What a best.yaml may hold: strict types for every key, so a hand's slip is named and not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainables.knobs import Knobs, Scalar
from tuning.config.errors import ConfigError, allowed_by

SCHEMA = 1
REMEDY = "undo the edit, or export it again: python -m tuning report ID"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class WorkloadPart(_Part):
    """Which workload, as `trainables.workload.load` takes it, and its options."""

    ref: str = Field(min_length=1)
    options: dict[str, Any]


class TrainPart(_Part):
    """How it was trained: samples seen (None where the run did not say), and the seed."""

    samples: int | None = Field(ge=1)
    seed: int = Field(ge=0)


class SpeedPart(_Part):
    """Samples a second of whole trainings, or of windows where there are none, or of a probe.

    `spread` is the half-width of the 95 % interval of their mean, None with fewer than two. The windows are those in
    which configurations took turns: for comparing them, not for what a training will show.
    """

    median: float | None = Field(ge=0)
    spread: float | None = Field(ge=0)
    trainings: list[float] = []
    windows: list[float]
    status: Literal["confirmed", "probed"]


class QualityPart(_Part):
    """One objective; `interval` is where one new run is expected, `method` what that rests on."""

    mean: float
    interval: list[float] | None = Field(min_length=2, max_length=2)
    by_seed: dict[str, float]
    status: Literal["confirmed", "from the search"]
    method: str


class MeasuredPart(_Part):
    """What was measured, and on what."""

    samples_per_s: SpeedPart
    quality: dict[str, QualityPart]
    peak_allocated_bytes: int | None = Field(ge=0)
    device: str
    card: str
    virtual: bool
    cap_bytes: int | None
    says: str


class ComparedPart(_Part):
    """How many times faster than a configuration named by hand."""

    ratio: float = Field(gt=0)
    low: float | None = Field(ge=0)
    high: float | None = Field(ge=0)
    rounds: int = Field(ge=0)


class ProvenancePart(_Part):
    """Where it comes from."""

    study: str
    trial: str
    created: str
    cardtune: str
    versions: dict[str, Any]
    command: str
    git: str | None
    search_seed: int | None
    trials: dict[str, int]


class BestFile(_Part):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    workload: WorkloadPart
    knobs: dict[str, Scalar]
    train: TrainPart
    measured: MeasuredPart
    compared: dict[str, ComparedPart]
    provenance: ProvenancePart
    sha256: str

    def checked_knobs(self, source: str) -> dict[str, Scalar]:
        """Returns every knob, those not named at their defaults; raises ConfigError for a bad name or value."""
        try:
            return Knobs.of(self.knobs).as_dict()
        except ValueError as error:
            raise ConfigError(f"{source}: knobs: {error}", remedy=REMEDY) from None


def check(raw: Mapping[str, Any], source: str) -> BestFile:
    """Returns `raw` with its types checked; raises ConfigError for the first fault, with its key and value."""
    version = raw.get("schema")
    if version is not None and (isinstance(version, bool) or version != SCHEMA):
        remedy = "export the run again with this version: python -m tuning report ID"
        raise ConfigError(f"{source}: schema={version!r} is not read here", allowed=f"schema: {SCHEMA}", remedy=remedy)
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
