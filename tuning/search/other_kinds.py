"""Another kind of device than the target: which trials fit there, and with which system knobs they train there.

A trial there buys quality alone: system knobs do not change what is learned, and its speed is that of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.knobs import Scalar, table
from tuning.config.cards import Card, refuse
from tuning.config.space import Space
from tuning.journal.device_kinds import OfKind
from tuning.memory.groups import learn, need_of, peaks_are_whole
from tuning.memory.guard import FitVerdict, MemoryGuard
from tuning.search import endings
from tuning.search.throughput import Speeds, fastest, inside, probed

PATIENCE = 4
"""So many trials may wait for a kind that they fit; until one of them begins, no other is proposed for this kind."""
_OF_THE_DEVICE = ("measured_samples_per_s", "peak_allocated_bytes", "cap_bytes", "spans", "telemetry", "active")
"""Of a trial's result, what tells of the device that it ran on."""


class OtherKind:
    """What is known of one kind: its memory by `guard`, its speeds by its own probes; `card` says what it can do."""

    def __init__(self, journal: OfKind, space: Space, guard: MemoryGuard, card: Card, *, shrink: bool) -> None:
        self.name, self.journal, self.guard = journal.kind, journal, guard
        self._space, self._card, self._shrink = space, card, shrink
        self._speeds = Speeds([p for p in probed(journal.records) if inside(space, p)])
        self._whole_peaks = peaks_are_whole(journal.records)
        self._barred: set[str] = set()

    def fits(self, trial: str, config: Mapping[str, Scalar]) -> bool:
        """Returns whether a trial, configured for the target, may begin here."""
        learned = {n: v for n, v in config.items() if n not in table().system}
        return trial not in self._barred and refuse(self._card, learned) is None and self._placed(config)[1].fits

    def applied(self, config: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], int | None]:
        """Returns the target's configuration with the system knobs that suit this kind, and its predicted bytes."""
        knobs, verdict = self._placed(config)
        return verdict.applied(knobs), verdict.predicted_bytes

    def judged(self, knobs: Mapping[str, Scalar]) -> FitVerdict:
        """Returns whether knobs fit here; the micro-batch is halved where that changes nothing learned."""
        return self.guard.judge(*need_of(knobs), shrink=self._shrink and "micro_batch_size" in table().system)

    def learn(self, ran: Mapping[str, Scalar], found: Mapping[str, Any]) -> None:
        """Takes how a trial ended here, with the knobs that it ran with."""
        learn(self.guard, ran, found, whole=self._whole_peaks)

    def leave(self, trial: str, ran: Mapping[str, Scalar], found: Mapping[str, Any]) -> None:
        """Takes that a trial does not fit here after all: it is for another kind."""
        if found["outcome"] in endings.OVER_MEMORY:
            self.journal.append("oom", trial=trial, config=dict(ran), **endings.why(found))
            self.learn(ran, found)
        self.bar(trial)

    def bar(self, trial: str) -> None:
        """Takes that a trial is not to begin here again."""
        self._barred.add(trial)

    def _placed(self, config: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], FitVerdict]:
        asked = {n: v for n, v in config.items() if n not in table().system}
        found = fastest(self._speeds, self.guard, self._space.complete(asked))
        system = found.system if found is not None else {n: v for n, v in config.items() if n in table().system}
        knobs = self._space.complete({**asked, **system})
        return knobs, self.judged(knobs)


def apart(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what of a trial's result is of the trial, and what is of the device that it ran on."""
    device = {name: found[name] for name in _OF_THE_DEVICE if name in found}
    return {name: value for name, value in found.items() if name not in device}, device
