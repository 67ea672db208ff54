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
from tuning.report import plots, wording
from tuning.report.plots import Figure
from tuning.report.summary import PICKS, Named, Summary
from tuning.report.trial_views import Candidate
from tuning.search import runtime_check

_SHORT = {name: row.short for name, row in TABLE.items() if row.short}
_NO_FIGURES = "The figures are left out: they need matplotlib (pip install matplotlib)."


@dataclass(frozen=True)
class Table:
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
    return environment.from_string(text).render(
        summary=summary,
        title=_title(summary),
        lede=_lede(summary),
        place=wording.place_sentence(summary.place),
        claim=wording.claim_sentence(summary.claim, summary.gain("after", "before")),
        stats=list(_stats(summary)),
        compared=_compared(summary),
        knobs=_knobs(summary),
        alternatives=_alternatives(summary),
        confirmed=_confirmed(summary),
        receipts=_receipts(summary),
        active=_active(summary),
        probes=_probes(summary),
        trials=_trials(summary),
        times=_times(summary),
        provenance=list(_provenance(summary)),
        methods=sorted({q.method for n in summary.named.values() for q in n.quality.values() if n.name == "best"}),
        counts=wording.counts(summary.trial_counts),
        overhead=wording.percent(summary.times.overhead_frac),
        gap=wording.duration(summary.times.gap_s) if summary.times.gap_s is not None else "",
        figures=figures,
        missing=missing,
    )


def _printable(value: Any) -> Any:
    """Control characters as their escapes, as HTML cannot hold them; a figure stays in one line with its spread."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return wording.plain(value).replace(" ± ", "\u00a0±\u00a0")


def _figures(summary: Summary) -> tuple[dict[str, tuple[Markup, str]], str]:
    """Figures by name, each with its caption, and why there are none."""
    drawings: dict[str, Callable[[Summary], Figure | None]] = {
        "front": plots.front,
        "probes": plots.probes,
        "memory": plots.memory,
        "timeline": plots.timeline,
    }
    found = {}
    try:
        for name, draw in drawings.items():
            figure = draw(summary)
            if figure is not None:
                found[name] = (Markup(figure.svg), figure.caption)  # noqa: S704  (plots escapes what it is given)
    except ImportError:
        return {}, _NO_FIGURES
    return found, ""


def _title(summary: Summary) -> str:
    card = f" on {summary.place.card}" if summary.place.card else ""
    return f"{summary.workload or 'Run'}{card}{', emulated' if summary.place.virtual else ''}"


def _lede(summary: Summary) -> str:
    best = summary.best
    if best is None:
        return "This run has picked no configuration: it was cut off before its end, or no trial reached its end."
    gains = [wording.gain_sentence(g) for g in summary.gains if g.of == "best"]
    than = f": {', '.join(gains)}" if gains else ""
    caution = wording.baseline_sentence(summary)
    said = f"The best configuration trains {wording.named_rate(best)} samples a second{than}."
    return f"{said} But {caution}." if caution else said


def _stats(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Figure, what it is, and what stands behind it."""
    best = summary.best
    if best is not None:
        yield wording.named_rate(best).removesuffix(" (probed)"), "samples a second", _grounds(best)
        for name, found in best.quality.items():
            reach = wording.quality(found).removeprefix(f"{found.mean:.3f}").strip(" ()")
            yield f"{found.mean:.3f}", name, f"next run {reach}" if reach else "one seed"
        if best.peak_allocated_bytes:
            cap = f"of {wording.size(summary.place.cap_bytes)}" if summary.place.cap_bytes else "no cap"
            yield wording.size(best.peak_allocated_bytes), "peak memory", cap
    yield wording.duration(summary.times.wall_s), "whole run", f"{sum(summary.trial_counts.values())} trials"


def _grounds(best: Named) -> str:
    if best.trained:
        return f"{len(best.trained.windows)} whole training{'s' * (len(best.trained.windows) > 1)}"
    return f"{len(best.throughput.windows)} windows" if best.throughput else "one probe, not confirmed"


