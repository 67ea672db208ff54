"""The events of a journal: a typed value for each line, read once.

An older version, or damage, left out fields or wrote others in their place. Such a field has what its type has for
nothing: "", 0, None, False, an empty mapping. The moments `at_s` are seconds of the run (`journal.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, TypeVar

from trainables.knobs import Scalar
from tuning.config.lenient import finite, mapping, numbers, whole
from tuning.journal.format import Record

Config = Mapping[str, Scalar]
"""The knobs of a configuration by name."""
Values = Mapping[str, float | None]
"""Qualities by the name of their objective, None for what was not finite."""
Importances = Mapping[str, Mapping[str, float]]
"""By objective how much each searched knob decides it, shares that sum to 1, the largest first."""
Facts = Mapping[str, Any]
"""Plain values by name, as a worker, a device or the resolved configuration has them."""
Objectives = Mapping[str, Literal["min", "max"]]
Pairs = tuple[tuple[int, ...], ...]
Curve = tuple[tuple[float, Values], ...]
"""Seconds of training and qualities at each evaluation."""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _floats(value: object) -> tuple[float, ...]:
    found = map(finite, value) if isinstance(value, list | tuple) else ()
    return tuple(each for each in found if each is not None)


def _values(value: object) -> Values:
    return {str(name): finite(each) for name, each in mapping(value).items()}


def _pairs(value: object) -> Pairs:
    rows = value if isinstance(value, list | tuple) else ()
    return tuple(tuple(whole(each) or 0 for each in row) for row in rows if isinstance(row, list | tuple))


def _curve(value: object) -> Curve:
    points = [p for p in value if isinstance(p, Sequence) and p] if isinstance(value, list | tuple) else []
    return tuple((at_s, _values(p[-1])) for p in points if (at_s := finite(p[0])) is not None)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": lambda value: "" if value is None else str(value),
    "bool": bool,
    "int": lambda value: whole(value) or 0,
    "int | None": whole,
    "float": lambda value: finite(value) or 0.0,
    "float | None": finite,
    "tuple[str, ...]": _texts,
    "tuple[float, ...]": _floats,
    "tuple[str, ...] | None": lambda value: _texts(value) if isinstance(value, list | tuple) else None,
    "tuple[Facts, ...]": lambda value: tuple(map(mapping, value)) if isinstance(value, list | tuple) else (),
    "Mapping[str, str]": lambda value: {str(name): str(each) for name, each in mapping(value).items()},
    "Mapping[str, Mapping[str, float]]": lambda value: {str(n): numbers(own) for n, own in mapping(value).items()},
    "Mapping[str, float]": numbers,
    "Config": mapping,
    "Facts": mapping,
    "Facts | None": lambda value: value if isinstance(value, Mapping) else None,
    "Objectives": lambda value: {str(n): "min" if mode == "min" else "max" for n, mode in mapping(value).items()},
    "Values": _values,
    "Pairs": _pairs,
    "Curve": _curve,
}
"""How a field of each type is read from what JSON has."""

EVENTS: dict[str, type[Event]] = {}
"""The class of each event by its name in the journal."""
EventT = TypeVar("EventT", bound="Event")


@dataclass(frozen=True)
class Event:
    """A line of the journal: its number, its UTC time in ISO 8601, and when it was written, in seconds of the run.

    An event that this version does not know has no more than that.
    """

    event: ClassVar[str] = ""
    seq: int
    t: str
    at_s: float

    def __init_subclass__(cls, event: str = "") -> None:
        if event:
            cls.event = event
            EVENTS[event] = cls

    @classmethod
    def read(cls, record: Record, at_s: float = 0.0) -> Self:
        """Returns the event of a record; fields that it lacks, or that are of another type, are as nothing."""
        own = [field for field in fields(cls) if field.name not in _BASE]
        read = {field.name: _READERS[str(field.type)](record.fields.get(field.name)) for field in own}
        return cls(record.seq, record.t, at_s, **read)


_BASE = frozenset(field.name for field in fields(Event))


def read_event(record: Record, at_s: float) -> Event:
    """Returns a record as the event that it is."""
    return EVENTS.get(record.event, Event).read(record, at_s)


# -- of the study ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """Facts of a workload once it is loaded: its device, its model, its data and code.

    For a custom loop: the knobs that it `asked` for, None for a workload that reads all; whether it sets a seed of its
    own; and how many epochs it was tried for without a report. If it is a command, the words of this `program`, with
    placeholders for knobs.
    """

    workload_sha256: str = ""
    data_sha256: str = ""
    device: Facts = field(default_factory=dict)
    parameters: Facts = field(default_factory=dict)
    objectives: Objectives = field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    train_samples: int = 0
    val_samples: int | None = None
    asked: tuple[str, ...] | None = None
    reseeds: bool = False
    silent_passes: int = 0
    program: tuple[str, ...] = ()

    @property
    def trains_whole(self) -> bool:
        """Returns whether every training is as long as today's: that of a command that is not told its epochs."""
        return bool(self.program) and not any("{epochs}" in word for word in self.program)


