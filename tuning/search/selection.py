"""Which configuration is the answer by the search alone: the fastest that is as good as the reference by one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainables.knobs import Scalar
from tuning.config.choices import BEFORE
from tuning.config.lenient import finite, mapping
from tuning.config.space import Space
from tuning.journal.events import ProbeRecord, TrialRecord
from tuning.journal.run import History
from tuning.memory.groups import need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.oom import Outcome
from tuning.search.rule import Rule, absolute, best_baseline
from tuning.search.throughput import Speeds, fastest, group_of, inside, learned, probed


@dataclass(frozen=True)
class Pick:
    """Trials by id: the best by `rule`, the most accurate, and the front of quality and speed, fastest first."""

    best: str
    most_accurate: str
    front: tuple[str, ...]
    rule: str


def rule_of(run: History) -> Rule | None:
    """Returns what the study's record asks of the pick; None before that record.

    A tolerance such as "2%" is a share of the reference's quality.
    """
    study, reference = run.study, run.reference
    if study is None or not study.objectives:
        return None
    objective, mode = next(iter(study.objectives.items()))
    asked = mapping(study.setting("pick"))
    today = None if reference is None else reference.values.get(objective)
    return Rule(
        objective,
        mode,
        absolute(asked.get("tolerance") or 0.0, today),
        best_baseline(study.baselines, objective, mode),
        finite(asked.get("at_least")),
        "quality" if asked.get("goal") == "quality" else "speed",
    )


def fastest_probed(
    run: History,
    space: Space,
    guard: MemoryGuard,
    start: Mapping[str, Scalar],
    *,
    named: str = "",
) -> dict[str, Scalar] | None:
    """Returns `start` with the fastest system knobs that were probed and fit, None if nothing was or nothing fits.

    If `start` is the configuration of that name it stays as it is, unless a probe of it was slower or failed: a gain
    has to be measured. A micro-batch that ran out of memory is cut to one that fits; if that changes what is learned,
    or the user fixed it, there is no answer.
    """
    known = [p for p in probed(run.probes, space.table) if inside(space, p)]
    choice = fastest(Speeds(known, space.table), guard, start)
    asked = [p for p in run.probes if named and p.name == named and p.outcome != Outcome.CUT]
    own = [p.samples_per_s for p in asked if p.outcome == Outcome.OK and p.samples_per_s]
    if choice is None:
        return _fitting(space.complete(start), space, guard) if named and own else None
    stays = bool(named) and (own[-1] > choice.samples_per_s if own else not asked)
    return _fitting(space.complete(start if stays else {**start, **choice.system}), space, guard)


def _fitting(config: dict[str, Scalar], space: Space, guard: MemoryGuard) -> dict[str, Scalar] | None:
    """Returns the configuration with the micro-batch at which it may begin, None if there is none."""
    group, micro_batch = need_of(config, guard.table)
    may_be_cut = "micro_batch_size" in space.table.system and "micro_batch_size" not in space.fixed
    verdict = guard.judge(group, micro_batch, shrink=may_be_cut)
    if not verdict.fits:
        return None
    return config if verdict.micro_batch == micro_batch else {**config, "micro_batch_size": verdict.micro_batch}


def so_far(run: History) -> Pick | None:
    """Returns what an unfinished study would pick by its own rule; None if no trial has ended."""
    rule = rule_of(run)
    return None if rule is None else choose(run, rule)


def fastest_probe(run: History) -> ProbeRecord | None:
    """Returns the fastest probe that learns what the first does: it differs in system knobs alone. None without any.

    If `before` was probed, it is that with the fastest system knobs of its speed group.
    """
    own, table = [p for p in run.probes if not p.name and p.outcome == Outcome.OK], run.table
    alike = [p for p in own if learned(p.config, table) == learned(own[0].config, table)]
    before = next((p for p in reversed(run.probes) if p.name == BEFORE and probed([p], table)), None)
    if not own or before is None:
        return max(alike, key=lambda p: p.samples_per_s or 0.0, default=None)
    today, (first, *others) = before.config, probed([before, *own], table)
    group = [p for p in (first, *others) if group_of(p.knobs, table) == group_of(today, table)]
    choice = Speeds(group, table).ranked(today)[0]
    if choice.system != first.system(table):  # what was seen of `before` does not hold for it
        before = replace(before, message="", peak_allocated_bytes=None, spans={}, telemetry={}, active={})
    return replace(before, name="", config={**today, **choice.system}, samples_per_s=choice.samples_per_s)


def sets_its_seed(run: History) -> bool:
    """Returns whether what was trained again had the seed of the search: `train(run)` sets one itself."""
    seeds = {end.trial: end.active.get("seed") for end in run.ended}
    pairs = [(seeds.get(again.name), again.active.get("seed")) for again in run.confirmed]
    return any(searched is not None and searched == seed for searched, seed in pairs)


def choose(run: History, rule: Rule) -> Pick | None:
    """Returns the pick over the trials that ran to their end, by the search's seed; None if there is none.

    It is the fastest that is as good as the reference, else the most accurate; without a reference the most accurate.
    """
    ended, reference = [t for t in run.searched if t.outcome == Outcome.OK], run.reference
    if reference is None:
        return pick(ended, rule, None)
    return pick(ended, rule, reference.values.get(rule.objective), reference.samples_per_s or 0.0)


def leader(run: History) -> TrialRecord | None:
    """Returns the trial that would be picked now, None if there is none."""
    picked = so_far(run)
    return None if picked is None else run.trials[picked.best].end


def next_leader(run: History, known: TrialRecord | None, made: TrialRecord) -> TrialRecord | None:
    """Returns `leader` once one more trial has ended, if `known` was it before: two are compared, not thousands."""
    rule, reference = rule_of(run), run.reference
    if rule is None or reference is None or made.trial == reference.trial or run.trials[made.trial].is_beside:
        return leader(run)
    able = [end for end in (known, made) if end is not None and end.outcome == Outcome.OK]
    found = pick(able, rule, reference.values.get(rule.objective), reference.samples_per_s or 0.0)
    return next((end for end in able if found is not None and end.trial == found.best), None)


def pick(found: Sequence[TrialRecord], rule: Rule, today: float | None, today_per_s: float = 0.0) -> Pick | None:
    """Returns the pick over quality and speed by the rule; `today` is the reference's quality, None if not known.

    None if no trial has a finite quality and speed. Ties in speed go to the better quality, then to the earlier trial.
    """
    judged = [t for t in found if t.samples_per_s and t.values.get(rule.objective) is not None]
    if not judged:
        return None
    value = {t.trial: t.values[rule.objective] or 0.0 for t in judged}
    speed = {t.trial: t.samples_per_s or 0.0 for t in judged}
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
    said = f"the fastest of {len(judged)} trials with {rule.words}: {value[best]:.4g}"
    said += f" beside {today:.4g} of the reference" if today is not None else ""
    said += ", by one seed"
    return Pick(best=best, most_accurate=accurate, front=tuple(on_front), rule=said)
