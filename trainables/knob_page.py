"""The tables of docs/knobs.md, made from the table of knobs:

python -m trainables.knob_page docs/knobs.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainables.knob_columns import CALLS, Knob, word
from trainables.knobs import OF_THE_LOOP
from trainables.our_knobs import EVERY, OURS

_WHERE: Mapping[str | None, str] = {
    "loader": "training waits for samples",
    "augment": "augmentation takes time",
    "transfer": "copies to the device take time",
    "launch": "kernels are many and small",
    "compute": "forward and backward take the time",
    "optimizer": "the optimiser's step takes time",
    "memory": "memory is short",
}
"""By `Span` and `Bound`: when a knob can help, in words."""


def renewed(page: str) -> str:
    """Returns the page with the rows of its two tables made anew."""
    tables = iter((OF_THE_LOOP, EVERY.own))
    return re.sub(r"(\|---\|\n)(?:\| .*\n)*", lambda found: found[1] + _lines(next(tables)), page)


def _lines(rows: Mapping[str, Knob]) -> str:
    return "".join(f"| {' | '.join(_cells(name, row))} |\n" for name, row in rows.items())


def _cells(name: str, row: Knob) -> Iterator[str]:
    yield f"`{name}`"
    whose = [ref for ref, rows in OURS.items() if name in rows.own] or row.acts_in
    by_hand = f" By hand: {row.by_hand}." if row.by_hand else ""
    yield f"{row.doc}{by_hand} ({', '.join(f'`{module}`' for module in whose)})"
    yield row.kind
    others = [word(v) for v in row.domain.values if v != row.default]
    yield f"**{word(row.default)}**, {', '.join(others) if others else row.domain.describe()}"
    needs = [row.requires.words] if row.requires else []
    for rule in row.rules:
        whole = set(rule.values) >= {v for v in row.domain.values if v != row.default}
        needs.append(rule.needs if whole else f"{rule.needs} for {' and '.join(map(word, rule.values))}")
    yield "; ".join(needs) or "-"
    yield "; ".join(_WHERE[part] for part in dict.fromkeys((row.span, *row.remedies)) if part in _WHERE) or "-"
    yield str(row.memory)
    yield "no" if row.seen is None else "yes"
    call = "any loop" if row.asked_by == "around" else CALLS[row.asked_by]
    parts = (f"`{part.partition('(')[0]}`" if part.startswith("run.") else part for part in call.split(" and "))
    yield " and ".join(parts) or "-"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(renewed(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