@dataclass(frozen=True)
class StudyRecord(WorkloadFacts, Event, event="study"):
    """The workload of a study, its knobs, machine, data and code; written again if the study learns more of it."""

    id: str
    schema: int | None
    workload: str
    command: str
    versions: Mapping[str, str]
    card: Facts
    seed: int
    horizon_samples: int | None
    concurrency: int | None
    threads: int | None
    knobs: Facts | None
    """The workload's own, None in journals of versions that did not write them."""
    hooks: tuple[str, ...]
    config: Facts
    startup_s: float
    startup_parts: Mapping[str, float]
    """Its parts in seconds, by what took them; none in journals of versions that did not write them."""
    target: str

    def setting(self, *path: str) -> Any:
        """Returns what the configuration has at a path of names, None if it has nothing there."""
        value: object = self.config
        for name in path:
            value = mapping(value).get(name)
        return value

    @property
    def cap_bytes(self) -> int | None:
        """Returns the bytes that the card was held to, None without a cap."""
        return whole(self.card.get("cap_bytes"))


@dataclass(frozen=True)
class ResumeRecord(Event, event="resume"):
    """A further session. `search`: it has more trials or time; `pick`: another quality is asked for."""

    command: str
    startup_s: float
    changed: tuple[str, ...]
    search: bool
    pick: bool


@dataclass(frozen=True)
class KindsRecord(Event, event="kinds"):
    """The system knobs that were measured to change what is learned, each with the reason in words."""

    changed: Mapping[str, str]


@dataclass(frozen=True)
class StageRecord(Event, event="stage"):
    """A stage begins or ends: `state` is "start" or "end", at which it has taken `wall_s`."""

    stage: str
    state: str
    wall_s: float


@dataclass(frozen=True)
class NoteRecord(Event, event="note"):
    """A note for a person; `warns` is the subject if something is likely wrong."""

    text: str
    warns: str


@dataclass(frozen=True)
class NodeRecord(Event, event="node"):
    """A node of a cluster as it was checked; `why` it runs no trials, "" if it does."""

    node: str
    kind: str
    why: str


@dataclass(frozen=True)
class StopRecord(Event, event="stop"):
    """The study ended."""

    reason: str
    resumable: bool


@dataclass(frozen=True)
class PickRecord(Event, event="pick"):
    """The answer: `best` is its trial, "" for none; `kind` is "faster", "system" or "reference".

    `spread` is what two seeds differ by, as a standard deviation of so many degrees of freedom.
    """

    best: str
    config: Config
    kind: str
    most_accurate: str
    best_at_speed: str
    reference: str
    rule: str
    front: tuple[str, ...]
    spread: float | None
    spread_degrees: int | None


# -- what fits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FootprintRecord(Event, event="footprint"):
    """Bytes of one memory group by micro-batch (`memory.profile`), and the pairs of both that were measured.

    `measured_alone` and `points_alone` are of batches of one micro-step. `failed` names a micro-batch that did not fit
    under its `cap_bytes`.
    """

    coupling: Config
    floor_bytes: int
    points: Pairs
    source: str
    measured: Pairs
    measured_alone: Pairs
    points_alone: Pairs
    failed: Facts


@dataclass(frozen=True)
class RefusedRecord(Event, event="refused"):
    """A configuration that a stage did not launch; `trial` is "" if it has no id."""

    config: Config
    predicted_bytes: int | None
    cap_bytes: int | None
    p_oom: float | None
    reason: str
    stage: str
    trial: str


