"""What is trained in place of a trial that failed by something other than what it was to learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainables.knobs import Scalar
from tuning.config.space import Choice, Space
from tuning.journal.records import Journal, Record
from tuning.memory.oom import Outcome
from tuning.search.bottleneck import instead_of_fp16

LEARNED = (Outcome.OK, Outcome.STOPPED, Outcome.DIVERGED)
"""Outcomes that say something of what was to be learned."""


class Replacing:
    """Queues values of the searched `names`, each once: of trials whose type, micro-batch or tried knobs failed them.

    `fits` says whether a configuration fits, at a smaller micro-batch if need be; `told` hears of what is written.
    """

    def __init__(
        self,
        journal: Journal,
        space: Space,
        names: Sequence[str],
        fits: Callable[[Mapping[str, Scalar]], bool],
        told: Callable[[Record], None],
    ) -> None:
        self._journal, self._space, self._names, self._fits, self._told = journal, space, names, fits, told
        self._queue: list[dict[str, Scalar]] = []
        self._tries: set[str] = set()

    def begun(self, trial: str, *, tries: bool) -> None:
        """Takes a trial that is under way, and whether it tries system knobs."""
        if tries:
            self._tries.add(trial)

    def next(self) -> dict[str, Scalar] | None:
        """Returns what is to be trained now, None where nothing is."""
        return self._queue.pop(0) if self._queue else None

    def ended(self, record: Record) -> None:
        """Takes how a trial ended."""
        self._fp16(record)
        if record["outcome"] == Outcome.REFUSED:
            self._ruled_out(record)
        if record["outcome"] not in LEARNED and record["trial"] in self._tries:
            self._failed_try(record)

    def _fp16(self, record: Record) -> None:
        """Queues a trial that fp16 made diverge once more with another type, where the space has one; says so once."""
        parameter = self._space.parameters.get("amp_dtype")
        allowed = parameter.values if isinstance(parameter, Choice) else ()
        found = instead_of_fp16(str(record["outcome"]), record["config"], allowed)
        if found is None:
            return
        other, text = found
        if not any(r.event == "note" and r["text"] == text for r in self._journal.records):
            self._told(self._journal.append("note", text=text))
        values = self._searched({**record["config"], "amp_dtype": other})
        if other and not self._begun(values) and values not in self._queue:
            self._queue.append(values)

    def _ruled_out(self, record: Record) -> None:
        """Queues a trial that was ruled out once more where a smaller micro-batch of it fits."""
        if not self._fits(record["config"]):
            return
        values = self._searched(record["config"])
        over = [r for r in self._journal.records if r.event == "trial" and r["outcome"] == Outcome.REFUSED]
        if len(self._begun(values)) == sum(self._searched(r["config"]) == values for r in over):
            self._queue.append(values)

    def _failed_try(self, record: Record) -> None:
        """Queues a trial that failed with system knobs it tried once more, with the fastest that are known."""
        values = self._searched(record["config"])
        if values not in self._queue and all(r["trial"] == record["trial"] for r in self._begun(values)):
            self._queue.append(values)

    def _begun(self, values: Mapping[str, Scalar]) -> list[Record]:
        starts = (r for r in self._journal.records if r.event == "trial_start")
        return [r for r in starts if self._searched(r["config"]) == values]

    def _searched(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {n: v for n, v in knobs.items() if n in self._names}
