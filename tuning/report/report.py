"""report.html: one file that needs nothing else, to be read, printed and passed on.

Every text goes through Jinja's escaping; the figures are our own SVG. The page may load nothing and run nothing
(its policy says so), and it is written from a `Summary` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from trainables.knobs import TABLE
from tuning.config import atomic
from tuning.config.cards import HERE
from tuning.config.shareable import shareable
from tuning.report import format as fmt
from tuning.report import plots, sentences
from tuning.report.format import duration, percent, plain, rate, size, speed
from tuning.report.summary import PICKS, Named, Summary
from tuning.report.trial_views import TrialView
from tuning.search import runtime_check

_NO_FIGURES = "The figures are left out: they need matplotlib (pip install matplotlib)."


@dataclass(frozen=True)
class Grid:
    """A table as text: column heads, rows of cells (the first names its row), and the column to stress, if any."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    stressed: int | None = None


def write_report(summary: Summary, path: Path, *, overwrite: bool = True) -> Path:
    """Returns `path`, where the report now stands; raises ConfigError where it cannot be written."""
    return atomic.write_text(path, render(summary), overwrite=overwrite)


def render(summary: Summary) -> str:
    """Returns the page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    text = (resources.files("tuning") / "templates" / "report.html.j2").read_text(encoding="utf-8")
    figures, missing = _figures(summary)
    best, times = summary.best, summary.times
    return environment.from_string(text).render(
        summary=summary,
        title=_title(summary),
        answer=sentences.answer(summary),
        settings=fmt.assignments(fmt.differing(best.config, {})) if best else [],
        place=sentences.place_sentence(summary.place),
        claim=sentences.claim_sentence(summary.claim, summary.gain("after", "before")),
        stats=list(_stats(summary)),
        compared=_compared(summary),
        knobs=_knobs(summary),
        alternatives=_alternatives(summary),
        confirmed=_confirmed(summary),
        ablation=_ablation(summary),
        active=_active(summary),
        probes=_probes(summary),
        trials=_trials(summary),
        times=_times(summary),
        provenance=list(_provenance(summary)),
        methods=sorted({q.method for n in summary.named.values() for q in n.quality.values() if n.name == "best"}),
        counts=fmt.counts(summary.trial_counts),
        overhead=percent(times.overhead_frac),
        gap=duration(times.gap_s) if times.gap_s is not None else "",
        figures=figures,
        missing=missing,
    )


def _printable(value: Any) -> Any:
    """Control characters as their escapes, as HTML cannot hold them; a figure stays in one line with its interval."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return plain(value).replace(" ± ", "\u00a0±\u00a0")


def _figures(summary: Summary) -> tuple[dict[str, tuple[Markup, str]], str]:
    """Figures by name, each with its caption, and why there are none."""
    try:
        found = {name: draw(summary) for name, draw in plots.FIGURES.items()}
    except ImportError:
        return {}, _NO_FIGURES
    # plots escapes what it is given
    return {name: (Markup(f.svg), f.caption) for name, f in found.items() if f is not None}, ""  # noqa: S704


def _title(summary: Summary) -> str:
    name, place = Path(summary.workload).stem or "Run", summary.place
    card = f" on {place.card}" if place.card and place.card not in HERE else ""
    return f"{name}{card}{', emulated' if place.virtual and card else ''}"


