"""The report's figures as SVG that takes its colours from the page, so that one drawing suits light and dark.

The only module that imports matplotlib, and only when a figure is drawn: it takes 0.5 s and `--help` must not.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuning.config.cards import GIB_BYTES
from tuning.journal.timeline import Interval
from tuning.report.format import duration, outcome, plain, size
from tuning.report.sentences import baseline_sentence
from tuning.report.summary import Named, Summary
from tuning.report.trial_views import TrialView
from tuning.search.rule import Baseline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins that no drawing uses otherwise; each becomes a custom property of the page.
INK, MUTED, RULE, ACCENT, SOFT, PAPER = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06"
_PROPERTIES = {INK: "ink", MUTED: "muted", RULE: "rule", ACCENT: "accent", SOFT: "soft", PAPER: "paper"}
_MAX_BARS = 60
_WIDTH_INCHES = 7.2
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 8.5, "axes.labelsize": 8.5, "text.color": INK,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": RULE, "grid.color": RULE,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.6, "axes.linewidth": 0.8,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """An SVG element ready to stand in a page, and what it shows in words."""

    svg: str
    caption: str


def front(summary: Summary) -> Figure | None:
    """Returns quality over throughput of every trial, the front and the named ones marked; None without two points."""
    objective = summary.objective
    points = [t for t in summary.trials if t.samples_per_s and t.values.get(objective) is not None]
    if len(points) < 2:
        return None
    baseline = _baseline(summary, [t.values[objective] or 0.0 for t in points])

    def place(chosen: Sequence[TrialView]) -> tuple[list[float], list[float]]:
        return [t.samples_per_s or 0.0 for t in chosen], [t.values[objective] or 0.0 for t in chosen]

    def draw(axes: Axes) -> None:
        stopped = [t for t in points if t.outcome == "stopped"]
        others = [t for t in points if t.outcome != "stopped" and not t.on_front]
        best = sorted((t for t in points if t.on_front), key=lambda t: t.samples_per_s or 0.0)
        axes.scatter(*place(stopped), s=16, facecolors=SOFT, edgecolors="none")
        axes.scatter(*place(others), s=22, facecolors=PAPER, edgecolors=MUTED, linewidths=0.9)
        axes.plot(*place(best), color=ACCENT, linewidth=1.2, zorder=2)
        axes.scatter(*place(best), s=24, facecolors=PAPER, edgecolors=ACCENT, linewidths=1.2, zorder=3)
        for row, named in enumerate([*summary.given(), *([summary.best] if summary.best else [])]):
            _mark(axes, named, objective, row)
        if baseline is not None:
            _line_at(axes, baseline)
        axes.set_xlabel("samples a second (higher is better)")
        axes.set_ylabel(_quality_label(summary))
        axes.margins(x=0.08, y=0.1)

    counted = f"{len(points)} trials, {sum(t.on_front for t in points)} of them on the front"
    caption = (
        f"{plain(objective).capitalize()} over throughput: {counted}. Faint dots were stopped at a rung and stand at "
        "their last value; filled dots are what was confirmed in turns, a bar the range of the next run."
    ) + " The dashed line is a baseline." * (baseline is not None)
    return _figure("front", 3.3, draw, caption)


def curves(summary: Summary) -> Figure | None:
    """Returns the learning curve of every trial, the best stressed; None where no trial was looked at twice."""
    found = {trial: points for trial, points in summary.curves.items() if len(points) > 1}
    if not found:
        return None
    best = summary.best.trial if summary.best else ""
    stopped = {t.trial for t in summary.trials if t.stopped_at}
    baseline = _baseline(summary, [value for points in found.values() for _, value in points])

    def draw(axes: Axes) -> None:
        for trial, points in found.items():
            colour = ACCENT if trial == best else SOFT if trial in stopped else MUTED
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8 if trial == best else 1.0,
                      marker="o", markersize=3, zorder=3 if trial == best else 2)  # fmt: skip
            if trial == best:
                _label(axes, plain(trial), *points[-1])
        if baseline is not None:
            _line_at(axes, baseline)
        axes.set_xlabel("training samples seen")
        axes.set_ylabel(_quality_label(summary))
        axes.margins(x=0.06)

    caption = f"Learning curves of {len(found)} trials; faint ones were stopped at a rung, the pick is stressed."
    return _figure("curves", 2.8, draw, caption)


def probes(summary: Summary) -> Figure | None:
    """Returns throughput by each knob that the probes varied, a dot for each probe; None where no probe succeeded."""
    good = [p for p in summary.probes if p.samples_per_s]
    rows = [
        (name, value)
        for name in dict.fromkeys(name for p in summary.probes for name in p.config)
        if len(values := {plain(p.config.get(name)) for p in summary.probes}) > 1
        for value in sorted(values, key=lambda v: (len(v), v))
    ]
    if not good or not rows:
        return None

    def draw(axes: Axes) -> None:
        for y, (name, value) in enumerate(rows):
            mine = [p for p in summary.probes if plain(p.config.get(name)) == value]
            rates = [p.samples_per_s for p in mine if p.samples_per_s]
            axes.scatter(rates, [y] * len(rates), s=20, facecolors=PAPER, edgecolors=MUTED, linewidths=0.9)
            if rates:
                axes.scatter([max(rates)], [y], s=24, color=ACCENT, zorder=3)
            else:
                axes.scatter([0], [y], marker="x", s=24, color=INK, clip_on=False, zorder=4)
                axes.annotate(outcome(mine[0].outcome), (0, y), (8, -3), textcoords="offset points", color=INK)
            if y and rows[y - 1][0] != name:
                axes.axhline(y - 0.5, color=RULE, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [f"{plain(name)[:26]}={value[:14]}" for name, value in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("samples a second")

    caption = f"Throughput of {len(good)} probes by each knob; filled: the fastest with that value. Crosses never ran."
    return _figure("probes", 0.7 + 0.19 * len(rows), draw, caption)


def memory(summary: Summary) -> Figure | None:
    """Returns the peak of each trial against what the card holds; None where no peak was recorded.

    Beyond sixty trials only those with the highest peaks are drawn.
    """
    trials = [t for t in summary.trials if t.peak_allocated_bytes]
    trials = sorted(sorted(trials, key=lambda t: -(t.peak_allocated_bytes or 0))[:_MAX_BARS], key=lambda t: t.trial)
    if not trials:
        return None
    cap, best = summary.place.cap_bytes, summary.best.trial if summary.best else ""

    def draw(axes: Axes) -> None:
        peaks = [(t.peak_allocated_bytes or 0) / GIB_BYTES for t in trials]
        colours = [INK if t.outcome == "oom" else ACCENT if t.trial == best else SOFT for t in trials]
        axes.bar(range(len(trials)), peaks, width=0.62, color=colours)
        for x, (trial, peak) in enumerate(zip(trials, peaks, strict=True)):
            if trial.outcome == "oom" or trial.trial == best:
                _label(axes, "oom" if trial.outcome == "oom" else "best", x, peak)
        if cap:
            axes.axhline(cap / GIB_BYTES, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            where = (0, cap / GIB_BYTES)
            axes.annotate(f"cap {size(cap)}", where, (0, 3), textcoords="offset points", color=INK)
        axes.set_xticks(range(len(trials)), [plain(t.trial)[:8] for t in trials] if len(trials) <= 16 else [])
        axes.set_ylabel("peak allocated (GiB)")
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, max([*peaks, (cap or 0) / GIB_BYTES]) * 1.15)

    capped = f"; the card holds {size(cap)}" if cap else ""
    return _figure("memory", 2.5, draw, f"Peak memory of {len(trials)} trials{capped}.")


def timeline(summary: Summary) -> Figure | None:
    """Returns what was going on when, trials in as many lanes as ran side by side; None for a run without work."""
    if not summary.intervals:
        return None
    lanes = _lanes(summary.intervals)

    def draw(axes: Axes) -> None:
        for y, ((name, _), spans) in enumerate(lanes.items()):
            bars = [(s.start_s / 60, (s.end_s - s.start_s) / 60) for s in spans]
            colour = ACCENT if name == "training" else MUTED if name == "startup" else SOFT
            axes.broken_barh(bars, (y - 0.31, 0.62), facecolors=colour, edgecolors=PAPER, linewidths=0.6)
        shown = [name.replace("startup", "start-up") if lane == 0 else "" for name, lane in lanes]
        axes.set_yticks(range(len(lanes)), shown)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("minutes since the run began")

    caption = f"Where {duration(summary.times.wall_s)} went; each bar is one probe, trial or window."
    return _figure("timeline", 0.55 + 0.27 * len(lanes), draw, caption)


FIGURES: Mapping[str, Callable[[Summary], Figure | None]] = {
    "front": front,
    "curves": curves,
    "probes": probes,
    "memory": memory,
    "timeline": timeline,
}
"""Every figure by its name in the page."""


def _figure(name: str, height_inches: float, draw: Callable[[Axes], None], caption: str) -> Figure:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        FigureCanvasSVG(canvas)
        draw(canvas.subplots())
        out = io.StringIO()
        canvas.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return Figure(_inline(out.getvalue(), name, caption), caption)


def _inline(svg: str, name: str, caption: str) -> str:
    """The drawing as an element of a page: no prologue, own ids, the page's font and colours, a text for readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r'font: ([\d.]+px) [^;"]*', r"font-size: \1; font-family: inherit", svg)
    for colour, css_property in _PROPERTIES.items():
        svg = svg.replace(colour, f"var(--{css_property})")
    label = html.escape(caption, quote=True)
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', rf'<svg role="img" aria-label="{label}" \1', svg, count=1
    )


