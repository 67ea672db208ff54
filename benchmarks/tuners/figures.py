"""Hypervolume against wall time, and what a row of the table says."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.arena import Arena
from tuning.search.pick import Candidate, pick
from tuning.search.rule import Rule, absolute
from tuning.stats.pareto import hypervolume_2d

Row = Mapping[str, Any]
OURS = "staged"
NO_SPEED = ("learning_rate", "weight_decay", "warmup_frac")
"""Knobs that change no kernel and no copy."""
STRENGTHS = ("dropout", "augmentation")
"""Knobs of which speed depends on whether they are 0 alone."""


def key(knobs: Mapping[str, Any]) -> str:
    """Returns the knobs as text, the same for the same knobs."""
    return json.dumps(dict(sorted(knobs.items())))


def speed_key(knobs: Mapping[str, Any]) -> str:
    """Returns the knobs that speed can depend on as text: of a strength whether there is any, of a rate nothing."""
    kept = {name: value for name, value in knobs.items() if name not in NO_SPEED}
    return key({name: bool(value) if name in STRENGTHS else value for name, value in kept.items()})


def whole(row: Row) -> list[dict[str, Any]]:
    """Returns the trainings that came to their end within the budget, in that order.

    One that was found to be faster with other system knobs comes again with these (`faster`): the speed is that of what
    would be exported, and system knobs cannot change the quality.
    """
    lines = (line for line in row["lines"] if line["event"] in ("trial", "faster"))
    return [x for x in lines if x["outcome"] == "ok" and x["at"] <= row["budget_s"] and x.get("samples_per_s")]


def on_front_once(row: Row, objective: str, mode: str) -> list[dict[str, Any]]:
    """Returns those that were on the run's own front when they ended, by the speeds that it knew itself."""
    sign, front = (1.0 if mode == "max" else -1.0), list[tuple[float, float]]()
    found = []
    for line in whole(row):
        here = (float(line["samples_per_s"]), sign * float(line["values"][objective]))
        if any(a >= here[0] and b >= here[1] for a, b in front):
            continue
        front.append(here)
        found.append(line)
    return found


def slim(row: Row, objective: str, mode: str) -> dict[str, Any]:
    """Returns the row with the knobs of those trainings alone that were on the front once: a tenth of its bytes."""
    kept = {id(line) for line in on_front_once(row, objective, mode)}
    short = ("event", "at", "began", "first_step", "lost_s", "outcome", "samples", "samples_per_s", "values")
    lines = [
        line
        if id(line) in kept or line["event"] not in ("trial", "faster", "oom")
        else {n: line[n] for n in short if n in line}
        for line in row["lines"]
    ]
    return {**row, "lines": lines}


@dataclass(frozen=True)
class Scale:
    """What makes hypervolumes of a workload comparable: speeds measured again, and the qualities' corners.

    `speeds` are by `speed_key`, or by `key` in older files; `worst` and `span` are those of the recorded table, known
    before anything was run.
    """

    objective: str
    mode: Any
    worst: float
    span: float
    speeds: Mapping[str, float]

    @classmethod
    def of(cls, own: Arena, speeds: Mapping[str, float]) -> Scale:
        """Returns the scale of a table's arena."""
        return cls(own.objective, own.table.objectives[own.objective], own.worst, own.span, speeds)

    def knows(self, row: Row) -> bool:
        """Returns whether the speeds of all that was on the run's front are there."""
        return all(self.speed(line["knobs"]) is not None for line in on_front_once(row, self.objective, self.mode))

    def speed(self, knobs: Mapping[str, Any]) -> float | None:
        """Returns the speed that was measured again, None where none was."""
        return self.speeds.get(key(knobs), self.speeds.get(speed_key(knobs)))

    def curve(self, row: Row) -> list[tuple[float, float]]:
        """Returns (seconds, hypervolume) after each training that was on the front when it ended."""
        fastest, sign = max(self.speeds.values()), (1.0 if self.mode == "max" else -1.0)
        points: list[tuple[float, float]] = []
        found = []
        for line in on_front_once(row, self.objective, self.mode):
            gain = max(0.0, sign * (float(line["values"][self.objective]) - self.worst) / self.span)
            points.append((-self.known(line) / fastest, -gain))
            found.append((float(line["at"]), hypervolume_2d(np.array(points), (0.0, 0.0))))
        return found

    def final(self, row: Row) -> float:
        """Returns the hypervolume at the end of the budget."""
        return max((volume for _, volume in self.curve(row)), default=0.0)

    def reached(self, row: Row, volume: float) -> float:
        """Returns when a hypervolume was reached, as a share of the budget; inf where it never was."""
        return next((at / row["budget_s"] for at, here in self.curve(row) if here >= volume), math.inf)

    def picked(self, row: Row, tolerance: float | str) -> tuple[float, float] | None:
        """Returns speed, measured again, and quality of the fastest of the run's front within the tolerance."""
        lines = on_front_once(row, self.objective, self.mode)
        if not lines:
            return None
        values = [float(line["values"][self.objective]) for line in lines]
        bar = absolute(tolerance, values, self.mode)
        candidates = [
            Candidate(str(n), {self.objective: value}, float(line["samples_per_s"]))
            for n, (line, value) in enumerate(zip(lines, values, strict=True))
        ]
        best = int(pick(candidates, Rule(self.objective, self.mode, bar)).best)
        return self.known(lines[best]), values[best]

    def known(self, line: Mapping[str, Any]) -> float:
        """Returns the speed of a training that was measured again; raises KeyError where it was not."""
        speed = self.speed(line["knobs"])
        if speed is None:
            raise KeyError(f"{line['knobs']} was not measured again")
        return speed


