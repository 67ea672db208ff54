"""Which settings make an unedited program faster: each in a run of its own, then the best in turns with today's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tuning.config.errors import ConfigError
from tuning.outside.runs import Command, Look, Setting
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain, Pair

RUN_S = 1.5
"""Seconds of steps that a run counts."""
WAITS_FRAC = 0.03
"""A training that waits less for its data gains nothing from more loader processes."""
LEAST_GAIN = 1.02
"""What a setting has to gain in its one run to be tried in turns."""
TURNS_FRAC = 0.45
"""The share of the time that is kept for turns once something was faster, two rounds at least; before that, for one."""
LEAST_TURNS, MOST_ROUNDS = 2, 8
"""Rounds below which no interval is known, and the most that are measured."""
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


def options(today: Look, cores: int) -> list[Option]:
    """Returns what is worth a try, the most promising first."""
    found = list[Option]()
    loader, on_card = today.loader, bool(today.device)
    fewer = list[Option]()
    if loader is not None:
        waits, workers = today.share("waiting") >= WAITS_FRAC, loader.num_workers
        if not loader.is_stream and waits:
            counts = [n for n in (2, 4, 8, 1) if n <= cores and n != workers]
            many = [Option(f"num_workers={n}", {"num_workers": n, "persistent_workers": True}) for n in counts]
            found, fewer = many[:1], many[1:]
        if workers and not waits:
            found.append(Option("num_workers=0", {"num_workers": 0}))
        if workers and not loader.persistent_workers:
            found.append(Option("persistent_workers=True", {"persistent_workers": True}))
        if on_card and not loader.pin_memory:
            found.append(Option("pin_memory=True", {"pin_memory": True}))
    if any(o.able and not o.fused for o in today.optimizers) and today.share("optimizer") >= LEAST_GAIN - 1:
        found.append(Option("fused=True", {"fused": True}))
    if on_card:
        found += [Option("tf32", {"tf32": True}, True), Option("cudnn_benchmark", {"cudnn_benchmark": True})]
    elif today.threads > 1:
        found.append(Option("threads=1", {"threads": 1}))
    if today.model.has_images:
        found.append(Option(IMAGES, {IMAGES: True}))
    found += fewer
    if loader is not None and loader.is_batched and loader.batch_size:
        found.append(Option(f"batch_size={2 * loader.batch_size}", {"batch_size": 2 * loader.batch_size}, True))
    return found


def compare(program: Command, max_time_s: float, cores: int, told: Told) -> Compared:
    """Returns what makes the program faster, within `max_time_s` as far as one run of it takes less.

    Raises ConfigError if the program as it is cannot be measured.
    """
    return _Comparison(program, max_time_s, told).run(cores)


class _Comparison:
    """The runs of a program: as it is, once with each option, then in turns."""

    def __init__(self, program: Command, max_time_s: float, told: Told) -> None:
        self._program, self._max_time_s, self._told = program, max_time_s, told
        self._until = time.monotonic() + max_time_s
        self._today = program.look({}, None, RUN_S, max_time_s)
        told(UNCHANGED, self._today, "")
        self._found = Compared(self._today, {UNCHANGED: [self._today]}, {}, {})
        self._each_s = self._today.wall_s

    def run(self, cores: int) -> Compared:
        """Returns the answer."""
        for option in options(self._today, cores):
            if not self._has_time(option):
                break
            found = self._look(option)
            if found is not None and found.reread:
                files = ", ".join(found.reread[:3])
                why = f"it goes on from {files}, which an earlier run of it wrote; give it a switch that starts anew"
                return replace(self._found, refused=why)
        finalists = _finalists(self._found)
        left_s = self._until - time.monotonic()
        if left_s < LEAST_TURNS * (1 + len(finalists)) * self._each_s:
            finalists = finalists[-1:]  # what was itself measured, rather than more rounds than there is time for
        gains = self._turns(finalists)
        best = max(gains, key=lambda gain: gain.ratio, default=None)
        if best is None and finalists:  # a promise, no answer
            name = finalists[-1].name
            times = self._found.looks[name][0].per_s / self._today.per_s
            best = Gain(name, UNCHANGED, times, None, None, 0, "one run of each")
        is_sure = best is not None and best.ratio >= LEAST_GAIN and best.low is not None and best.low >= 1.0
        return replace(self._found, pick=self._found.options[best.of] if best and is_sure else None, gain=best)

    def _has_time(self, option: Option) -> bool:
        """Returns whether an option can be tried, and the turns have their time."""
        round_s = 2 * self._each_s
        turns_s = max(TURNS_FRAC * self._max_time_s, LEAST_TURNS * round_s) if _finalists(self._found) else round_s
        return time.monotonic() + self._each_s <= self._until - turns_s or len(self._found.looks) == 1

    def _look(self, option: Option) -> Look | None:
        """Returns what a run with the option showed, None if it failed."""
        self._found.options.setdefault(option.name, option)
        try:
            found = self._program.look(option.setting, self._number, RUN_S, max(10.0, self._until - time.monotonic()))
        except ConfigError as error:
            self._found.failed[option.name] = error.what
            self._told(option.name, None, error.what)
            return None
        self._found.looks.setdefault(option.name, []).append(found)
        self._told(option.name, found, "")
        self._each_s = statistics.median([self._each_s, found.wall_s])
        return found

    @property
    def _number(self) -> int | None:
        """Returns which of the loaders trains, by the order in which they are made."""
        return min(self._today.training) if self._today.training else None

    def _turns(self, finalists: Sequence[Option]) -> list[Gain]:
        """Returns the gains of the finalists over the program as it is, in rounds until the time is over."""
        pairs: dict[str, list[Pair]] = {}
        for number in range(MOST_ROUNDS if finalists else 0):
            if time.monotonic() + (1 + len(finalists)) * self._each_s > self._until:
                break
            order = [Option(UNCHANGED, {}), *finalists]
            seen = {one.name: self._look(one) for one in (order if number % 2 == 0 else reversed(order))}
            base = seen[UNCHANGED]
            for one in finalists:
                if base is not None and (own := seen[one.name]) is not None:
                    pair = Pair(own.per_s, base.per_s, min(base.measured_s, own.measured_s))
                    pairs.setdefault(one.name, []).append(pair)
        gains = [uncertainty.gain(name, UNCHANGED, rounds) for name, rounds in pairs.items()]
        return [gain for gain in gains if gain is not None]


def _finalists(found: Compared) -> list[Option]:
    """Returns what takes turns with the program as it is: all that was faster together, and the fastest alone."""
    able = [o for name, o in found.options.items() if name in found.looks and not o.learns_otherwise]
    speed = {option.name: found.looks[option.name][0].per_s for option in able}
    faster = sorted((n for n, own in speed.items() if own > LEAST_GAIN * found.today.per_s), key=lambda n: -speed[n])
    if not faster:
        return []
    together: dict[str, int | bool] = {}
    names = list[str]()
    for name in faster:
        setting = found.options[name].setting
        if not setting.keys() & together.keys():
            together.update(setting)
            names.append(name)
    first = found.options[faster[0]]
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
