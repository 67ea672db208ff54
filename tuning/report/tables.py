"""The tables of a run as text, the same for the terminal and for report.html."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainables.knobs import Scalar, complete
from tuning.journal.events import Importances
from tuning.report.format import (
    difference,
    duration,
    number,
    percent,
    plain,
    plural,
    quality,
    rate,
    ratio,
    size,
    speed,
    spoken,
    unlike,
)
from tuning.report.named import WORDS, Named
from tuning.report.sentences import bound, called, found_by, keeps_today
from tuning.report.summary import Summary
from tuning.report.time_to_quality import Reached
from tuning.report.trial_views import SPEED, TrialView
from tuning.report.words import outcome, state
from tuning.search.ablation import AblationResult
from tuning.search.race import SYSTEM


@dataclass(frozen=True)
class Grid:
    """A table as text: column heads and rows of cells, the first of which names its row; `stressed` is a row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    stressed: int | None = None


def answers(found: Summary, *, brief: bool = False) -> Grid | None:
    """Returns today's configuration, what there is to choose from instead, and others named by hand, side by side.

    None if there is nothing to compare. A column that is empty in all rows is left out. If it is not `brief`, it also
    has what else was trained again, every objective, intervals, memory, and what holds each back.
    """
    reference = found.reference
    chosen = [found.named[name] for name in found.answers if name != "best" or not keeps_today(found)]
    kept = [found.named[SYSTEM]] if SYSTEM in found.named else []  # if today's are the answer
    shown = list(dict.fromkeys(one.name for one in (*filter(None, [reference]), *chosen, *kept, *found.given())))
    rows_of = [found.named[name] for name in shown] + ([] if brief else list(found.others_trained_again()))
    objectives = [found.objective] if brief else [*found.objectives]
    today = f" vs {spoken(reference.name)}" if reference else ""
    until = f"time to same {found.objective}" if reference else ""
    head = ["", "samples/s", f"speed{today}", *objectives, f"{found.objective}{today}", until]
    head += [] if brief else ["peak", "bound by", "card"]
    rows = [_answer(found, one, objectives, brief=brief) for one in rows_of]
    columns = [n for n in range(len(head)) if n == 0 or any(row[n] != "-" for row in rows)]
    stressed = next((n for n, one in enumerate(rows_of) if one.name == "best"), None)
    grid = Grid([head[n] for n in columns], [[row[n] for n in columns] for row in rows], stressed)
    return grid if len(rows) > 1 else None


def importances(shares: Importances) -> Grid | None:
    """Returns the share of each searched knob in each objective, the largest of the first objective first."""
    knobs = dict.fromkeys(knob for own in shares.values() for knob in own)
    rows = [[knob, *(percent(own.get(knob)) for own in shares.values())] for knob in knobs]
    return Grid(["", *("speed" if name == SPEED else name for name in shares)], rows) if rows else None


def _answer(found: Summary, one: Named, objectives: Sequence[str], *, brief: bool) -> list[str]:
    reference, answer = found.reference, found.answers.get(one.name)
    gain = None if reference is None else found.gain(one.name, reference.name)
    times = "-" if gain is None else ratio(gain, "x") + (f" ({gain.grounds})" if gain.grounds else "")
    known = [one.quality.get(name) for name in objectives]
    learned = ["not trained" if own is None else f"{own.mean:.3f}" if brief else quality(own) for own in known]
    beside, time = (answer.quality, answer.time) if answer is not None else (None, None)
    larger = difference(beside.difference, beside.half_width) if beside is not None and beside.seeds else "-"
    reached = time.own if time is not None else None
    if reference is not None and one.name == reference.name:  # on the seeds that the first answer has, too
        reached = next((own.time.reference for own in found.answers.values() if own.time), None)
    fast = "not measured" if one.outcome == "ok" else outcome(one.outcome)
    if one.samples_per_s:
        fast = rate(one.samples_per_s) if brief else _speed(one, reference)
    name = f"{WORDS.get(one.name) or spoken(one.name)} {one.trial}".rstrip()
    row = [name, fast, times, *learned, larger, soon(reached) if reached is not None else "-"]
    held = bound(one.verdict) if one.verdict else "-"
    return row if brief else [*row, size(one.peak_allocated_bytes), held, one.card or "-"]


def soon(found: Reached) -> str:
    """Returns after how long a quality was reached, "0.9s (0.8s to 1.1s)", and on how many seeds it was not."""
    own, count = found.known_s, len(found.by_seed)
    missed = f"not reached on {found.missed} of {plural(count, 'seed')}" * bool(found.missed)
    if found.median_s is None:
        return missed
    ends = list(dict.fromkeys([duration(own[0]), duration(own[-1])]))
    reach = " to ".join(ends) * (len(ends) > 1)
    ground = "; ".join(filter(None, [reach, missed]))
    return duration(found.median_s) + (f" ({ground})" if ground else "")


def _speed(one: Named, reference: Named | None = None) -> str:
    """Returns a speed, and how it was measured if the reference's was otherwise."""
    if one.beside_per_s:
        return rate(one.beside_per_s)
    is_other = reference is not None and one.speed is not None and one.is_trained != reference.is_trained
    mark = (" (trained)" if one.is_trained else " (alternating)") if is_other else ""
    return speed(one.speed, one.probed_samples_per_s) + mark


