"""Virtual cards by the files of `search_spaces/card`."""

from __future__ import annotations

import torch

from benchmarks.gpu_check.place import GIB_BYTES, MIB_BYTES, Place
from tuning.config import yaml_files

CARDS = ("rtx4060", "rtx3090")
SMALL_CARDS = {"8 MiB": 8 * MIB_BYTES, "24 MiB": 24 * MIB_BYTES}
"""What stands in for a card of 8 and of 24 GB where the same is run small."""


def caps(place: Place, free_bytes: int) -> dict[str, int]:
    """Returns the bytes that tensors may take on a card of 8 GB and on one of 24 GB; small ones on a CPU.

    Without those that the card at hand, of which so many are free, cannot be held to.
    """
    if place.small:
        return dict(SMALL_CARDS)
    found = {}
    for name in CARDS:
        (_, raw), *_ = [pair for pair in yaml_files.of_groups({"card": name}) if "card" in pair[1]]
        found[name] = round((raw["card"]["memory_gib"] - raw["card"]["reserve_gib"]) * GIB_BYTES)
    return {name: cap_bytes for name, cap_bytes in found.items() if cap_bytes <= free_bytes}


def free_bytes(place: Place) -> int:
    """Returns what of the card's memory nobody else holds; 0 on a CPU."""
    return 0 if place.small else int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
