"""What earlier runs of the same workload found, as the start of the next: read once, written into its own records.

Speed is taken over for the same code, device, versions and shapes of samples; what was learned only where the data and
the horizon are the same too. Nothing of it is an answer: what an earlier run found best is measured and trained again,
and every second proposal is made without it, so that an earlier run that was wrong costs time and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainables.knobs import Knobs, Scalar, kind_of
from tuning.config.space import Range, Space
from tuning.journal.records import Record, last, trials
from tuning.search import throughput
from tuning.search.throughput import Probed
from tuning.stats.pareto import Floats, Mode, front, signed, spread_order

MOST_RUNS = 5
"""So many earlier runs are read, the newest first."""
MOST_TRIALS = 300
"""About so many of their trials are kept: with 10,000 every second proposal would take seconds."""
FIRST = 3
"""So many of what earlier runs found best are trained first."""
ENOUGH = 4
"""From so many earlier trials on, a best of them that comes out worse than their middle is taken as refuted."""


def speed_key(study: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what measured speeds hold for, None where a run did not record it."""
    versions, config = study.get("versions") or {}, study.get("config") or {}
    key = {
        "workload_sha256": study.get("workload_sha256"),
        "shapes_sha256": study.get("shapes_sha256"),
        "options": {k: v for k, v in ((config.get("workload") or {}).get("options") or {}).items() if "data" not in k},
        "device": (study.get("device") or {}).get("name"),
        "threads": study.get("threads"),
        "cap_bytes": (study.get("card") or {}).get("cap_bytes"),
        "versions": {name: versions.get(name) for name in ("torch", "cardtune")},
    }
    known = (key["workload_sha256"], key["shapes_sha256"], key["device"], versions.get("torch"))
    return key if all(known) else None