def ablation(found: Sequence[AblationResult]) -> Iterator[Grid]:
    """Yields what each optimisation bought at the best, added to it, and added to what it is compared with."""
    for base, added in dict.fromkeys((one.base, one.added) for one in found):
        title = f"{'added to' if added else 'of'} {spoken(base)}"
        own = [_ablated(one) for one in found if (one.base, one.added) == (base, added)]
        yield Grid([title, "instead of", "speed with it", "memory with it"], own)


def _ablated(one: AblationResult) -> list[str]:
    bought = ratio(one.gain, "x") if one.gain else "not measured"
    memory = f"{one.memory_ratio:.2f}x" if one.memory_ratio else "-"
    return [f"{one.knobs}={one.value}", one.instead_of, bought, memory]


def knobs(found: Summary) -> tuple[Grid, list[str]] | None:
    """Returns the knobs that differ between the named configurations, and the others as name=value."""
    columns = [*found.given(), *([found.best] if found.best else [])]
    rows, same = _apart([_knobs_of(found, one) for one in columns])
    return (Grid(["", *(spoken(one.name) for one in columns)], rows), same) if columns else None


def probes(found: Summary) -> Grid | None:
    """Returns every probe, the fastest first, with the knobs in which the probes differ."""
    fastest = sorted(found.probes, key=lambda probe: -(probe.samples_per_s or 0.0))
    names = [probe.trial or str(rank) for rank, probe in enumerate(fastest, start=1)]
    base = fastest[0].config if fastest else {}
    head = ["probe", "ended", "samples/s", "peak", "unlike the fastest"]
    return _listed(found, head, names, fastest, (), base)


def trials(found: Summary, *, brief: bool = False) -> Grid | None:
    """Returns every trial: what it is picked for, how it ended, qualities, speed, memory unless `brief`, and knobs."""
    picks = {found.named[name].trial: WORDS[name] for name in reversed(list(found.answers))}
    ended = sorted(found.trials, key=lambda trial: trial.trial)
    marks = [picks.get(trial.trial, "front" if trial.on_front else spoken(trial.named)) for trial in ended]
    names = [f"{trial.trial} {mark}".rstrip() for trial, mark in zip(ended, marks, strict=True)]
    objectives, best = tuple(found.objectives), found.best
    unlike_what = "unlike the defaults" if best is None else "unlike the best"
    head = ["trial", "ended", *objectives, "samples/s", "peak", unlike_what]
    made = _listed(found, head, names, ended, objectives, {} if best is None else best.config)
    if made is None or not brief:
        return made
    return Grid([*made.head[:-2], made.head[-1]], [[*row[:-2], row[-1]] for row in made.rows])


def _listed(
    found: Summary,
    head: Sequence[str],
    names: Sequence[str],
    views: Sequence[TrialView],
    objectives: Sequence[str],
    base: Mapping[str, Scalar],
) -> Grid | None:
    """Returns a row for each trial or probe, None without any; knobs are those unlike in `base`."""
    rows = []
    for name, one in zip(names, views, strict=True):
        values = [f"{value:.3f}" if (value := one.values.get(n)) is not None else "-" for n in objectives]
        knobs = f"as in {called(one.named)}" if one.named else " ".join(unlike(one.config, base, found.table))
        rows.append([name, state(one), *values, rate(one.known_per_s), size(one.peak_allocated_bytes), knobs])
    return Grid(head, rows) if rows else None


def compared(runs: Sequence[Summary]) -> Grid:
    """Returns the bests of runs side by side: where, how fast, how good, beside what, and the knobs that differ."""
    bests = [one.best for one in runs]
    found = list(zip(runs, bests, strict=True))
    rows = [["workload", *(one.workload for one in runs)], ["device", *(one.place.device for one in runs)]]
    rows += [["best", *(found_by(one, best) if best else "-" for one, best in found)]]
    rows += [["samples/s", *(_speed(best) if best else "-" for best in bests)]]
    gains = [one.answers["best"].gain if "best" in one.answers else None for one in runs]
    rows += [["speed", *(f"{ratio(gain, 'x')} vs {spoken(gain.over)}" if gain else "-" for gain in gains)]]
    for name in dict.fromkeys(name for one in runs for name in one.objectives):
        rows.append([name, *(quality(b.quality[name]) if b and name in b.quality else "-" for b in bests)])
    rows += [["peak", *(size(best.peak_allocated_bytes if best else None) for best in bests)]]
    configs = [_knobs_of(one, best) if best else {} for one, best in found]
    return Grid(["", *(one.id for one in runs)], [*rows, *_apart(configs)[0]])


def _apart(configs: Sequence[Mapping[str, Scalar]]) -> tuple[list[list[str]], list[str]]:
    """Returns a row for each knob in which configurations differ, and the others as name=value."""
    rows, same = [], []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name) for config in configs]
        if any(value != values[0] for value in values):
            rows.append([name, *map(_exact, values)])
        else:
            same.append(f"{name}={plain(values[0])}")
    return rows, same


def _knobs_of(found: Summary, one: Named) -> dict[str, Scalar]:
    """Returns the knobs of a configuration that the run's workload reads, defaults filled in."""
    return {name: value for name, value in complete(one.config, found.table).items() if found.asks_for(name)}


def _exact(value: object) -> str:
    """Returns the value of a knob so that it can be told from another, "-" where there is none."""
    return "-" if value is None else number(value, 6) if isinstance(value, float) else plain(value)
