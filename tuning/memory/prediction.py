"""What a training step needs of a card's memory: traces of its storages, and the peaks that follow from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

Event = tuple[int, int]
"""(storage id, bytes): it is born; (storage id, -1): it dies."""

Confidence = Literal["traced", "workspaces unseen", "fallback", "none"]
"""How far to trust a prediction.

traced: every kernel is visible. workspaces unseen: RNN and convolution, whose workspaces the dispatcher does not show.
fallback: no compiler, so CPU kernels were traced in the place of CUDA's. none: it cannot be traced, and only trials can
tell; the prediction's `notes` say why.
"""

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer", "activation", "temporary", "workspace", "batch")
PHASES = ("setup", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Trace:
    """The storages of one training step at one micro-batch size, in the order in which they are born and die.

    `categories` names each storage's (`CATEGORIES`); `marks` are (index into events, phase from there on), phases of
    `PHASES`; `ops` names the operator of each birth, in the order of the births.
    """

    micro_batch: int
    events: tuple[Event, ...]
    categories: Mapping[int, str]
    marks: tuple[tuple[int, str], ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The peak of a step at one micro-batch size, in bytes.

    `live_bytes`: the sum of the storages. `allocated_bytes`, `reserved_bytes`: what torch.cuda.max_memory_allocated()
    and max_memory_reserved() would say of the native allocator; `expandable_bytes`: reserved with expandable segments.
    `capacity_bytes`: the smallest card, context not counted, on which the step does not run out of memory.
    `breakdown`: category -> bytes at the peak; `phase` and `operator`: where it is.
    """

    micro_batch: int
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    expandable_bytes: int
    capacity_bytes: int
    breakdown: Mapping[str, int]
    phase: str
    operator: str


@dataclass(frozen=True)
class Prediction:
    """What is known of a step without running it: one trace or two, which give every other micro-batch size.

    `seconds` is what the tracing took.
    """

    confidence: Confidence
    notes: tuple[str, ...]
    traces: tuple[Trace, ...]
    seconds: float

    def to_json(self) -> str:
        """Returns it as compact JSON, some 10 bytes an event."""
        own = {"confidence": self.confidence, "notes": self.notes, "seconds": self.seconds}
        return json.dumps({**own, "traces": [_packed(t) for t in self.traces]}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        """Returns the prediction that `to_json` wrote; raises ValueError where the text is not one."""
        try:
            raw = json.loads(text)
            traces = tuple(_unpacked(t) for t in raw["traces"])
            return cls(raw["confidence"], tuple(raw["notes"]), traces, float(raw["seconds"]))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not a prediction: {type(error).__name__} {error}") from None


def _packed(trace: Trace) -> dict[str, Any]:
    """Returns a trace as plain lists: events flat, operators and categories as indices into lists of names."""
    ops = list(dict.fromkeys(trace.ops))
    kinds = list(dict.fromkeys(trace.categories.values()))
    of_op, of_kind = ({name: i for i, name in enumerate(names)} for names in (ops, kinds))
    return {
        "micro_batch": trace.micro_batch,
        "events": list(chain.from_iterable(trace.events)),
        "op_names": ops,
        "ops": [of_op[name] for name in trace.ops],
        "kinds": kinds,
        "categories": list(chain.from_iterable((i, of_kind[k]) for i, k in trace.categories.items())),
        "marks": trace.marks,
    }


def _unpacked(raw: Mapping[str, Any]) -> Trace:
    flat, kinds, pairs = raw["events"], raw["kinds"], raw["categories"]
    return Trace(
        int(raw["micro_batch"]),
        tuple(zip(flat[::2], flat[1::2], strict=True)),
        {i: kinds[k] for i, k in zip(pairs[::2], pairs[1::2], strict=True)},
        tuple((int(at), str(phase)) for at, phase in raw["marks"]),
        tuple(raw["op_names"][i] for i in raw["ops"]),
    )
