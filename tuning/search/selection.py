"""Which configuration is the answer by the search alone: the fastest that is as good as the reference by one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainables.knobs import Scalar, table
from tuning.config.choices import available
from tuning.config.lenient import finite, mapping
from tuning.config.schema import BEFORE
from tuning.config.space import Space
from tuning.journal.records import Record, Trial, last, last_fields, trained_beside, trials
from tuning.memory.groups import need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.oom import Outcome
from tuning.search.rule import Rule, absolute, best_baseline
from tuning.search.throughput import Speeds, fastest, group_of, inside, probed


@dataclass(frozen=True)
class Pick:
    """Trials by id: the best by `rule`, the most accurate, and the front of quality and speed, fastest first."""

    best: str
    most_accurate: str
    front: tuple[str, ...]
    rule: str


def rule_of(records: Sequence[Record]) -> Rule | None:
    """Returns what the study's record asks of the pick; None before that record.

    A tolerance such as "2%" is a share of the reference's quality.
    """
    study = last(records, "study")
    if study is None or not study.get("objectives"):
        return None
    objective, mode = next(iter(study["objectives"].items()))
    asked, reference = mapping(mapping(study.get("config")).get("pick")), reference_of(records)
    today = None if reference is None else finite(reference.values.get(objective))
    return Rule(
        objective,
        mode,
        absolute(asked.get("tolerance") or 0.0, today),
        best_baseline(study.get("baselines") or {}, objective, mode),
        finite(asked.get("at_least")),
        "quality" if asked.get("goal") == "quality" else "speed",
    )


def reference_name(records: Sequence[Record]) -> str:
    """Returns the name of what the search trains as the reference, "" before it has begun."""
    return next((str(r["named"]) for r in records if r.event == "trial_start" and r.get("named")), "")


def reference_of(records: Sequence[Record]) -> Trial | None:
    """Returns the search's training of the reference, what is trained today; None unless it came to its end."""
    own = {r["trial"] for r in records if r.event == "trial_start" and r.get("named")}
    return next((t for t in trials(records) if t.id in own and t.outcome == Outcome.OK), None)


def fastest_probed(
    records: Sequence[Record],
    space: Space,
    guard: MemoryGuard,
    start: Mapping[str, Scalar],
    *,
    named: str = "",
) -> dict[str, Scalar] | None:
    """Returns `start` with the fastest system knobs that were probed and fit, None if nothing was.

    If `start` is the configuration of that name it stays as it is, unless a probe of it was slower, or failed: what was
    never compared is no gain.
    """
    choice = fastest(Speeds([p for p in probed(records) if inside(space, p)]), guard, start)
    asked = [r for r in records if r.event == "probe" and named and r.get("name") == named]
    asked = [r for r in asked if r["outcome"] != Outcome.CUT]
    own = [r["samples_per_s"] for r in asked if r["outcome"] == Outcome.OK and r["samples_per_s"]]
    if choice is None:
        return space.complete(start) if named and own else None
    stays = bool(named) and (own[-1] > choice.samples_per_s if own else not asked)
    return space.complete(start) if stays else _fitting(space.complete({**start, **choice.system}), space, guard)


def _fitting(config: dict[str, Scalar], space: Space, guard: MemoryGuard) -> dict[str, Scalar]:
    """Returns the configuration with the micro-batch at which it may begin: `fastest` may mean a smaller one."""
    group, micro_batch = need_of(config)
    fits = guard.fitting(group, micro_batch)
    may_be_cut = "micro_batch_size" in table().system and "micro_batch_size" not in space.fixed
    return {**config, "micro_batch_size": fits} if may_be_cut and 0 < fits < micro_batch else config


def so_far(records: Sequence[Record]) -> Pick | None:
    """Returns what an unfinished study would pick by its own rule; None if no trial has ended."""
    rule = rule_of(records)
    return None if rule is None else choose(records, rule)


