"""report.html: one file that needs nothing else, to be read, printed and passed on.

Every text goes through Jinja's escaping; the figures are our own SVG. The page may load nothing and run nothing
(its policy says so), and it is written from a `Summary` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tuning.config import atomic
from tuning.config.cards import HERE
from tuning.config.shareable import shareable
from tuning.journal.events import Importances
from tuning.report import format as fmt
from tuning.report import plots, sentences, tables, words
from tuning.report.format import duration, percent, plain
from tuning.report.summary import Summary


def write_report(summary: Summary, path: Path, importances: Importances | None = None) -> Path:
    """Returns `path`, where the report now stands; raises ConfigError where it cannot be written."""
    return atomic.write_text(path, render(summary, importances))


def render(summary: Summary, importances: Importances | None = None) -> str:
    """Returns the page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    text = (resources.files("tuning") / "templates" / "report.html.j2").read_text(encoding="utf-8")
    best, base = summary.best, sentences.today(summary)
    chosen = fmt.settings(best.config, summary.table, base.config if base else None) if best else []
    drawn = {"front": plots.front(summary), "to_quality": plots.to_quality(summary)}
    return environment.from_string(text).render(
        summary=summary,
        title=_title(summary),
        answer=sentences.answer(summary),
        cautions=sentences.cautions(summary),
        answers=tables.answers(summary),
        measured=sentences.measured_sentence(summary),
        unfinished=sentences.unfinished_sentence(summary),
        train=sentences.train_command(summary, "best"),
        typed=sentences.command_with(summary, best.config) if best else "",
        settings=[] if sentences.keeps_today(summary) else chosen,
        others="at its default" if base is None else f"as in {sentences.called(base.name)}",
        place=sentences.place_sentence(summary.place),
        notes=[note for note in summary.notes if note not in summary.warnings],
        knobs=tables.knobs(summary),
        ablation=list(tables.ablation(summary.ablation)),
        probes=tables.probes(summary),
        trials=tables.trials(summary),
        importances=tables.importances(importances or {}),
        searched=sentences.SEARCHED,
        times=_times(summary),
        provenance=list(_provenance(summary)),
        methods=sorted({q.method for n in summary.named.values() for q in n.quality.values() if n.name == "best"}),
        counts=words.counts(summary.trial_counts),
        # plots escapes what it is given
        figures={name: (Markup(f.svg), f.caption) for name, f in drawn.items() if f is not None},  # noqa: S704
    )


def _printable(value: Any) -> Any:
    """Control characters as their escapes, as HTML cannot hold them; a figure stays in one line with its interval."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return plain(value).replace(" ± ", "\u00a0±\u00a0")


def _title(summary: Summary) -> str:
    name, place = Path(summary.workload).stem or "Run", summary.place
    card = f" on {place.card}" if place.card and place.card not in HERE else ""
    return f"{name}{card}{', emulated' if place.virtual and card else ''}"


def _times(summary: Summary) -> list[tuple[str, str, str, float]]:
    """Stage, seconds in words, share in words, share as percent of the widest for the bar."""
    times = summary.times
    widest_s = max(times.stages.values(), default=1.0)
    return [(n, duration(s), percent(s / times.wall_s), round(100 * s / widest_s, 1)) for n, s in times.stages.items()]


def _provenance(summary: Summary) -> Iterator[tuple[str, str]]:
    study = summary.study
    yield "run", summary.id
    yield "command", shareable(study.command)
    yield "seed", plain(study.seed)
    if study.versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in study.versions.items())
    counted = ((study.train_samples or None, "training"), (study.val_samples, "validation"))
    if samples := [f"{count} {word}" for count, word in counted if count is not None]:
        yield "samples", ", ".join(samples)
    for name, values in summary.baselines.items():
        yield f"baseline {name}", ", ".join(f"{k} {fmt.number(v)}" for k, v in values.items())
    yield "probes", words.counts(summary.probe_counts)
    for node in dict.fromkeys(sentences.node(checked) for checked in summary.nodes):
        yield "node", plain(node)
    if summary.stop_reason:
        yield "ended", summary.stop_reason
