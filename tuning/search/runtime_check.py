"""Asked and seen: the knobs of a configuration beside what its first optimiser step was seen to run.

Pure: it reads the `active` of a record (`trainables.witness.Witness.facts`) with the readers of the knob table. A knob
without a reader (learning rate, warm-up, a workload's own) has no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.knob_columns import Seen, word
from trainables.knobs import KnobTable
from tuning.journal.events import Config


@dataclass(frozen=True)
class Row:
    """A knob as asked and as seen; `agrees` is None where the step could not show it either way."""

    knob: str
    asked: str
    seen: str
    agrees: bool | None


def compare(config: Config, active: Seen, table: KnobTable) -> list[Row]:
    """Returns a row for each knob of the configuration that can be read back; none for a run without a first step."""
    rows = []
    for name, asked in config.items() if active else ():
        reader = table[name].seen if name in table else None
        if reader is None or not table.is_active(name, config):
            continue
        try:
            found = reader(asked, active)
        except (KeyError, TypeError, ValueError, AttributeError):  # a step that did not come to its end
            continue
        if found is not None:
            rows.append(Row(name, word(asked), *found))
    return rows


def disagreements(config: Config, active: Seen, table: KnobTable) -> list[str]:
    """Returns a sentence for each knob that was not honoured; the same one whenever the same is seen."""
    return [
        f"{row.knob}={row.asked} was set, but the first step showed {row.seen}"
        for row in compare(config, active, table)
        if row.agrees is False
    ]
