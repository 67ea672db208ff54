"""What was measured on another kind of device than the target's: events `elsewhere`, that nobody takes for its own.

A speed or a peak of another kind is in no `probe`, `footprint` or `trial` of the journal: who asks for those means the
target. `OfKind` is the journal as that kind's stages have it.
"""

from __future__ import annotations

from typing import Any

from tuning.journal.records import Journal, Record

ELSEWHERE = "elsewhere"
_OF_THE_STUDY = ("study", "kinds", "resume", "trial_start")


class OfKind(Journal):
    """The journal of one kind: what it writes is `elsewhere`, what it reads is of that kind, and of the study.

    A trial that ran there has its own system knobs, bytes and speed, which its record keeps in `ran`.
    """

    def __init__(self, journal: Journal, kind: str) -> None:
        self.path, self.warnings = journal.path, journal.warnings
        self._journal, self.kind = journal, kind

    @property
    def records(self) -> list[Record]:
        """What is known of the kind, in the order of the lines."""
        return [own for record in self._journal.records if (own := self._own(record)) is not None]

    def append(self, event: str, /, **fields: Any) -> Record:
        """Returns the record as the kind's stages have it, once it is on disk."""
        written = self._journal.append(ELSEWHERE, of=event, kind=self.kind, **fields)
        return Record(written.seq, written.t, event, {**fields, "kind": self.kind}, written.mono)

    def close(self) -> None:
        """Leaves the journal to who opened it."""

    def _own(self, record: Record) -> Record | None:
        event, fields = record.event, record.fields
        if event in _OF_THE_STUDY:
            return record
        if record.get("kind") != self.kind:
            return None
        if event == ELSEWHERE:
            event = str(record["of"])
        elif event == "trial":
            fields = {**fields, **(record.get("ran") or {})}
        else:
            return None
        return Record(record.seq, record.t, event, fields, record.mono)
