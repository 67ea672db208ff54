"""Which settings make an unedited program faster: each in a run of its own, then the best in turns with today's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tuning.config.errors import ConfigError
from tuning.outside.runs import Look, Program, Setting
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Pair

RUN_S = 1.5
"""Seconds of steps that a run counts."""
WAITS_FRAC = 0.03
"""A training that waits less for its data gains nothing from more loader processes."""
LEAST_GAIN = 1.02
"""What a setting has to gain in its one run to be tried in turns."""
TURNS_FRAC = 0.45
"""The share of the time that is kept for turns, once something was faster; before that it is that of one round."""
MOST_ROUNDS = 8
IMAGES = "channels_last"
UNCHANGED = "as it is"
Told = Callable[[str, Look | None, str], None]
"""Hears of each run: its name, what it showed, or why it failed."""


@dataclass(frozen=True)
class Option:
    """Settings that may be faster, under a name; `learns_otherwise` if they may change what is learned."""

    name: str
    setting: Setting
    learns_otherwise: bool = False


@dataclass(frozen=True)
class Compared:
    """The program as it is, every run by name, what failed and why, and the fastest in turns.

    `pick` is None if the 95 % interval of no gain is above 1; `gain` is that of the fastest. `refused` says why nothing
    can be compared.
    """

    today: Look
    looks: dict[str, list[Look]]
    failed: dict[str, str]
    options: dict[str, Option]
    pick: Option | None = None
    gain: Gain | None = None
    refused: str = ""
    notes: list[str] = field(default_factory=list)


def options(today: Look, cores: int) -> list[Option]:
    """Returns what is worth a try, the most promising first."""
    found = list[Option]()
    loader, on_card = today.loader, bool(today.device)
    if loader is not None:
        waits, workers = today.share("waiting") >= WAITS_FRAC, loader.num_workers
        if not loader.is_stream and waits:
            counts = [n for n in (2, 4, 1, 8) if n <= cores and n != workers]
            found += [Option(f"num_workers={n}", {"num_workers": n, "persistent_workers": True}) for n in counts]
        if workers and not waits:
            found.append(Option("num_workers=0", {"num_workers": 0}))
        if workers and not loader.persistent_workers:
            found.append(Option("persistent_workers=True", {"persistent_workers": True}))
        if on_card and not loader.pin_memory:
            found.append(Option("pin_memory=True", {"pin_memory": True}))
    if any(o.able and not o.fused for o in today.optimizers):
        found.append(Option("fused=True", {"fused": True}))
    if on_card:
        found += [Option("tf32", {"tf32": True}, True), Option("cudnn_benchmark", {"cudnn_benchmark": True})]
    elif today.threads > 1:
        found.append(Option("threads=1", {"threads": 1}))
    if today.model.has_images:
        found.append(Option(IMAGES, {IMAGES: True}))
    if loader is not None and loader.is_batched and loader.batch_size:
        found.append(Option(f"batch_size={2 * loader.batch_size}", {"batch_size": 2 * loader.batch_size}, True))
    return found


def compare(program: Program, max_time_s: float, cores: int, told: Told) -> Compared:
    """Returns what makes the program faster, within `max_time_s` as far as one run of it takes less.

    Raises ConfigError if the program as it is cannot be measured.
    """
    until = time.monotonic() + max_time_s
    today = program.look({}, None, RUN_S, max_time_s)
    told(UNCHANGED, today, "")
    answer = Compared(today, {UNCHANGED: [today]}, {}, {})
    number = min(today.training) if today.training else None

    def look(option: Option) -> Look | None:
        left_s = max(5.0, until - time.monotonic() + 5.0)
        try:
            found = program.look(option.setting, number, RUN_S, left_s)
        except ConfigError as error:
            answer.failed[option.name] = error.what
            told(option.name, None, error.what)
            return None
        answer.looks.setdefault(option.name, []).append(found)
        told(option.name, found, "")
        return found

    as_it_is = Option(UNCHANGED, {})
    tried, each_s = list[Option](), today.wall_s
    for option in options(today, cores):
        turns_s = TURNS_FRAC * max_time_s if _finalists(answer, tried) else 2 * each_s
        if time.monotonic() + each_s > until - turns_s and len(answer.looks) > 1:
            break
        answer.options[option.name] = option
        found = look(option)
        if found is not None and found.reread:
            files = ", ".join(found.reread[:3])
            why = f"it goes on from {files}, which an earlier run of it wrote; give it a switch that starts anew"
            return Compared(today, answer.looks, answer.failed, answer.options, refused=why)
        if found is not None:
            tried.append(option)
            each_s = statistics.median([each_s, found.wall_s])
    finalists = _finalists(answer, tried)
    answer.options.update({one.name: one for one in finalists})
    rounds: dict[str, list[Pair]] = {}
    number_of_round = 0
    while finalists and number_of_round < MOST_ROUNDS:
        if time.monotonic() + (1 + len(finalists)) * each_s > until:
            break
        order = [as_it_is, *finalists] if number_of_round % 2 == 0 else [*finalists, as_it_is]
        seen = {one.name: look(one) for one in order}
        base = seen[UNCHANGED]
        for one in finalists:
            if base is not None and (own := seen[one.name]) is not None and base.per_s and own.per_s:
                seconds = min(base.measured_s, own.measured_s)
                rounds.setdefault(one.name, []).append(Pair(own.per_s, base.per_s, seconds))
        number_of_round += 1
    gains = {name: uncertainty.gain(name, UNCHANGED, pairs) for name, pairs in rounds.items()}
    best = max((g for g in gains.values() if g is not None), key=lambda g: g.ratio, default=None)
    if not rounds and finalists:  # a promise, no answer: one run of each is too little to go by
        name = finalists[-1].name
        best = Gain(name, UNCHANGED, answer.looks[name][0].per_s / today.per_s, None, None, 0, "one run of each")
        return Compared(today, answer.looks, answer.failed, answer.options, gain=best)
    if best is None or best.ratio < LEAST_GAIN or best.low is None or best.low < 1.0:
        return Compared(today, answer.looks, answer.failed, answer.options, gain=best)
    return Compared(today, answer.looks, answer.failed, answer.options, answer.options[best.of], best)


def _finalists(answer: Compared, tried: Sequence[Option]) -> list[Option]:
    """Returns what takes turns with the program as it is: all that was faster together, and the fastest alone."""
    speed = {one.name: answer.looks[one.name][-1].per_s for one in tried if not one.learns_otherwise}
    today_per_s = answer.today.per_s
    faster = sorted((n for n, own in speed.items() if own > LEAST_GAIN * today_per_s), key=lambda n: -speed[n])
    if not faster:
        return []
    together: dict[str, int | bool] = {}
    names = list[str]()
    for name in faster:
        setting = answer.options[name].setting
        if not setting.keys() & together.keys():
            together.update(setting)
            names.append(name)
    first = answer.options[faster[0]]
    return [first] if len(names) == 1 else [Option(" ".join(names), together), first]


def growth_bytes(look: Look) -> float:
    """Returns by how many bytes what is held grows with a step, 0 unless the growth is steady and at least 2 %."""
    points = look.memory
    if len(points) < 4 or points[-1][1] < 1.02 * points[0][1]:
        return 0.0
    steps, held = zip(*points, strict=True)
    slope, _ = statistics.linear_regression(steps, held)
    fits = statistics.correlation(steps, held) > 0.9 if len(set(held)) > 1 else False
    return slope if fits and math.isfinite(slope) else 0.0
