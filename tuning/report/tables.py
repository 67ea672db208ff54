"""The tables of a run as text, the same for the terminal and for report.html."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuning.report.format import (
    assignments,
    complete,
    difference,
    duration,
    number,
    outcome,
    plain,
    quality,
    rate,
    ratio,
    size,
    speed,
)
from tuning.report.named import WORDS, Named
from tuning.report.sentences import alike_sentence, bound, found_by, keeps_today
from tuning.report.summary import Summary
from tuning.report.time_to_quality import Reached
from tuning.report.trial_views import TrialView
from tuning.search import runtime_check
from tuning.search.ablation import AblationResult


@dataclass(frozen=True)
class Grid:
    """A table as text: column heads and rows of cells, the first of which names its row; `stressed` is a row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    stressed: int | None = None


def answers(found: Summary, *, brief: bool = False) -> Grid | None:
    """Returns today's configuration, what there is to choose from instead, and others named by hand, side by side.

    None if there is nothing to compare. A column that no row has anything for is left out. What is not `brief` has also
    what else was trained again, every objective, intervals, memory, and what holds each back.
    """
    reference = found.reference
    today = [reference] if reference else []
    chosen = [found.named[name] for name in found.answers if name != "best" or not keeps_today(found)]
    shown = [*today, *chosen, *(one for one in found.given() if one not in today)]
    shown += [] if brief else found.others_trained_again()
    objectives = [found.objective] if brief else [*found.objectives]
    head = ["", "samples/s", f"over {reference.name}" if reference else "", *objectives, "difference", "as good after"]
    rows = [_answer(found, one, objectives, brief=brief) for one in shown]
    head += [] if brief else ["peak", "bound by", "card"]
    kept = [n for n in range(len(head)) if n == 0 or any(row[n] != "-" for row in rows)]
    stressed = next((n for n, one in enumerate(shown) if one.name == "best"), None)
    grid = Grid([head[n] for n in kept], [[row[n] for n in kept] for row in rows], stressed)
    return grid if len(rows) > 1 else None


def _answer(found: Summary, one: Named, objectives: Sequence[str], *, brief: bool) -> list[str]:
    reference, answer = found.reference, found.answers.get(one.name)
    gain = None if reference is None else found.gain(one.name, reference.name)
    times = "-"
    if gain is not None:
        told = ratio(gain, "x") + (f" ({gain.grounds})" if gain.grounds else "")
        times = "as fast" if alike_sentence(found, gain) else told
    known = [one.quality.get(name) for name in objectives]
    learned = ["not trained" if own is None else f"{own.mean:.3f}" if brief else quality(own) for own in known]
    beside, time = (answer.quality, answer.time) if answer is not None else (None, None)
    larger = difference(beside.difference, beside.half_width) if beside is not None and beside.seeds else "-"
    reached = time.own if time is not None else None
    if reference is not None and one.name == reference.name:  # on the seeds that the first answer has, too
        reached = next((own.time.reference for own in found.answers.values() if own.time), None)
    fast = (rate(one.samples_per_s) if brief else _speed(one)) if one.samples_per_s else outcome(one.outcome)
    name = f"{WORDS.get(one.name, one.name)} {one.trial}".rstrip()
    row = [name, fast, times, *learned, larger, soon(reached) if reached is not None else "-"]
    held = bound(one.verdict) if one.verdict else "-"
    return row if brief else [*row, size(one.peak_allocated_bytes), held, one.card or "-"]


def soon(found: Reached) -> str:
    """Returns after how long a quality was reached, "0.9s (0.8s to 1.1s)", and on how many seeds it was not."""
    own, count = found.known_s, len(found.by_seed)
    missed = f"not in {found.missed} of {count} seed{'s' * (count > 1)}" * bool(found.missed)
    if found.median_s is None:
        return missed
    ends = list(dict.fromkeys([duration(own[0]), duration(own[-1])]))
    reach = " to ".join(ends) * (len(ends) > 1)
    ground = "; ".join(filter(None, [reach, missed]))
    return duration(found.median_s) + (f" ({ground})" if ground else "")


def _speed(one: Named) -> str:
    """Returns the speed of its windows; of its whole trainings or its probe, which read otherwise, with a mark."""
    mark = " (trained)" if one.trained and not one.throughput else ""
    return speed(one.throughput or one.trained, one.probed_samples_per_s) + mark


def ablation(found: Sequence[AblationResult]) -> Iterator[Grid]:
    """Yields what each optimisation bought at the best, and added to what it is compared with."""
    for base in dict.fromkeys(["best", *(one.base for one in found)]):
        title = f"{base} with it, over {base}{' without' if base == 'best' else ''}"
        own = [one for one in found if one.base == base]
        if own:
            yield Grid([title, "instead of", "speed", "memory"], [_ablated(one) for one in own])


def _ablated(one: AblationResult) -> list[str]:
    bought = ratio(one.gain, "x") if one.gain else "not measured"
    memory = f"{one.memory_ratio:.2f}x" if one.memory_ratio else "-"
    return [f"{one.knobs}={one.value}", one.instead_of, bought, memory]


