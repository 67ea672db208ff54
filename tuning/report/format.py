"""The one formatter: figures as people write them, text of records as one plain line, and tables for rich to lay out.

rich gets `Text` alone, never a string to parse, so no value of a record is markup or an escape code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box, filesize
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainables.knobs import KnobTable, Scalar, complete
from tuning.config.choices import BEFORE
from tuning.search import bottleneck
from tuning.stats.uncertainty import Gain, Quality, Throughput

LABEL_WIDTH = 10
"""Columns of "accuracy  ", "trials    " and the like."""
_MAX_VALUE, _NAME_WIDTH = 36, 20
SHOWN_FROM = 3
WIDE_TIMES = 5.0
"""An interval of two measurements that goes up to so many times the ratio is not shown."""
"""Rounds or windows from which on an interval is shown: half of that of two is 6.4 times their distance."""


def plain(value: object) -> str:
    """Returns `value` as one line of text without control characters; those become their escapes, such as `\\x1b`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return number(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def spoken(name: str) -> str:
    """Returns a named configuration as tables and lines have it: `before` alone would read as the word."""
    return "your settings" if name == BEFORE else plain(name)


def number(value: float, digits: int = 3) -> str:
    """Returns a number in at most `digits` significant digits, as one would type it: 0.0006 is 6e-4."""
    if not math.isfinite(value):
        return "n/a"
    if value and abs(value) < 1e-2:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def rate(value: float | None, half_width: float | None = None) -> str:
    """Returns samples a second, "61.2 ± 0.9" with the half-width of an interval, which sets the decimals."""
    if value is None:
        return "-"
    if half_width is None:
        return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
    decimals = 0 if half_width >= 10 else 1 if half_width >= 0.1 or value >= 100 else 2
    return f"{value:,.{decimals}f} ± {half_width:,.{decimals}f}"


def speed(found: Throughput | None, probed: float | None = None) -> str:
    """Returns the mean of measurements ± half of the 95 % interval of that mean; without any, a probe's speed."""
    if found is None:
        return f"{rate(probed)} (probed)" if probed else "-"
    return rate(found.mean, found.half_width if len(found.windows) >= SHOWN_FROM else None)


def quality(found: Quality) -> str:
    """Returns a quality: "0.906 (0.893 to 0.919)", the range of the next run, where several seeds say it; two as they
    are.
    """
    if found.low is None or found.high is None or len(found.by_seed) < 2:
        return f"{found.mean:.3f}"
    if len(found.by_seed) == 2:  # of which an interval is too wide to tell anything
        return f"{found.mean:.3f} ({' and '.join(f'{value:.3f}' for value in sorted(found.by_seed.values()))})"
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def ratio(gain: Gain, sign: str = "") -> str:
    """Returns a gain with its 95 % interval, "1.84 (1.79 to 1.89)".

    Without the interval if two measurements side by side say next to nothing, or if the two are one configuration.
    """
    return f"{gain.ratio:.2f}{sign}" + (f" ({gain.low:.2f} to {gain.high:.2f})" if has_interval(gain) else "")


def has_interval(gain: Gain) -> bool:
    """Returns whether a gain is shown with its interval."""
    if gain.low is None or gain.high is None or gain.low == gain.high:
        return False
    return gain.rounds + gain.trainings >= SHOWN_FROM or gain.high <= WIDE_TIMES * gain.ratio


def beside(gain: Gain) -> str:
    """Returns by what two speeds were compared, "3 pairs of trainings and 5 rounds of alternating timings"."""
    trained = f"{plural(gain.trainings, 'pair')} of trainings" * (gain.trainings > 0)
    return " and ".join(
        filter(None, [trained, f"{plural(gain.rounds, 'round')} of alternating timings" * (gain.rounds > 0)])
    )


def difference(value: float, half_width: float | None = None) -> str:
    """Returns a difference of two qualities, "+0.004 ± 0.006" with the half-width of its interval."""
    digits = 3 if max(abs(value), half_width or 0.0) >= 1e-3 or not value else 6
    return f"{value:+.{digits}f}" + ("" if half_width is None else f" ± {half_width:.{digits}f}")


def size(bytes_count: float | None, unknown: str = "-") -> str:
    """Returns bytes as KiB, MiB or GiB, the last with one decimal."""
    if bytes_count is None:
        return unknown
    unit, suffix = filesize.pick_unit_and_suffix(int(bytes_count), ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{bytes_count / unit:.{1 if unit >= 2**30 else 0}f} {suffix}"


def duration(seconds: float | None) -> str:
    """Returns seconds as people say them: 17ms, 0.9s, 58s, 4m, 4m12s, 1h02m."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.095:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m" + (f"{whole % 60:02d}s" if whole % 60 else "")
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def percent(frac: float | None) -> str:
    """Returns a fraction as percent, with one decimal below 10 %."""
    return "-" if frac is None else bottleneck.percent(frac)


def epochs(over_data: float) -> str:
    """Returns how often a training sees its data, "1 epoch" or "2.5 epochs"."""
    count = f"{over_data:.2g}" if over_data < 10 else f"{over_data:,.0f}"
    return f"{count} epoch{'s' * (count != '1')}"


def plural(count: int, word: str, many: str = "") -> str:
    """Returns "1 seed", "3 seeds"; `many` is the plural if it is not the word with an s."""
    return f"{count:,} {word if count == 1 else many or f'{word}s'}"


# -- knobs -------------------------------------------------------------------------------------------------------------


def differing(config: Mapping[str, Scalar], other: Mapping[str, Scalar] | None, rows: KnobTable) -> dict[str, Scalar]:
    """Returns the knobs of `config` that are otherwise in `other`, defaults filled in; all without an `other`.

    A knob without effect in `other` is ignored if it is at its default in `config`.
    """
    if other is None:
        return dict(config)
    ours, theirs = complete(config, rows), complete(other, rows)
    return {name: value for name, value in ours.items() if theirs.get(name, rows.defaults.get(name)) != value}


def apart(config: Mapping[str, Scalar], other: Mapping[str, Scalar], rows: KnobTable) -> list[str]:
    """Returns the names of the knobs in which two configurations differ, defaults filled in."""
    return list(dict.fromkeys([*differing(config, other, rows), *differing(other, config, rows)]))


def unlike(config: Mapping[str, Scalar], other: Mapping[str, Scalar] | None, rows: KnobTable) -> list[str]:
    """Returns "name=value" for each knob that is otherwise in `other`, those that matter most to a reader first."""
    return assignments(_in_turn(differing(config, other, rows)))


def _in_turn(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns knobs with those first that matter most to a reader."""
    return {**{name: config[name] for name in ("learning_rate", "batch_size") if name in config}, **config}


def settings(config: Mapping[str, Scalar], rows: KnobTable, before: Mapping[str, Scalar] | None = None) -> list[str]:
    """Returns "name=value" for each knob that has to be set: those that are not at their default.

    With the user's present configuration `before` those that change, "name=value (was value)".
    """
    full = complete(config, rows)
    if before is not None:
        theirs, changed = complete(before, rows), _in_turn(differing(config, before, rows))
        was = [_cut(plain(theirs[name])) if name in theirs else "without effect" for name in changed]
        return [f"{own} (was {old})" for own, old in zip(assignments(changed), was, strict=True)]
    own = {n: v for n, v in full.items() if n not in rows or rows.defaults[n] != v}
    size, micro = "batch_size", "micro_batch_size"
    if {size, micro} & config.keys() and full[micro] != full[size]:  # else a plain loop takes a batch in one pass
        own |= {micro: full[micro]}
    return assignments(_in_turn(own))


def assignments(config: Mapping[str, Scalar]) -> list[str]:
    """Returns "name=value" for each knob, a long value cut in its middle."""
    return [f"{plain(name)}={_cut(plain(value))}" for name, value in config.items()]


def _cut(text: str) -> str:
    half = (_MAX_VALUE - 1) // 2
    return text if len(text) <= _MAX_VALUE else f"{text[:half]}…{text[-half:]}"


# -- for rich ----------------------------------------------------------------------------------------------------------


def labelled(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Returns rows of a label and what belongs to it, as rich lays them out; a string is plain text."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(min_width=LABEL_WIDTH - 1, overflow="fold")
    made.add_column(overflow="fold")
    for label, content in rows:
        made.add_row(Text(plain(label)), Text(plain(content)) if isinstance(content, str) else content)
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table whose first column names its rows; cells that do not fit are folded."""
    made, rows = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)), list(rows)
    is_short = all(len(plain(row[0])) <= _NAME_WIDTH for row in rows)  # then a name stays on its line
    for number, column in enumerate(head):
        made.add_column(Text(plain(column)), overflow="fold", no_wrap=is_short and not number)
    for row in rows:
        made.add_row(*(Text("" if cell == "" else plain(cell)) for cell in row))
    return made


def fit(line: str, width: int) -> str:
    """Returns `line`, cut to `width` columns."""
    line = line.rstrip()
    return line if len(line) <= width else f"{line[: max(1, width - 1)]}…"