def at_one_pace(windows: Sequence[tuple[str, float]], reference: str) -> dict[str, float]:
    """Returns the mean samples a second of each name, as if the machine had kept its mean pace.

    `windows` are (name, samples a second) in the order they were measured, the first and the last of the `reference`:
    each other is a ratio to the nearest windows of the reference before and after it.
    """
    places = [n for n, (name, _) in enumerate(windows) if name == reference]
    usual = statistics.fmean(windows[n][1] for n in places)
    found: dict[str, list[float]] = {reference: [usual]}
    for before, after in pairwise(places):
        pace = (windows[before][1] + windows[after][1]) / 2 / usual
        for name, rate in windows[before + 1 : after]:
            found.setdefault(name, []).append(rate / pace)
    return {name: statistics.fmean(rates) for name, rates in found.items()}


def lost_s(row: Row) -> float:
    """Returns the seconds of trainings that ran out of memory, with what it took until the next began.

    Of one that began again with less, the seconds before that.
    """
    lines = [line for line in row["lines"] if line["event"] == "trial"]
    pairs = zip(lines, [*lines[1:], None], strict=True)
    spent = ((then["began"] if then else x["at"]) - x["began"] for x, then in pairs if x["outcome"] == "oom")
    return float(sum(spent)) + sum(float(x.get("lost_s", 0.0)) for x in lines if x["outcome"] != "oom")


def facts(row: Row) -> dict[str, Any]:
    """Returns what a run did: trainings, OOMs (those of probes too), seconds to its first step, and lost to OOMs."""
    lines = [line for line in row["lines"] if line["event"] == "trial"]
    ooms = sum(line["event"] == "oom" or line.get("outcome") == "oom" for line in row["lines"])
    ooms += sum(int(line.get("probe_ooms", 0)) for line in row["lines"])
    return {
        "launched": len(lines),
        "whole": sum(line["event"] == "trial" for line in whole(row)),
        "ooms": ooms,
        "first_s": min((float(line["first_step"]) for line in lines if "first_step" in line), default=math.nan),
        "first_end_s": next((line["at"] for line in whole(row)), math.nan),
        "lost_s": lost_s(row),
    }


def table(rows: Sequence[Row], scales: Mapping[str, Scale], tolerances: Mapping[str, float | str]) -> list[str]:
    """Returns the table of Markdown: a line for each workload and way, each seed's figure in it."""
    head = "| workload | way | seeds | hypervolume at the end | ours is there at, of the budget | median | launched |"
    lines = [f"{head} OOMs | lost to them, s | first step, s | pick: samples/s | its quality |"]
    lines.append("|" + "---|" * 12)
    for workload, scale in scales.items():
        own = [r for r in rows if r["workload"] == workload]
        ours = {r["seed"]: r for r in own if r["way"] == OURS}
        for way in dict.fromkeys(r["way"] for r in own):
            of_way = sorted((r for r in own if r["way"] == way), key=lambda r: int(r["seed"]))
            volumes = [scale.final(r) for r in of_way]
            shares = [
                scale.reached(ours[r["seed"]], v) for r, v in zip(of_way, volumes, strict=True) if r["seed"] in ours
            ]
            did = [facts(r) for r in of_way]
            picks = [p for r in of_way if (p := scale.picked(r, tolerances[workload])) is not None]
            at = ", ".join("never" if math.isinf(s) else f"{s:.2f}" for s in shares)
            median = "" if way == OURS or not shares else f"{statistics.median(shares):.2f}"
            cells = [
                workload,
                way,
                str(len(of_way)) + "".join(f", one ended with {r['code']}" for r in of_way if r.get("code")),
                ", ".join(f"{v:.3f}" for v in volumes),
                "" if way == OURS else at,
                median,
                *(_middle(did, name) for name in ("launched", "ooms", "lost_s", "first_s")),
                f"{statistics.median(p[0] for p in picks):.0f}" if picks else "",
                f"{statistics.median(p[1] for p in picks):.4g}" if picks else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _middle(did: Sequence[Mapping[str, float]], name: str) -> str:
    known = [d[name] for d in did if not math.isnan(d[name])]
    return f"{statistics.median(known):.0f}" if known else ""