def knobs(found: Summary) -> tuple[Grid, list[str]] | None:
    """Returns the knobs that differ between the named configurations, and the others as name=value."""
    columns = [*found.given(), *([found.best] if found.best else [])]
    configs = [_knobs_of(found, one) for one in columns]
    rows, same = [], []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name) for config in configs]
        if any(value != values[0] for value in values):
            rows.append([name, *map(_exact, values)])
        else:
            same.append(f"{name}={plain(values[0])}")
    return (Grid(["", *(one.name for one in columns)], rows), same) if columns else None


def active(found: Summary) -> Grid | None:
    """Returns the knobs of the best as asked, and as its first step was seen to run them."""
    if found.best is None or not found.best.active:
        return None
    words = {True: "as asked", False: "not as asked", None: "cannot be told"}
    asked = {name: value for name, value in found.best.config.items() if found.asks_for(name)}
    rows = runtime_check.compare(asked, found.best.active, found.table)
    return Grid(["knob", "asked", "seen", ""], [[r.knob, r.asked, r.seen, words[r.agrees]] for r in rows])


def probes(found: Summary) -> Grid | None:
    """Returns every probe, the fastest first, with the knobs in which the probes differ."""
    keys, rows = _varied(found.probes), []
    for rank, probe in enumerate(sorted(found.probes, key=lambda p: -(p.samples_per_s or 0.0)), start=1):
        measured = rate(probe.samples_per_s) if probe.samples_per_s else outcome(probe.outcome)
        cells = [plain(probe.config.get(k, "-")) for k in keys]
        rows.append([probe.trial or str(rank), measured, size(probe.peak_allocated_bytes), *cells])
    return (
        Grid(["", "samples a second", "peak memory", *(key.replace("_", " ") for key in keys)], rows) if rows else None
    )


def trials(found: Summary) -> Grid | None:
    """Returns every trial with the knobs in which the trials differ, and what it is picked for."""
    picks = {found.named[name].trial: WORDS[name] for name in reversed(list(found.answers))}
    keys, rows = _varied(found.trials), []
    for trial, figures in _ended_trials(found):
        mark = picks.get(trial.trial, "front" if trial.on_front else trial.named)
        knobs = [plain(trial.config.get(k, "-")) for k in keys]
        rows.append([trial.trial, *figures, size(trial.peak_allocated_bytes), *knobs, mark])
    head = ["", "outcome", *found.objectives, "samples/s", "peak", *(key.replace("_", " ") for key in keys), ""]
    return Grid(head, rows) if rows else None


def _ended_trials(found: Summary) -> Iterator[tuple[TrialView, list[str]]]:
    """Yields each trial by its name, with how it ended, its qualities and its speed."""
    for trial in sorted(found.trials, key=lambda t: t.trial):
        at = trial.stopped_at or (trial.samples if trial.has_ended else None)
        ended = outcome(trial.outcome) + (f" at {at}" if at else "")
        values = [f"{v:.3f}" if (v := trial.values.get(name)) is not None else "-" for name in found.objectives]
        trained = trial.outcome in ("ok", "stopped")  # of one that failed the rate is only what was expected
        yield trial, [ended, *values, rate(trial.samples_per_s if trained else None)]


def trial_list(found: Summary) -> Grid | None:
    """Returns every trial as `show` lists it: how it ended, quality, speed, the knobs in which the trials differ."""
    keys, rows = _varied(found.trials), []
    best = found.best.trial if found.best else ""
    for trial, figures in _ended_trials(found):
        own = assignments({key: trial.config[key] for key in keys if key in trial.config})
        name = f"{trial.trial}{' *' * (trial.trial == best)}{f' {trial.named}' if trial.named else ''}"
        rows.append([name, *figures, " ".join(own)])
    return Grid(["trial", "outcome", *found.objectives, "samples/s", "with"], rows) if rows else None


def compared(first: Summary, second: Summary) -> Grid:
    """Returns the best of two runs side by side: where, how fast, how good, and the knobs that differ."""
    rows = [["workload", *(one.workload for one in (first, second))]]
    rows += [["device", *(one.place.device for one in (first, second))]]
    bests = [one.best for one in (first, second)]
    rows += [["best", *(found_by(best) if best else "-" for best in bests)]]
    rows += [["samples/s", *(_speed(best) if best else "-" for best in bests)]]
    for name in dict.fromkeys([*first.objectives, *second.objectives]):
        rows.append([name, *(quality(b.quality[name]) if b and name in b.quality else "-" for b in bests)])
    rows += [["peak", *(size(best.peak_allocated_bytes if best else None) for best in bests)]]
    configs = [_knobs_of(one, best) if best else {} for one, best in zip((first, second), bests, strict=True)]
    for name in dict.fromkeys([*configs[0], *configs[1]]):
        values = [config.get(name) for config in configs]
        if values[0] != values[1]:
            rows.append([name, *map(_exact, values)])
    return Grid(["", first.id, second.id], rows)


def _knobs_of(found: Summary, one: Named) -> dict[str, object]:
    """Returns the knobs of a configuration that the run's workload reads, defaults filled in."""
    return {name: value for name, value in complete(one.config, found.table).items() if found.asks_for(name)}


def _exact(value: object) -> str:
    """Returns the value of a knob so that it can be told from another, "-" where there is none."""
    return "-" if value is None else number(value, 6) if isinstance(value, float) else plain(value)


def _varied(views: Sequence[TrialView]) -> list[str]:
    names = dict.fromkeys(name for one in views for name in one.config)
    return [n for n in names if len({str(one.config.get(n)) for one in views}) > 1]