# -- what was measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """How a worker's work ended: `outcome` is one of `memory.oom.Outcome`, `message` why it failed.

    `fault` names the cause (`memory.oom.Fault`), `failed_at` is in Unix seconds, `wanted_bytes` would have been enough.
    `retire` says why the process runs nothing else.
    """

    outcome: str
    message: str = ""
    fault: str = ""
    failed_at: float = 0.0
    wanted_bytes: int | None = None
    traceback: str = ""
    retire: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measurement(WorkerAnswer):
    """A worker's measurement of a configuration, which was held to `cap_bytes`.

    `spans` and `telemetry` say where the time went, `active` what the first step ran (`trainables.witness`).
    """

    samples_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    cap_bytes: int | None = None
    spans: Mapping[str, float] = field(default_factory=dict)
    telemetry: Facts = field(default_factory=dict)
    active: Facts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timed(Measurement):
    """A speed that was measured: `windows` are its rates in samples/s, `end` says why it was not measured longer.

    `pass_s` is what the beginning of an epoch of `pass_samples` takes; `others_cpu_frac` is the share of the cores that
    other programs took.
    """

    windows: tuple[float, ...] = ()
    micro_step_s: float | None = None
    optimizer_step_s: float | None = None
    pass_s: float = 0.0
    pass_samples: int = 0
    others_cpu_frac: float | None = None
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class Trained(Measurement):
    """A training, to its end or up to now; `held_bytes` are left in its process, `node` is that of a cluster."""

    values: Values = field(default_factory=dict)
    samples: int | None = None
    measured_samples_per_s: float | None = None
    train_s: float = 0.0
    evaluate_s: float = 0.0
    setup_s: float = 0.0
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    has_ended: bool = False
    remark: str = ""
    held_bytes: int | None = None
    node: str = ""


def known_fields(of: WorkerAnswer, kind: type[WorkerAnswer | WorkloadFacts] | None = None) -> dict[str, object]:
    """Returns by name the fields of an answer, or those that a kind of answer has; defaults are left out."""
    found = {}
    for one in fields(kind or type(of)):
        usual = one.default_factory() if one.default_factory is not MISSING else one.default
        if (value := getattr(of, one.name)) != usual:
            found[one.name] = value
    return found


@dataclass(frozen=True)
class MeasuredRecord(Measurement, Event):
    """Measurements of a configuration."""

    config: Config


@dataclass(frozen=True)
class NamedRecord(MeasuredRecord):
    """A measurement of what is called `name`, such as `before` or a trial."""

    name: str


@dataclass(frozen=True)
class ProbeRecord(Timed, NamedRecord, event="probe"):
    """A probe; `name` is "" unless it is of a named configuration."""


@dataclass(frozen=True)
class WindowRecord(Timed, NamedRecord, event="window"):
    """A window in a round, in which all took turns."""

    round: int


@dataclass(frozen=True)
class ConfirmedRecord(Trained, NamedRecord, event="confirmed"):
    """A training on a fresh seed."""

    seed: int
    curve: Curve

    @property
    def is_ok(self) -> bool:
        """Returns whether it came to its end; earlier versions wrote no outcome."""
        return self.outcome in ("", "ok")


# -- trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRecord(Event, event="trial_start"):
    """An attempt of a trial begins; `named` is the name of the reference if it is that, which is trained `beside`."""

    trial: str
    config: Config
    p_oom: float | None
    named: str
    beside: bool


@dataclass(frozen=True)
class RungRecord(Event, event="rung"):
    """A trial at a rung; `early`: its last phase has not begun, so that nothing is judged."""

    trial: str
    samples: int
    values: Values
    samples_per_s: float | None
    measured_samples_per_s: float | None
    early: bool


@dataclass(frozen=True)
class TrialRecord(Trained, MeasuredRecord, event="trial"):
    """How a trial ended. `samples_per_s` is the speed that it was judged by, mostly its probe's."""

    trial: str
    stopped_at: int | None
    reason: str
    seed: int | None


@dataclass(frozen=True)
class OomRecord(MeasuredRecord, event="oom"):
    """A trial ran out of memory and began again."""

    trial: str


@dataclass(frozen=True)
class RestartRecord(MeasuredRecord, event="restart"):
    """A trial failed of something else and began again with other system knobs."""

    trial: str


@dataclass(frozen=True)
class DecisionRecord(Event):
    """An action of the executor on a trial or its process, and the reason."""

    trial: str
    reason: str


@dataclass(frozen=True)
class RetiredRecord(DecisionRecord, event="retired"):
    """Its process was replaced."""


@dataclass(frozen=True)
class WidenedRecord(DecisionRecord, event="widened"):
    """It needs more than its slot, and begins again alone."""


@dataclass(frozen=True)
class LostRecord(DecisionRecord, event="lost"):
    """Its process was lost, and it begins again."""


DECISIONS: dict[str, type[DecisionRecord]] = {kind.event: kind for kind in (RetiredRecord, WidenedRecord, LostRecord)}


# -- beside the run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AblationRecord(Event, event="ablation"):
    """An ablation begins: of which `best`, under which terms, and the changes that are measured in turns."""

    best: Config
    of: Facts
    changes: tuple[Facts, ...]
