"""The names that a setting chooses among, and what the help says of them. No pydantic: the help comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Strategy = Literal["staged", "joint"]
SamplerName = Literal["model", "tpe", "gp", "random"]
PrunerName = Literal["rungs", "none"]

PRUNERS: Mapping[PrunerName, str] = {
    "rungs": "who is worse, unless nothing as fast is better",
    "none": "nobody",
}
"""Who stops at the budget's rungs; the rules themselves are `RULES` in `search/pruner.py`."""
