"""Which configuration is the answer: the fastest that gives up no more quality than allowed (`search.rule`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

FAR_FRAC = 0.1
"""Of the best quality seen: a pick that is worse by more gets a note, though the tolerance allows it."""


@dataclass(frozen=True)
class Pick:
    """Trials by id: the best by `rule`, the most accurate, and the front of quality and speed, fastest first."""

    best: str
    most_accurate: str
    front: tuple[str, ...]
    rule: str


def rule_of(records: Sequence[Record], tolerance: float | str) -> Rule | None:
    """Returns what is asked of the pick, the tolerance in the objective's own unit; None before the study's record.

    A tolerance such as "2%" is a share of the best quality that ended trials have.
    """
    study = last(records, "study")
    if study is None or not study.get("objectives"):
        return None
    objective, mode = next(iter(study["objectives"].items()))
    seen = [t.values.get(objective) for t in trials(records) if t.outcome == "ok"]
    own = absolute(tolerance, [value for value in seen if value is not None], mode)
    return Rule(objective, mode, own, best_baseline(study.get("baselines") or {}, objective, mode))


def fastest_probed(
    records: Sequence[Record],
    space: Space,
    guard: MemoryGuard,
    start: Mapping[str, Scalar],
    *,
    is_before: bool = False,
) -> dict[str, Scalar] | None:
    """Returns `start` with the fastest system knobs that were probed and fit, None where nothing was.

    Where `start` is `before` it stays as it is, unless a probe of it was slower, or failed: what was never compared is
    no gain.
    """
    choice = fastest(Speeds([p for p in probed(records) if inside(space, p)]), guard, start)
    asked = [r for r in records if r.event == "probe" and r.get("name") == BEFORE and r["outcome"] != Outcome.CUT]
    own = [r["samples_per_s"] for r in asked if r["outcome"] == Outcome.OK and r["samples_per_s"]]
    if choice is None:
        return space.complete(start) if is_before and own else None
    stays = is_before and (own[-1] > choice.samples_per_s if own else not asked)
    return space.complete(start) if stays else _fitting(space.complete({**start, **choice.system}), space, guard)


def _fitting(config: dict[str, Scalar], space: Space, guard: MemoryGuard) -> dict[str, Scalar]:
    """Returns the configuration with the micro-batch at which it may begin: `fastest` may mean a smaller one."""
    group, micro_batch = need_of(config)
    fits = guard.fitting(group, micro_batch)
    may_be_cut = "micro_batch_size" in table().system and "micro_batch_size" not in space.fixed
    return {**config, "micro_batch_size": fits} if may_be_cut and 0 < fits < micro_batch else config


def so_far(records: Sequence[Record]) -> Pick | None:
    """Returns what an unfinished study would pick by its own rule; None where no trial has ended."""
    study = last(records, "study")
    asked = mapping(mapping(study.get("config") if study is not None else None).get("pick"))
    rule = rule_of(records, asked.get("tolerance") or 0.0)
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


def choose(records: Sequence[Record], rule: Rule, without: Collection[str] = ()) -> Pick | None:
    """Returns the pick over the trials that ran to their end, or None where there is none.

    What failed when it was trained again, and the trials `without`, are left out, as long as something else is there.
    """
    beside = trained_beside(records)
    failed = {r["name"] for r in records if r.event == "confirmed" and r["outcome"] not in ("ok", Outcome.CUT)}
    ended = [t for t in trials(records) if t.outcome == "ok" and t.id not in beside]
    return pick(ended, rule, {*failed, *without})


def far_from_best(records: Sequence[Record], picked: Pick, rule: Rule) -> str:
    """Returns what to say of a pick that is within the tolerance and much worse than the best seen, else "".

    A tolerance of 0.01 is little of an accuracy, and all of an error of 0.01.
    """
    values = {t.id: finite(t.values.get(rule.objective)) for t in trials(records)}
    best, value = values[picked.most_accurate], values[picked.best]
    if best is None or value is None or abs(value - best) <= FAR_FRAC * abs(best):
        return ""
    return (
        f"{picked.best} is the fastest within pick.tolerance={rule.tolerance:g} of the best {rule.objective} seen, "
        f"which is wide: {value:.3g} for {best:.3g}; pick.tolerance=2% is a share of the best"
    )


def leader(records: Sequence[Record], tolerance: float | str) -> Trial | None:
    """Returns the trial that would be picked now, None where there is none."""
    rule = rule_of(records, tolerance)
    picked = None if rule is None else choose(records, rule)
    return None if picked is None else next(t for t in trials(records) if t.id == picked.best)


def pick(found: Sequence[Trial], rule: Rule, without: Collection[str] = ()) -> Pick | None:
    """Returns the pick over quality and speed by the rule, whose tolerance is in the objective's own unit.

    None where no trial has a finite quality and speed. Those `without` are left out, as long as something else is
    there. Of equally fast ones the better, then the earlier is taken.
    """
    judged = [t for t in found if finite(t.samples_per_s) and finite(t.values.get(rule.objective)) is not None]
    judged = [t for t in judged if t.id not in without] or judged
    if not judged:
        return None
    value = {t.id: float(t.values[rule.objective] or 0.0) for t in judged}
    speed = {t.id: float(t.samples_per_s or 0.0) for t in judged}
    cost = {name: rule.sign * own for name, own in value.items()}
    least = min(cost.values())
    best = min((name for name in cost if rule.admits(cost[name], least)), key=lambda n: (-speed[n], cost[n]))
    accurate = min(cost, key=lambda n: (cost[n], -speed[n]))
    on_front: list[str] = []
    for name in sorted(cost, key=lambda n: (-speed[n], cost[n])):
        last = on_front[-1] if on_front else name
        if cost[name] < cost[last] or (speed[name], cost[name]) == (speed[last], cost[last]):
            on_front.append(name)
    said = rule.words(cost[best], cost.values(), least, "the best seen")
    return Pick(
        best=best,
        most_accurate=accurate,
        front=tuple(on_front),
        rule=f"of {len(judged)} the fastest whose {rule.objective} is {said}: "
        f"{value[best]:.4g} against {value[accurate]:.4g}",
    )