def _baseline(summary: Summary, values: Sequence[float]) -> Baseline | None:
    """Returns the baseline, None where it is far from all `values` of the figure and nothing is to be said of it."""
    own = summary.best.quality.get(summary.objective) if summary.best else None
    seen = [*values, own.mean] if own else values
    reach = 0.5 * (max(seen) - min(seen))  # farther away it would take most of the figure
    found = summary.baseline
    if found is None or baseline_sentence(summary):
        return found
    return found if min(seen) - reach <= found.value <= max(seen) + reach else None


def _line_at(axes: Axes, baseline: Baseline) -> None:
    axes.axhline(baseline.value, color=MUTED, linewidth=0.8, linestyle="--")
    axes.annotate(plain(baseline.name)[:24], (1, baseline.value), (0, 3), ha="right", color=MUTED,
                  xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip


def _quality_label(summary: Summary) -> str:
    better = "lower" if summary.objectives[summary.objective] == "min" else "higher"
    return f"{plain(summary.objective)} ({better} is better)"


def _mark(axes: Axes, named: Named, objective: str, row: int) -> None:
    """A named configuration at what was confirmed; where its quality is not known a line at its speed, named on a row.

    Rows keep apart the names of two that are as fast.
    """
    speed, quality = named.beside_others, named.quality.get(objective)
    if not speed:
        return
    if quality is None:
        axes.axvline(speed, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        where = (speed, 0.02 + 0.06 * row)
        axes.annotate(plain(named.name), where, (4, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", color=MUTED)  # fmt: skip
        return
    colour = ACCENT if named.name == "best" else INK
    if quality.low is not None and quality.high is not None and len(quality.by_seed) > 1:
        axes.plot([speed, speed], [quality.low, quality.high], color=colour, linewidth=0.9, alpha=0.6, zorder=3)
    axes.scatter([speed], [quality.mean], s=42, color=colour, zorder=4)
    _label(axes, plain(named.name), speed, quality.mean)


def _label(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text[:24], (x, y), (6, 5), textcoords="offset points", color=INK, annotation_clip=False, zorder=5)


def _lanes(intervals: Sequence[Interval]) -> dict[tuple[str, int], list[Interval]]:
    """Intervals by activity and lane, so that none overlap within a lane."""
    lanes: dict[tuple[str, int], list[Interval]] = {}
    for name in ("startup", "probing", "training", "confirming"):
        for interval in sorted((i for i in intervals if i.activity == name), key=lambda i: i.start_s):
            lane = 0
            while name == "training" and (name, lane) in lanes and lanes[name, lane][-1].end_s > interval.start_s:
                lane += 1
            lanes.setdefault((name, lane), []).append(interval)
    return lanes