def _receipts(summary: Summary) -> Table | None:
    """What each optimisation bought at the best, and added to `before`."""
    if not summary.receipts:
        return None
    rows = []
    for one in summary.receipts:
        where = "the best without it" if one.base == "best" else "before"
        bought = wording.ratio(one.gain, "x") if one.gain else one.why
        memory = f"{one.memory_ratio:.2f}x" if one.memory_ratio else "-"
        changed = f"{one.value}, not {one.instead_of}"
        rows.append([one.knobs, changed, where, bought, one.verdict, memory, one.claim or "-"])
    return Table(["knob", "", "over", "speed", "", "peak memory", "claimed"], rows)


def _columns(summary: Summary) -> list[Named]:
    return [*summary.given(), *([summary.best] if summary.best else [])]


def _compared(summary: Summary) -> Table | None:
    columns = _columns(summary)
    if not columns:
        return None
    rows = [["samples a second", *(wording.window_rate(n) if n.beside_others else n.outcome for n in columns)]]
    if any(n.trained for n in columns):
        rows.append(["in whole trainings", *(wording.named_rate(n) if n.trained else "not trained" for n in columns)])
    if summary.best is not None:
        gains = {g.over: g for g in summary.gains if g.of == "best"}
        than = [f"{gains[n.name].ratio:.2f}x" if n.name in gains else "" for n in columns]
        rows.append(["best is faster by", *than])
        within = [gains.get(n.name) for n in columns]
        ends = [f"{g.low:.2f} to {g.high:.2f}" if g and g.low and g.high else "" for g in within]
        if any(ends):
            rows.append(["95 % interval", *ends])
    for objective in summary.objectives:
        found = [n.quality.get(objective) for n in columns]
        rows.append([objective, *(wording.quality(q) if q else "not trained" for q in found)])
    rows.append(["peak memory", *(wording.size(n.peak_allocated_bytes) for n in columns)])
    rows.append(["waiting for data", *(wording.percent(n.data_wait_frac) for n in columns)])
    if any(n.verdict for n in columns):
        rows.append(["held back by", *(wording.bound(n.verdict) if n.verdict else "-" for n in columns)])
    stressed = len(columns) if summary.best else None
    return Table(["", *(n.name for n in columns)], rows, stressed)


def _knobs(summary: Summary) -> tuple[Table, list[str]] | None:
    """The knobs that differ between the named configurations, and the others as name=value."""
    columns = _columns(summary)
    if not columns:
        return None
    configs = [wording.complete(n.config) for n in columns]
    names = list(dict.fromkeys(name for config in configs for name in config))
    rows, same = [], []
    for name in names:
        cells = [wording.plain(c[name]) if name in c else "-" for c in configs]
        if len(set(cells)) > 1:
            rows.append([name, *cells])
        else:
            same.append(f"{name}={cells[0]}")
    return Table(["", *(n.name for n in columns)], rows, len(columns) if summary.best else None), same


def _active(summary: Summary) -> Table | None:
    """The knobs of the best as asked, and as its first step was seen to run them."""
    if summary.best is None or not summary.best.active:
        return None
    words = {True: "as asked", False: "not as asked", None: "cannot be told"}
    found = runtime_check.compare(summary.best.config, summary.best.active)
    return Table(["knob", "asked", "seen", ""], [[r.knob, r.asked, r.seen, words[r.agrees]] for r in found])


def _alternatives(summary: Summary) -> Table | None:
    found = summary.alternatives()
    if not found or summary.best is None:
        return None
    objective = summary.objective
    rows = []
    for named in (summary.best, *found):
        quality = named.quality.get(objective)
        seen = wording.quality(quality) if quality else "-"
        status = "confirmed" if named.throughput else "from probe and search"
        rows.append([named.name.replace("_", " "), named.trial, wording.named_rate(named), seen, status])
    return Table(["", "trial", "samples a second", objective, ""], rows)


def _confirmed(summary: Summary) -> Table | None:
    """The pick and its rivals on fresh seeds, where there were rivals."""
    if len(summary.confirmed) < 2:
        return None
    rows = []
    for one in summary.confirmed:
        values = [one.quality.get(name) for name in summary.objectives]
        cells = [wording.quality(found) if found else one.outcome for found in values]
        seeds = ", ".join(str(seed) for found in values[:1] if found for seed in found.by_seed)
        is_best = summary.best is not None and one.name == summary.best.trial
        rows.append([one.name, wording.named_rate(one), *cells, seeds, "best" if is_best else ""])
    return Table(["", "samples a second", *summary.objectives, "seeds", ""], rows)