def fastest_probe(records: Sequence[Record]) -> Record | None:
    """Returns the fastest probe that learns what the first does: it differs in system knobs alone. None without any.

    Of a file of the user's own it is the `before` that was probed, with the fastest system knobs of its speed group.
    """
    own = [r for r in records if r.event == "probe" and not r.get("name") and r.get("outcome") == Outcome.OK]
    alike = [r for r in own if _learned(mapping(r.get("config"))) == _learned(mapping(own[0].get("config")))]
    ref = mapping(mapping(last_fields(records, "study").get("config")).get("workload")).get("ref")
    before = next(
        (r for r in reversed(records) if r.event == "probe" and r.get("name") == BEFORE and _is_whole(r)), None
    )
    if not own or before is None or ref in available("workload"):
        return max(alike, key=lambda r: finite(r.get("samples_per_s")) or 0.0, default=None)
    today = before["config"]
    known = probed([before, *filter(_is_whole, own)])
    choice = Speeds([p for p in known if group_of(p.knobs) == group_of(today)]).ranked(today)[0]
    kept = before.fields if choice.system == known[0].system else {"outcome": Outcome.OK}
    found = {"name": None, "config": {**today, **choice.system}, "samples_per_s": choice.samples_per_s}
    return replace(before, fields={**kept, **found})


def _is_whole(probe: Record) -> bool:
    """Returns whether a probe has a speed, and its record all that tells of others."""
    figures = (finite(probe.get(name)) for name in ("samples_per_s", "micro_step_s", "optimizer_step_s"))
    return probe.get("outcome") == Outcome.OK and isinstance(probe.get("config"), Mapping) and None not in figures


def _learned(knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in knobs.items() if name not in table().system}


def sets_its_seed(records: Sequence[Record]) -> bool:
    """Returns whether what was trained again had the seed of the search: `train(run)` sets one itself."""
    seeds = {str(r.get("trial")): mapping(r.get("active")).get("seed") for r in records if r.event == "trial"}
    again = [(seeds.get(str(r.get("name"))), mapping(r.get("active"))) for r in records if r.event == "confirmed"]
    return any(searched is not None and searched == active.get("seed") for searched, active in again)


def choose(records: Sequence[Record], rule: Rule) -> Pick | None:
    """Returns the pick over the trials that ran to their end, by the search's seed; None if there is none.

    It is the fastest that is as good as the reference, else the most accurate; without a reference the most accurate.
    """
    beside, reference = trained_beside(records), reference_of(records)
    ended = [t for t in trials(records) if t.outcome == "ok" and t.id not in beside]
    today = None if reference is None else finite(reference.values.get(rule.objective))
    return pick(ended, rule, today, 0.0 if reference is None else float(reference.samples_per_s or 0.0))


def leader(records: Sequence[Record]) -> Trial | None:
    """Returns the trial that would be picked now, None if there is none."""
    picked = so_far(records)
    return None if picked is None else next(t for t in trials(records) if t.id == picked.best)


def pick(found: Sequence[Trial], rule: Rule, today: float | None, today_per_s: float = 0.0) -> Pick | None:
    """Returns the pick over quality and speed by the rule; `today` is the reference's quality, None if not known.

    None if no trial has a finite quality and speed. Of equally fast ones the better, then the earlier is taken.
    """
    judged = [t for t in found if finite(t.samples_per_s) and finite(t.values.get(rule.objective)) is not None]
    if not judged:
        return None
    value = {t.id: float(t.values[rule.objective] or 0.0) for t in judged}
    speed = {t.id: float(t.samples_per_s or 0.0) for t in judged}
    sign = -1.0 if rule.mode == "max" else 1.0
    accurate = min(value, key=lambda n: (sign * value[n], -speed[n]))
    floor = value[accurate] if today is None else today
    able = [n for n in value if rule.admits(rule.gain(value[n], floor))]
    able = [n for n in able if rule.beats_baseline(value[n])] or able
    if rule.goal == "quality":
        able = sorted((n for n in able if speed[n] >= today_per_s), key=lambda n: sign * value[n])[:1]
    best = min(able, key=lambda n: (-speed[n], sign * value[n]), default=accurate)
    on_front: list[str] = []
    for name in sorted(value, key=lambda n: (-speed[n], sign * value[n])):
        ahead = on_front[-1] if on_front else name
        is_equal = (speed[name], value[name]) == (speed[ahead], value[ahead])
        if sign * value[name] < sign * value[ahead] or is_equal:
            on_front.append(name)
    said = f"by one seed, of {len(judged)} the fastest with {rule.words}: {value[best]:.4g}"
    said += f", where the reference has {today:.4g}" if today is not None else ""
    return Pick(best=best, most_accurate=accurate, front=tuple(on_front), rule=said)
