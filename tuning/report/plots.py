"""The report's figures as SVG that takes its colours from the page, so that one drawing suits light and dark.

The only module that imports matplotlib, and only when a figure is drawn: it takes 0.5 s and `--help` must not.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuning.report.format import plain, spoken
from tuning.report.named import WORDS, Named
from tuning.report.sentences import keeps_today
from tuning.report.summary import Summary
from tuning.report.time_to_quality import mean_curve
from tuning.report.trial_views import TrialView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins that no drawing uses otherwise; each becomes a custom property of the page.
INK, MUTED, RULE, ACCENT, SOFT, PAPER = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06"
_PROPERTIES = {INK: "ink", MUTED: "muted", RULE: "rule", ACCENT: "accent", SOFT: "soft", PAPER: "paper"}
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
        for named in (*summary.given(), *([summary.best] if summary.best else [])):
            _mark(axes, named, objective)
        axes.set_xlabel("samples a second (higher is better)")
        axes.set_ylabel(_quality_label(summary))
        axes.margins(x=0.08, y=0.1)

    counted = f"{len(points)} trials, {sum(t.on_front for t in points)} of them on the front"
    caption = (
        f"{plain(objective).capitalize()} over throughput: {counted}. Faint dots were stopped at a rung and stand at "
        "their last value; filled dots were timed beside the reference, a bar is where one more training is expected "
        "(95 %). Trials stand at the speed that the search went by, mostly of a few seconds before it."
    )
    return _figure("front", 3.3, draw, caption)


def to_quality(summary: Summary) -> Figure | None:
    """Returns quality over seconds of training, a line for each seed of the reference and the answers; else None.

    The mean over seeds is bold, that of the pick in the accent colour.
    """
    reference, kept = summary.reference, {"best"} if keeps_today(summary) else set[str]()
    timed = [name for name, answer in summary.answers.items() if answer.time and name not in kept]
    shown = [*([reference] if reference else []), *(summary.named[name] for name in timed)]
    if not timed or all(len(curve) < 2 for one in shown for curve in one.curves.values()):
        return None

    def draw(axes: Axes) -> None:
        for number, one in enumerate(shown):
            colour, dashes = ACCENT if one.name == "best" else INK if not number else MUTED, "-" if number < 3 else "--"
            for curve in one.curves.values():
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.3, zorder=2)
            mean = mean_curve(one.curves.values())
            axes.plot(*zip(*mean, strict=True), color=colour, linewidth=1.8, linestyle=dashes, marker="o", markersize=3)
            _label(axes, WORDS.get(one.name) or spoken(one.name), *mean[-1])
            if not number:
                axes.axhline(mean[-1][1], color=colour, linewidth=0.8, linestyle="--", zorder=1)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(_quality_label(summary))
        axes.set_xlim(left=0)
        axes.margins(x=0.12)

    name = spoken(shown[0].name)
    caption = (
        f"{plain(summary.objective).capitalize()} over seconds of training, of {name} and the answers: "
        f"a faint line for each seed, the mean bold. What comes to the dashed line, where {name} ends, is as good."
    )
    return _figure("to_quality", 2.8, draw, caption)


def _figure(name: str, height_inches: float, draw: Callable[[Axes], None], caption: str) -> Figure:
    """Returns what `draw` makes of axes."""
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
    head = f'<svg role="img" aria-label="{html.escape(caption, quote=True)}"'  # any text: no template of `re`
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', lambda found: f"{head} {found[1]}", svg, count=1)


def _quality_label(summary: Summary) -> str:
    better = "lower" if summary.objectives[summary.objective] == "min" else "higher"
    return f"{plain(summary.objective)} ({better} is better)"


def _mark(axes: Axes, named: Named, objective: str) -> None:
    """Marks a named configuration at what was measured of it, if that is both speed and quality."""
    speed, quality = named.samples_per_s, named.quality.get(objective)
    if not speed or quality is None:
        return
    colour = ACCENT if named.name == "best" else INK
    if quality.low is not None and quality.high is not None and len(quality.by_seed) > 1:
        axes.plot([speed, speed], [quality.low, quality.high], color=colour, linewidth=0.9, alpha=0.6, zorder=3)
    axes.scatter([speed], [quality.mean], s=42, color=colour, zorder=4)
    _label(axes, spoken(named.name), speed, quality.mean)


def _label(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text[:24], (x, y), (6, 5), textcoords="offset points", color=INK, annotation_clip=False, zorder=5)