def _probes(summary: Summary) -> Table | None:
    if not summary.probes:
        return None
    shown = (
        "micro_batch_size",
        "num_workers",
        "amp_dtype",
        "activation_checkpointing",
        "length_bucketing",
        "ram_cache",
    )
    keys = [k for k in shown if len({str(p.config.get(k)) for p in summary.probes}) > 1]
    rows = []
    for number, probe in enumerate(sorted(summary.probes, key=lambda p: -(p.samples_per_s or 0.0)), start=1):
        cells = [wording.plain(probe.config.get(k, "-")) for k in keys]
        speed = wording.rate(probe.samples_per_s) if probe.samples_per_s else _outcome(probe)
        rows.append([probe.trial or str(number), speed, wording.size(probe.peak_allocated_bytes), *cells])
    return Table(["", "samples a second", "peak memory", *(k.replace("_", " ") for k in keys)], rows)


def _trials(summary: Summary) -> Table | None:
    if not summary.trials:
        return None
    picks = {n.trial: name.replace("_", " ") for name, n in reversed(list(summary.named.items())) if name in PICKS}
    keys = [k for k in _varied(summary.trials) if k in _SHORT]
    rows = []
    for trial in sorted(summary.trials, key=lambda t: t.trial):
        values = [f"{v:.3f}" if (v := trial.values.get(name)) is not None else "-" for name in summary.objectives]
        cells = [wording.plain(trial.config.get(k, "-")) for k in keys]
        marks = picks.get(trial.trial, "front" if trial.on_front else "")
        trained = trial.outcome in ("ok", "stopped")  # of one that failed the rate is only what was expected
        speed, peak = wording.rate(trial.samples_per_s if trained else None), wording.size(trial.peak_allocated_bytes)
        rows.append([trial.trial, _outcome(trial), *values, speed, peak, *cells, marks])
    return Table(["", "outcome", *summary.objectives, "samples/s", "peak", *(_SHORT[k] for k in keys), ""], rows)


def _outcome(trial: Candidate) -> str:
    word = wording.OUTCOME_WORDS.get(trial.outcome, trial.outcome)
    return f"{word} at {trial.stopped_at}" if trial.stopped_at else word


def _varied(trials: Sequence[Candidate]) -> list[str]:
    names = dict.fromkeys(name for t in trials for name in t.config)
    return [n for n in names if len({str(t.config.get(n)) for t in trials}) > 1]


def _times(summary: Summary) -> list[tuple[str, str, str, float]]:
    """Activity, seconds in words, share in words, share as percent of the widest for the bar."""
    parts, wall_s = wording.shares(summary.times), summary.times.wall_s
    if not parts or wall_s <= 0:
        return []
    widest = parts[0][1]
    return [(n, wording.duration(s), wording.percent(s / wall_s), round(100 * s / widest, 1)) for n, s in parts]


def _provenance(summary: Summary) -> Iterator[tuple[str, str]]:
    study: Mapping[str, Any] = summary.study
    yield "run", summary.id
    yield "command", wording.shareable(str(study.get("command", "")))
    yield "seed", wording.plain(study.get("seed"))
    versions = study.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{k} {v}" for k, v in versions.items())
    samples = [
        f"{study[k]} {word}" for k, word in (("train_samples", "training"), ("val_samples", "validation")) if k in study
    ]
    if samples:
        yield "samples", ", ".join(samples)
    for name, values in summary.baselines.items():
        yield f"baseline {name}", ", ".join(f"{k} {wording.number(v)}" for k, v in values.items())
    if summary.claim is not None:
        yield (
            "claimed for after",
            f"{summary.claim.text} ({summary.claim.source})" if summary.claim.source else summary.claim.text,
        )
    yield "probes", wording.counts(summary.probe_counts, always=("ok", "oom", "refused"))
    if overtaken := [t.trial for t in summary.trials if t.is_overtaken]:
        yield "overtaken", f"{', '.join(overtaken)} trained with other system knobs; those shown are faster"
    if summary.stop_reason:
        yield "ended", summary.stop_reason
