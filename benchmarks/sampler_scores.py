"""What a pick is worth on fresh seeds: its speed over the plain default under the rule, and which way to choose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PEER = "ray tune"
"""The way that is none of ours."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """A way in a block: log of the speed over plain's, quality, and whether the rule is met."""

    speed: float
    quality: float
    meets: bool

    @property
    def worth(self) -> float:
        """Returns the log of the speed that counts: a pick that misses the rule is at most as fast as plain."""
        return self.speed if self.meets else min(0.0, self.speed)


def scores(rows: Sequence[Row], plain: Mapping[str, Row]) -> dict[tuple[str, int], dict[str, Score]]:
    """Returns the scores by block (workload, search seed) and way; a search without a pick scores as plain."""
    found: dict[tuple[str, int], dict[str, Score]] = {}
    blocks = dict.fromkeys((r["workload"], r["seed"]) for r in rows if r["kind"] == "search")
    for block in blocks:
        own = [r for r in rows if (r["workload"], r["seed"]) == block]
        searches = {r["way"]: r for r in own if r["kind"] == "search"}
        trained = [r for r in own if r["kind"] == "train" and "quality" in r]
        known: Row = next((r for r in searches.values() if "mode" in r), {"mode": "max", "baselines": []})
        sign = 1.0 if known["mode"] == "max" else -1.0
        base = {r["fresh"]: r for r in trained if r["way"] == "plain"}
        qualities = {way: [sign * r["quality"] for r in trained if r["way"] == way] for way in searches}
        means = {way: statistics.fmean(values) for way, values in qualities.items() if values}
        if not base or not means:
            continue
        best, bar = max(means.values()), max((sign * b for b in known["baselines"]), default=-math.inf)
        asked = plain[block[0]]["tolerance"]
        tolerance = float(asked.rstrip("%")) / 100 * abs(best) if isinstance(asked, str) else float(asked)
        found[block] = {}
        for way in searches:
            if way not in means:
                found[block][way] = Score(0.0, math.nan, False)
                continue
            mine = [r for r in trained if r["way"] == way and r["fresh"] in base]
            speed = statistics.fmean(math.log(r["samples_per_s"] / base[r["fresh"]]["samples_per_s"]) for r in mine)
            meets = means[way] >= best - tolerance - 1e-9 and means[way] > bar
            found[block][way] = Score(speed, sign * means[way], meets)
    return found


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Returns a mean and its standard error, infinite of one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), error


def table(found: Mapping[tuple[str, int], Mapping[str, Score]], ways: Sequence[str]) -> list[str]:
    """Returns a line a workload and way, one a way over all, and the simplest within two errors of the best of ours."""
    head = "| workload | way | n | speed over plain (s.e. of its log) | meets the rule | quality |"
    lines = [head, "|---|---|---|---|---|---|"]
    for workload in [*dict.fromkeys(w for w, _ in found), "all"]:
        for way in ways:
            own = [s[way] for (w, _), s in found.items() if workload in (w, "all") and way in s]
            if not own:
                continue
            worth, error = _mean([s.worth for s in own])
            quality = "" if workload == "all" else f"{statistics.fmean(s.quality for s in own):.4f}"
            lines.append(
                f"| {workload} | {way} | {len(own)} | {math.exp(worth):.2f} ({error:.2f}) | "
                f"{sum(s.meets for s in own)}/{len(own)} | {quality} |"
            )
    return [*lines, "", chosen(found, [w for w in ways if w != PEER])]


def chosen(found: Mapping[tuple[str, int], Mapping[str, Score]], ways: Sequence[str]) -> str:
    """Returns which way is the simplest, `ways` being in that order, within two standard errors of the best.

    Errors are of the paired differences over the blocks that have every way.
    """
    whole = [s for s in found.values() if all(way in s for way in ways)]
    if len(whole) < 2:
        return f"no choice: {len(whole)} blocks have all of {', '.join(ways)}"
    best = max(ways, key=lambda way: statistics.fmean(s[way].worth for s in whole))
    for way in ways:
        less, error = _mean([s[best].worth - s[way].worth for s in whole])
        if less <= 2 * error:
            break
    return f"the simplest within two standard errors of the best ({best}) over {len(whole)} blocks: {way}"
