"""Virtual cards by the files of `search_spaces/card`, what the device can honour, and a workload's own YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.place import GIB_BYTES, MIB_BYTES, Place
from trainables.knobs import NAMES, Scalar
from tuning.config import yaml_files
from tuning.config.cards import AMP_DTYPES, Card, honoured

CARDS = ("rtx4060", "rtx3090")
SMALL_CARDS = {"32 MiB": 32 * MIB_BYTES, "96 MiB": 96 * MIB_BYTES}
"""What stands in for a card of 8 and of 24 GB where the same is run small."""
SMALL_WORKERS = 2
"""Most processes of a loader there: starting eight takes longer than all else that is measured."""


def caps(place: Place) -> dict[str, int]:
    """Returns the bytes that tensors may take on a card of 8 GB and on one of 24 GB; small ones on a CPU."""
    if place.small:
        return dict(SMALL_CARDS)
    found = {}
    for name in CARDS:
        (_, raw), *_ = [pair for pair in yaml_files.of_groups({"card": name}) if "card" in pair[1]]
        found[name] = round((raw["card"]["memory_gib"] - raw["card"]["reserve_gib"]) * GIB_BYTES)
    return found


def this(place: Place) -> Card:
    """Returns the device as a card."""
    if place.small:
        return Card("cpu", None, 0, None, ("fp32", "bf16"), "cpu")
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    dtypes = AMP_DTYPES if capability >= (8, 0) else ("fp32", "fp16")
    return Card(properties.name, properties.total_memory, 0, capability, dtypes, "cuda")


@dataclass(frozen=True)
class Described:
    """What `search_spaces/workload` says of a workload: its options, its two named configurations, what is claimed.

    `factor` is the first "N x" of the claim, by which `after` is said to be faster; `searched` are the values of knobs
    in the file's order; `left_out` are sentences on what the device cannot honour.
    """

    options: Mapping[str, Any]
    before: Mapping[str, Scalar]
    after: Mapping[str, Scalar]
    claims: str
    factor: float | None
    claims_of: Mapping[str, str]
    searched: Mapping[str, tuple[Scalar, ...]]
    left_out: tuple[str, ...]


def described(workload: str, card: Card) -> Described:
    """Returns a workload's description, with what the card cannot honour left out."""
    tree = next(raw for source, raw in yaml_files.of_groups({"workload": workload}) if f"/{workload}." in source)
    named = tree["named"]
    before, first = honoured(card, named["before"], "before")
    after, second = honoured(card, named["after"], "after")
    if card.device == "cpu":
        for knobs in (before, after):
            knobs["num_workers"] = min(int(knobs.get("num_workers", 0)), SMALL_WORKERS)
    searched: dict[str, tuple[Scalar, ...]] = {}
    for name, values in tree["knobs"].items():
        if name in NAMES and isinstance(values, list):
            kept = tuple(v for v in values if not honoured(card, {name: v}, "searched")[1])
            searched |= {name: kept} if len(kept) > 1 else {}
    claims = str(named.get("claims", ""))
    return Described(
        tree["workload"],
        before,
        after,
        claims,
        factor_of(claims),
        named.get("claims_of", {}),
        searched,
        (*first, *second),
    )


def factor_of(claims: str) -> float | None:
    """Returns the first "N x" of a claim as a number, of "N-Mx" the lower; None where there is none."""
    found = re.search(r"(\d+(?:\.\d+)?)(?:-\d+(?:\.\d+)?)?x\b", claims)
    return float(found[1]) if found else None