def learning_key(study: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what the outcomes of trials hold for, None where a run did not record it."""
    speed = speed_key(study)
    if speed is None or not study.get("data_sha256"):
        return None
    workload = (study.get("config") or {}).get("workload") or {}
    own = {n: study.get(n) for n in ("data_sha256", "objectives", "horizon_samples")}
    return {**speed, **own, "options": workload.get("options")}


def recall(earlier: Iterable[tuple[str, Sequence[Record]]], study: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a `reused` record, or None where nothing of the `earlier` runs, newest first, holds here.

    `probes` and `trials` are of runs whose key is this one's; `left_out` says by run why its trials are not among them.
    """
    speed, learning = speed_key(study), learning_key(study)
    if speed is None:
        return None
    runs: list[str] = []
    probes: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name, records in earlier:
        opening = last(records, "study")
        if len(runs) == MOST_RUNS or opening is None or speed_key(opening.fields) != speed:
            continue
        own = [
            {"config": dict(r["config"]), "samples_per_s": r["samples_per_s"]}
            for r in records
            if r.event == "probe" and r["outcome"] == "ok" and not r.get("name")
        ]
        theirs, other = _trials(records), learning_key(opening.fields)
        if learning is None or other is None or other != learning:
            differs = [n for n in learning if other.get(n) != learning[n]] if learning and other else ["data_sha256"]
            left_out.update({name: ", ".join(differs)} if theirs else {})
            theirs = []
        if own or theirs:
            runs.append(name)
            probes += own
            ended += theirs[-max(1, MOST_TRIALS - len(ended)) :]  # the later ones are the better ones
    found = {"runs": runs, "probes": probes, "trials": ended, "left_out": left_out}
    return found if probes or ended else None


def sentence(found: Mapping[str, Any]) -> str:
    """Returns what is taken over, and what is not, in words."""
    said = f"begins from {len(found['probes'])} probes and {len(found['trials'])} trials of {', '.join(found['runs'])}"
    for name, why in found["left_out"].items():
        said += f"; what {name} learned is left out, as it differs in {why.replace('_sha256', '')}"
    return f"{said} (search.reuse=false begins from nothing)"


def probes(records: Sequence[Record], space: Space) -> list[Probed]:
    """Returns the probes taken over that the space allows, the fastest first; their step times are not taken over."""
    found = last(records, "reused")
    own = [Probed(p["config"], 1.0, 0.0, float(p["samples_per_s"])) for p in (found or {"probes": []})["probes"]]
    return sorted((p for p in own if throughput.inside(space, p)), key=lambda p: -p.samples_per_s)


def earlier_trials(records: Sequence[Record], space: Space) -> list[dict[str, Any]]:
    """Returns the trials taken over whose learning and "both" knobs the space allows, as `recall` wrote them."""
    found = last(records, "reused")
    return [dict(t) for t in found["trials"] if _allowed(space, t["config"])] if found is not None else []


def best_of(ended: Sequence[Mapping[str, Any]], objectives: Mapping[str, Mode]) -> list[dict[str, Any]]:
    """Returns at most `FIRST` of the trials that ran to their end: what was picked last, then the front's, spread."""
    rows = {n: _row(trial, objectives) for n, trial in enumerate(ended) if trial["outcome"] == "ok"}
    whole = [ended[n] for n, row in rows.items() if np.isfinite(row).all()]
    if not whole:
        return []
    points = np.array([_row(trial, objectives) for trial in whole])
    on_front = front(points)
    picked = [i for i, trial in enumerate(whole) if trial.get("picked")][-1:]
    order = dict.fromkeys([*picked, *(int(i) for i in on_front[spread_order(points[on_front])])])
    return [dict(whole[i]) for i in list(order)[:FIRST]]


def refuted(
    ended: Sequence[Mapping[str, Any]],
    objective: str,
    mode: str,
    found: Mapping[str, float | None],
    before: Mapping[str, float | None],
) -> str:
    """Returns why earlier trials are not believed any more, "" where they are.

    `found` is what one of their best has come to here, `before` what it came to there: better than the middle of what
    was tried, it should not come out worse than that. One of the fast ones may have been worse there already.
    """
    said = [float(v) for t in ended if t["outcome"] == "ok" and (v := t["values"].get(objective)) is not None]
    now, then = found.get(objective), before.get(objective)
    if len(said) < ENOUGH or now is None or then is None:
        return ""
    sign, middle = (1.0 if mode == "min" else -1.0), statistics.median(said)
    if sign * now <= sign * middle or sign * then > sign * middle:
        return ""
    return (
        f"one of the best of earlier runs came to {objective} {now:.4g} here, {then:.4g} there, where the "
        f"middle of what they tried was {middle:.4g}: nothing that they learned is used any more"
    )


def _allowed(space: Space, config: Mapping[str, Scalar]) -> bool:
    full = Knobs.of(config).as_dict()
    fixed = all(full[n] == v for n, v in space.fixed.items() if kind_of(n) != "system")
    for name, parameter in space.parameters.items():
        if name not in config or kind_of(name) == "system":
            continue
        if not (config[name] in parameter if isinstance(parameter, Range) else config[name] in parameter.values):
            return False
    return fixed


def _trials(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns what trials came to in the search, and which of them were `picked` in the end.

    What they came to when they were confirmed is left out: the next run confirms on the same seeds, which are to be
    fresh to it.
    """
    pick = last(records, "pick")
    picked = {pick["best"]} if pick is not None else set()
    return [
        {
            "config": dict(trial.config),
            "outcome": trial.outcome,
            "values": dict(trial.values),
            "samples_per_s": trial.samples_per_s,
            "picked": trial.id in picked,
        }
        for trial in trials(records)
        if trial.outcome in ("ok", "stopped")
    ]


def _row(trial: Mapping[str, Any], objectives: Mapping[str, Mode]) -> Floats:
    found = {"samples_per_s": trial["samples_per_s"], **trial["values"]}
    return signed({name: found.get(name) for name in objectives}, objectives)
