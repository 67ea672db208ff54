"""What a part's document says against its bar, a line each; pure, so that figures of a card can be judged anywhere.

A bar of speed is a card's: what a CPU reaches is shown and not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEAN_BAR, MOST_BAR = 0.03, 0.10
"""Of the errors of predicted bytes."""
NEXT_BAR_S = 0.5
"""From an OOM to the first step of the next trial."""
OOM_BAR = 1
"""Launched trials of a study that ran out of memory."""
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the table; `met` is None where nothing was measured that the bar is for. `why` is said below it."""

    part: str
    what: str
    figure: str
    bar: str = ""
    met: bool | None = None
    why: str = ""

    @property
    def state(self) -> str:
        """Returns the last column."""
        return "not measured" if self.met is None else "met" if self.met else "NOT MET"


def lines(document: Found) -> list[Line]:
    """Returns the lines of a part's document; one that failed, or was skipped, says so."""
    part = str(document["part"])
    if document.get("error"):
        return [Line(part, "the part failed", "", why=str(document["error"]))]
    if document.get("skipped"):
        return [Line(part, "skipped", "", why=str(document["skipped"]))]
    card = document["device"]["type"] == "cuda"
    own = list(_OF[part](document["found"], card))
    if not document.get("finished", True):
        own.append(Line(part, "unfinished: the next run goes on", "", why="its minutes were over"))
    return own


def memory(found: Found, card: bool) -> Iterator[Line]:
    """Yields errors of the predicted bytes over all rows, and how often a card too small was said to be enough."""
    rows = [r for r in found.get("rows", ()) if "predicted_allocated_bytes" in r]
    foretold = sum(bool(r.get("foretold")) for r in found.get("rows", ()))
    lost = len(found.get("rows", ())) - len(rows) - foretold
    bar = f"{MEAN_BAR:.0%}, {MOST_BAR:.0%}"
    for name in ("allocated", "reserved", "capacity"):
        errors = [(_error(r, name), f"{r['coupling']} x {r['micro_batch']}") for r in rows if r.get(f"{name}_bytes")]
        what = f"{name}: mean and largest error"
        if not errors:
            yield Line("memory", what, "", bar)
            continue
        mean, (most, worst) = statistics.fmean(error for error, _ in errors), max(errors)
        met = mean <= MEAN_BAR and most <= MOST_BAR
        why = "" if met else f"largest: {worst}"
        yield Line("memory", what, f"{mean:.1%}, {most:.1%}", bar, met, why)
    wrong = [r["coupling"] for r in rows if r.get("wrong")]
    if rows:
        figure = f"{len(wrong)} of {len(rows)}"
        yield Line("memory", "said to fit where it does not", figure, "0", not wrong, ", ".join(wrong[:3]))
    if foretold:
        yield Line("memory", "said not to fit this card, and ran out", str(foretold))
    if lost:
        yield Line("memory", "without a prediction or a run", str(lost), "0", False, _first_failure(found))
    if card:
        yield Line("memory", "constants measured", str(len(found.get("constants", {}))))


def cap(found: Found, card: bool) -> Iterator[Line]:
    """Yields what was said of virtual cards against what came, and how the phases recovered."""
    for name in found.get("caps", {}):
        rows = [r for r in found.get("fits", ()) if r["card"] == name]
        wrong = [r for r in rows if r["said"] == "fits" and r["came"] == "OOM"]
        refused = [r for r in rows if r["said"] == "no" and r["came"] == "fits"]
        why = "; ".join(f"{r['coupling']} x {r['micro_batch']}" for r in wrong[:2])
        what = f"{name}: said to fit, OOM"
        yield Line("cap", what, f"{len(wrong)} of {len(rows)}", "0", not wrong if rows else None, why)
        yield Line("cap", f"{name}: said not to fit, fitted", f"{len(refused)} of {len(rows)}")
    phases = found.get("phases", ())
    for name in dict.fromkeys(r["phase"] for r in phases):
        own = [r for r in phases if r["phase"] == name]
        back = [r for r in own if r["then"] == "ok" and not r["retired"] and r["outcome"] in ("oom", "host_oom")]
        slowest = max(r["next_s"] for r in own)
        left = max(r["left_bytes"] or 0 for r in own)
        figure = f"{len(back)}/{len(own)}, {slowest:.2f} s"
        met = len(back) == len(own) and slowest <= NEXT_BAR_S
        why = "" if met else f"{left} bytes left; " + "; ".join(sorted({r["retired"] or r["outcome"] for r in own}))
        yield Line("cap", f"OOM in {name}: back, next in", figure, f"{NEXT_BAR_S} s", met, why)


def search(found: Found, card: bool) -> Iterator[Line]:
    """Yields how many launched trials ran out of memory, whether the result trains, and its gain beside the claim."""
    for row in found.get("rows", ()):
        what = f"{row['workload']}, {row['card']}"
        if "launched" not in row:
            yield Line("search", f"{what}: the study", "failed", "exit 0", False, row.get("why", ""))
            continue
        ooms, launched = row["launched_ooms"], row["launched"]
        yield Line("search", f"{what}: launched OOMs", f"{ooms} of {launched}", f"<= {OOM_BAR}", ooms <= OOM_BAR)
        why = "" if row["trains"] else row.get("train_said", "")
        yield Line("search", f"{what}: best trains", "yes" if row["trains"] else "no", "yes", row["trains"], why)
        factor = row.get("claimed_factor")
        if row.get("gain") is not None:
            met = row["gain"] >= factor if card and factor else None
            bar = f">= {factor:g}x" if factor else ""
            yield Line("search", f"{what}: best over before", f"{row['gain']:.2f}x", bar, met)


def exit_code(documents: Sequence[Found]) -> int:
    """Returns 0 where everything measured is met, 1 where a bar is not, 2 where a part failed or is unfinished."""
    if any(d.get("error") or not (d.get("finished", True) or d.get("skipped")) for d in documents):
        return 2
    return int(any(line.met is False for d in documents for line in lines(d)))


def _error(row: Found, name: str) -> float:
    return abs(float(row[f"predicted_{name}_bytes"]) / float(row[f"{name}_bytes"]) - 1.0)


def _first_failure(found: Found) -> str:
    missing = [r for r in found["rows"] if "predicted_allocated_bytes" not in r and not r.get("foretold")]
    said = missing[0].get("failed") or "; ".join(missing[0].get("notes", ())) or "no answer"
    return f"{missing[0]['coupling']}: {said}"


_OF = {
    "memory": memory,
    "cap": cap,
    "search": search,
}