def _stats(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Figure, what it is, and what stands behind it."""
    best = summary.best
    if best is not None:
        measured = best.trained or best.throughput
        what = "whole trainings" if best.trained else "windows"
        grounds = f"mean of {len(measured.windows)} {what}, 95 %" if measured else "one probe, not confirmed"
        yield speed(measured) if measured else rate(best.probed_samples_per_s), "samples a second", grounds
        for name, found in best.quality.items():
            reach = fmt.quality(found).partition("(")[2].strip(")")
            yield f"{found.mean:.3f}", name, f"next run {reach}" if reach else "one seed"
        if best.peak_allocated_bytes:
            cap = f"of {size(summary.place.cap_bytes)}" if summary.place.cap_bytes else "no cap"
            yield size(best.peak_allocated_bytes), "peak memory", cap
    asked = summary.study.get("config", {}).get("search", {}).get("trials")
    done = sum(summary.trial_counts.values())
    yield duration(summary.times.wall_s), "whole run", f"{done} of {asked} trials" if asked else f"{done} trials"


def _ablation(summary: Summary) -> Grid | None:
    """What each optimisation bought at the best, and added to `before`."""
    rows = []
    for one in summary.ablation:
        where = "the best without it" if one.base == "best" else "before"
        bought = fmt.ratio(one.gain, "x") if one.gain else one.why
        memory = f"{one.memory_ratio:.2f}x" if one.memory_ratio else "-"
        rows.append(
            [one.knobs, f"{one.value}, not {one.instead_of}", where, bought, one.verdict, memory, one.claim or "-"]
        )
    return Grid(["knob", "", "over", "speed", "", "peak memory", "claimed"], rows) if rows else None


def _columns(summary: Summary) -> list[Named]:
    return [*summary.given(), *([summary.best] if summary.best else [])]


def _compared(summary: Summary) -> Grid | None:
    columns = _columns(summary)
    gains = [summary.gain("best", n.name) for n in columns]

    def row(label: str, cell: Callable[[Named], str]) -> list[str]:
        return [label, *map(cell, columns)]

    rows = [
        row(
            "samples a second, in turns",
            lambda n: speed(n.throughput, n.probed_samples_per_s) if n.beside_others else fmt.outcome(n.outcome),
        ),
        row("samples a second, whole trainings", lambda n: speed(n.trained) if n.trained else "not trained"),
        ["best over it", *(f"{g.ratio:.2f}x" if g else "" for g in gains)],
        ["95 % interval", *(f"{g.low:.2f} to {g.high:.2f}" if g and g.low and g.high else "" for g in gains)],
    ]
    for name in summary.objectives:
        learned = [n.quality.get(name) for n in columns]
        rows.append([name, *(fmt.quality(found) if found else "not trained" for found in learned)])
    rows.append(row("peak memory", lambda n: size(n.peak_allocated_bytes)))
    rows.append(row("waiting for data", lambda n: percent(n.data_wait_frac)))
    rows.append(row("held back by", lambda n: sentences.bound(n.verdict) if n.verdict else ""))
    told = [one for one in rows if set(one[1:]) - {"", "not trained"} or one[0] in summary.objectives]
    return Grid(["", *(n.name for n in columns)], told, len(columns) if summary.best else None) if columns else None


def _knobs(summary: Summary) -> tuple[Grid, list[str]] | None:
    """The knobs that differ between the named configurations, and the others as name=value."""
    columns = _columns(summary)
    configs = [fmt.complete(n.config) for n in columns]
    rows, same = [], []
    for name in dict.fromkeys(name for config in configs for name in config):
        cells = [plain(c[name]) if name in c else "-" for c in configs]
        if len(set(cells)) > 1:
            rows.append([name, *cells])
        else:
            same.append(f"{name}={cells[0]}")
    grid = Grid(["", *(n.name for n in columns)], rows, len(columns) if summary.best else None)
    return (grid, same) if columns else None


def _active(summary: Summary) -> Grid | None:
    """The knobs of the best as asked, and as its first step was seen to run them."""
    if summary.best is None or not summary.best.active:
        return None
    words = {True: "as asked", False: "not as asked", None: "cannot be told"}
    found = runtime_check.compare(summary.best.config, summary.best.active)
    return Grid(["knob", "asked", "seen", ""], [[r.knob, r.asked, r.seen, words[r.agrees]] for r in found])


def _alternatives(summary: Summary) -> Grid | None:
    found = summary.alternatives()
    if not found or summary.best is None:
        return None
    rows = []
    for one in (summary.best, *found):
        own = one.quality.get(summary.objective)
        status = "confirmed" if one.throughput else "from probe and search"
        measured = speed(one.trained or one.throughput, one.probed_samples_per_s)
        rows.append([one.name.replace("_", " "), one.trial, measured, fmt.quality(own) if own else "-", status])
    return Grid(["", "trial", "samples a second", summary.objective, ""], rows)


def _confirmed(summary: Summary) -> Grid | None:
    """The pick and its challengers on fresh seeds, where there were challengers."""
    rows = []
    for one in summary.confirmed:
        values = [one.quality.get(name) for name in summary.objectives]
        cells = [fmt.quality(found) if found else fmt.outcome(one.outcome) for found in values]
        seeds = ", ".join(str(seed) for found in values[:1] if found for seed in found.by_seed)
        is_best = summary.best is not None and one.name == summary.best.trial
        rows.append([one.name, speed(one.trained or one.throughput), *cells, seeds, "best" if is_best else ""])
    return Grid(["", "samples a second", *summary.objectives, "seeds", ""], rows) if len(rows) > 1 else None


def _probes(summary: Summary) -> Grid | None:
    keys = _varied(summary.probes)
    rows = []
    for number, probe in enumerate(sorted(summary.probes, key=lambda p: -(p.samples_per_s or 0.0)), start=1):
        measured = rate(probe.samples_per_s) if probe.samples_per_s else fmt.outcome(probe.outcome)
        cells = [plain(probe.config.get(k, "-")) for k in keys]
        rows.append([probe.trial or str(number), measured, size(probe.peak_allocated_bytes), *cells])
    return Grid(["", "samples a second", "peak memory", *map(_spaced, keys)], rows) if rows else None


def _trials(summary: Summary) -> Grid | None:
    picks = {n.trial: name.replace("_", " ") for name, n in reversed(list(summary.named.items())) if name in PICKS}
    keys = _varied(summary.trials)
    rows = []
    for trial in sorted(summary.trials, key=lambda t: t.trial):
        values = [f"{v:.3f}" if (v := trial.values.get(name)) is not None else "-" for name in summary.objectives]
        trained = trial.outcome in ("ok", "stopped")  # of one that failed the rate is only what was expected
        ended = fmt.outcome(trial.outcome) + (f" at {trial.stopped_at}" if trial.stopped_at else "")
        figures = [rate(trial.samples_per_s if trained else None), size(trial.peak_allocated_bytes)]
        marks = picks.get(trial.trial, "front" if trial.on_front else "")
        rows.append([trial.trial, ended, *values, *figures, *(plain(trial.config.get(k, "-")) for k in keys), marks])
    return (
        Grid(["", "outcome", *summary.objectives, "samples/s", "peak", *map(_spaced, keys), ""], rows) if rows else None
    )


def _spaced(name: str) -> str:
    return TABLE[name].short if name in TABLE and TABLE[name].short else name.replace("_", " ")


def _varied(views: Sequence[TrialView]) -> list[str]:
    names = dict.fromkeys(name for one in views for name in one.config)
    return [n for n in names if len({str(one.config.get(n)) for one in views}) > 1]


def _times(summary: Summary) -> list[tuple[str, str, str, float]]:
    """Activity, seconds in words, share in words, share as percent of the widest for the bar."""
    parts, wall_s = sentences.shares(summary), summary.times.wall_s
    return [(name, duration(s), percent(s / wall_s), round(100 * s / parts[0][1], 1)) for name, s in parts]


def _provenance(summary: Summary) -> Iterator[tuple[str, str]]:
    study: Mapping[str, Any] = summary.study
    yield "run", summary.id
    yield "command", shareable(str(study.get("command", "")))
    yield "seed", plain(study.get("seed"))
    versions = study.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{k} {v}" for k, v in versions.items())
    counted = (("train_samples", "training"), ("val_samples", "validation"))
    if samples := [f"{study[k]} {word}" for k, word in counted if k in study]:
        yield "samples", ", ".join(samples)
    for name, values in summary.baselines.items():
        yield f"baseline {name}", ", ".join(f"{k} {fmt.number(v)}" for k, v in values.items())
    if (claim := summary.claim) is not None:
        yield "claimed for after", f"{claim.text} ({claim.source})" if claim.source else claim.text
    yield "probes", fmt.counts(summary.probe_counts)
    if overtaken := [t.trial for t in summary.trials if t.is_overtaken]:
        yield "overtaken", f"{', '.join(overtaken)} trained with other system knobs; those shown are faster"
    if summary.stop_reason:
        yield "ended", summary.stop_reason
