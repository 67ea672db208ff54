"""Events in words: the one description that the log, the live view, the tables and the page share."""

from __future__ import annotations

from collections.abc import Mapping

from trainables.knobs import KnobTable, Scalar
from tuning.journal import events
from tuning.report.format import fit, plain, rate, size, spoken, unlike
from tuning.report.trial_views import TrialView, view

MESSAGE_COLUMNS = 160
"""The columns of an error's message in the line of a trial."""
_ALIKE = {True: "the same settings as the best so far", False: "every knob at its default"}
_OUTCOMES = {
    "host_oom": "host oom",
    "cut": "out of time",
    "shm": "out of shared memory",
    "fd": "out of file descriptors",
    "no_result": "without a result",
    "crash": "crashed",
    "timeout": "timed out",
    "data": "data error",
}


def outcome(name: str) -> str:
    """Returns how a trial ended."""
    return _OUTCOMES.get(name, plain(name))


def state(one: TrialView) -> str:
    """Returns how a trial or probe ended, such as "stopped at 400" with the samples at which it did."""
    if one.stopped_at:
        return f"stopped at {one.stopped_at:,}"
    return outcome(one.outcome) + f", ended by itself at {one.samples}" * one.has_ended


def counts(found: Mapping[str, int]) -> str:
    """Returns "12: 5 ok, 4 stopped, ...": how many there are, and how each ended."""
    parts = [f"{n} {outcome(name)}" for name, n in found.items() if n]
    return f"{sum(found.values())}" + (f": {', '.join(parts)}" if parts else "")


def event(
    made: events.Event,
    reference: Mapping[str, Scalar],
    table: KnobTable,
    objective: str = "",
    count: str = "",
    named: str = "",
    *,
    is_best: bool = False,
) -> tuple[str, str] | None:
    """Returns label and text of what happened, None for what is not told.

    Knobs are those unlike in `reference`, such as the best so far, or empty for the defaults. It shows the
    objective's value if there is one of this name, else all values. `count` says how many of its kind are done, "3/12".
    A trial that is `named` has its name in place of its knobs. `is_best`: it is the best so far.
    """
    label = made.event
    match made:
        case events.RungRecord():
            parts = [made.trial, f"{made.samples} samples", _values(made.values, objective)]
        case events.OomRecord() | events.RestartRecord():
            needed = f"needs {size(made.wanted_bytes)} of {size(made.cap_bytes)}" if made.wanted_bytes else ""
            micro = f"with micro_batch_size={made.config.get('micro_batch_size')}"
            parts = [made.trial, f"{outcome(made.outcome)} {micro}", needed, "it begins again with less"]
        case events.DecisionRecord():
            parts = [made.trial, made.reason]
        case events.RefusedRecord():
            parts = [count, made.reason, _knobs(made.config, reference, table)]
        case events.WindowRecord():
            parts = [count, spoken(made.name), speed(made)]
        case events.ConfirmedRecord():
            label, one = "retrain", view(made)
            parts = [count, f"{spoken(made.name)}  seed {made.seed}", *_measured(one, objective), _failed(one)]
        case events.ProbeRecord() | events.TrialRecord():
            one = view(made)
            knobs = "" if named else _knobs(made.config, reference, table)
            mark = f"(best {made.event} so far)" * (is_best and knobs != _ALIKE[True])
            parts = [count, spoken(one.trial), spoken(named), *_measured(one, objective), knobs, mark, _failed(one)]
        case _:
            return None
    return label, "  ".join(plain(part) for part in parts if part)


def _measured(one: TrialView, objective: str) -> list[str]:
    """Returns how a training or probe ended, unless well, and what was measured."""
    is_of_probe = one.measured_samples_per_s not in (None, one.samples_per_s)  # else its own training's
    fast = f"{rate(one.known_per_s)} samples/s{' (estimated from probes)' * is_of_probe}" if one.known_per_s else ""
    ended = "" if state(one) == "ok" else state(one) + " samples" * bool(one.stopped_at)
    return [ended, _values(one.values, objective), fast, size(one.peak_allocated_bytes, "")]


def speed(made: events.MeasuredRecord) -> str:
    """Returns the speed that was measured, without any how the measurement ended."""
    return f"{rate(made.samples_per_s)} samples/s" if made.samples_per_s else outcome(made.outcome)


def _knobs(config: Mapping[str, Scalar], reference: Mapping[str, Scalar], table: KnobTable) -> str:
    return " ".join(unlike(config, reference, table)) or _ALIKE[bool(reference)]


def _values(values: events.Values, objective: str) -> str:
    shown = {objective: values[objective]} if objective in values else values
    return " ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)


def _failed(one: TrialView) -> str:
    """Returns what an error says; the whole of it is in the summary."""
    is_failed = one.outcome not in ("", "ok", "stopped", "refused", "cut")
    return fit(plain(one.message), MESSAGE_COLUMNS) if is_failed else ""
