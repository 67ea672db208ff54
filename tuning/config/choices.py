"""The names that a setting can have, and their lines of the help. Imports nothing slow: `--help` is to come at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Literal

BEFORE, PLAIN = "before", "plain defaults"
"""Names of configurations: the user's current settings; PyTorch's defaults.

Gains are over `before`, or over the plain defaults if it is not given.
"""
SamplerName = Literal["known", "tpe", "random"]
Goal = Literal["speed", "quality"]
PrunerName = Literal["reference", "none"]

PRUNERS: Mapping[PrunerName, str] = {
    "reference": "who is behind the reference by then",
    "none": "no trial",
}
"""Which trials are pruned at the budget's rungs; the rules themselves are `RULES` in `search/pruner.py`."""


def available(group: str) -> tuple[str, ...]:
    """Returns the files of `search_spaces/<group>/` without their ending, such as the cards for "card"."""
    folder = resources.files("search_spaces") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))
