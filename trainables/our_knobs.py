"""The knobs of our workloads, as rows of the table: those that several share are here, the others in their modules.

A command line is checked before the modules are imported, which takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainables import knob_columns
from trainables.knob_columns import FLAG, Domain, Knob
from trainables.knobs import KnobTable

# fmt: off
ROWS: Mapping[str, Knob] = {
    "inplace_augmentation": Knob(
        False, "system", FLAG, "Augmentations write into the batch instead of making new tensors.",
        memory="minor", span="augment", claimed="E",
        remedies={"loader": lambda _, step: True if step.augment_frac >= 0.02 and not step.cuda else None},
    ),
    "hidden_size": Knob(
        128, "both", Domain(int, low=4, high=16_384), "Width of the network's hidden layers.", shapes_model=True,
        memory="group", span="compute", claimed="A D",
    ),
    "sequence_packing": Knob(
        False, "both", FLAG, "Compute on packed sequences, without their padding.", shapes_model=True,
        memory="group", span="compute", claimed="C, for later; E",
    ),
    "augmentation": Knob(
        1.0, "learning", Domain(float, low=0.0, high=2.0),
        "Strength of the augmentation, as a multiple of the workload's own; 0 is none.",
        memory="minor", span="augment", claimed="B E",
    ),
    "dropout": Knob(
        0.1, "learning", Domain(float, low=0.0, high=0.9), "Dropout of the layers the workload adds.",
        memory="minor", span="none", claimed="A",
        shapes_model=True,
    ),
}
# fmt: on
"""Every such row by the name of its knob."""


def our_knobs(*names: str) -> Mapping[str, Knob]:
    """Returns the rows of these names, as a workload of ours declares the knobs that it shares with another."""
    return {name: ROWS[name] for name in names}


_KNOBS = re.compile(r"^class (?:.|\n)*?^    knobs\b[^=\n]*= (.+(?:\n(?:     .*|    [\])}].*|))*)", re.MULTILINE)
"""What a class says its knobs are: a line, and those that are indented deeper or close a bracket of it."""

_HOOKS = re.compile(r"^    def (optimizer|schedule|parameter_groups)\(self", re.MULTILINE)
"""The methods of a class that are in the place of knobs or beside them (`KnobTable`)."""


def _declared(path: Path) -> Mapping[str, Knob]:
    """Returns the knobs that the workload in a module of ours declares, without importing it, which takes seconds.

    Raises TypeError for a wrong row, and where that needs more than the names of `knob_columns` and `our_knobs`.
    """
    if (found := _KNOBS.search(path.read_text(encoding="utf-8"))) is None:
        return {}
    try:
        return dict(eval(found[1], {**vars(knob_columns), "our_knobs": our_knobs}))  # noqa: S307  # ours
    except (AttributeError, KeyError, NameError, SyntaxError, TypeError, ValueError) as error:
        form = '{**our_knobs("dropout"), "turns": Knob(2, "both", values=(1, 2))}'
        raise TypeError(f"{path.name}: knobs = ...: expected {form}, and no other names: {error!r}") from None


OURS: Mapping[str, KnobTable] = {
    path.stem: KnobTable(_declared(path), hooks=_HOOKS.findall(path.read_text(encoding="utf-8")))
    for path in sorted((Path(__file__).parent / "workloads").glob("*.py"))
    if path.stem != "__init__"
}
"""The table of each of our workloads, by its name."""
BUILT_IN = tuple(OURS)


def _together(tables: Iterable[Mapping[str, Knob]]) -> dict[str, Knob]:
    """Returns all rows; raises TypeError where two of one name differ."""
    found: dict[str, Knob] = {}
    for name, row in (item for rows in tables for item in rows.items()):
        if found.setdefault(name, row).as_raw() != row.as_raw():
            said = "share one in our_knobs.ROWS, or give one another name"
            raise TypeError(f"two workloads have a knob {name} by different rows: {said}")
    return found


EVERY = KnobTable(_together([ROWS, *(rows.own for rows in OURS.values())]))
"""With all of them, as records and exports of earlier versions have, whatever their workload."""
