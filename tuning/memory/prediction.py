"""Knowledge of a step's memory before it runs: its traces, and the peak at any micro-batch size that follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from tuning.memory.peaks import alone, peak_of
from tuning.memory.symbolic import between
from tuning.memory.trace import Peak, Trace

Confidence = Literal["traced", "workspaces modelled", "workspaces unseen", "fallback", "none"]
"""How far to trust a prediction.

traced: every kernel is visible. workspaces modelled: convolutions, whose workspaces follow a model of cuDNN's choices.
workspaces unseen: RNNs, whose workspaces the dispatcher does not show.
fallback: no compiler, so CPU kernels were traced in the place of CUDA's. none: it cannot be traced, and only trials can
tell; the prediction's `notes` say why.
"""


@dataclass(frozen=True)
class Prediction:
    """The facts known of a step before it runs: one trace or two in rising order, which give every other size."""

    confidence: Confidence
    notes: tuple[str, ...]
    traces: tuple[Trace, ...]

    def trace(self, micro_batch: int) -> Trace | None:
        """Returns the trace at a micro-batch size; None where it can be neither looked up nor derived.

        It is derived from two traces whose births are the same. Raises ValueError for a size below 1.
        """
        if micro_batch < 1:
            raise ValueError(f"expected a micro-batch of 1 sample or more, got {micro_batch}")
        for known in self.traces:
            if known.micro_batch == micro_batch:
                return known
        return between(*self.traces, micro_batch) if len(self.traces) == 2 else None

    def peak(self, micro_batch: int) -> Peak | None:
        """Returns the peak at a micro-batch size; None where `trace` is.

        Half a second to seconds for the log of a large model, on first use for each size.
        """
        if micro_batch not in self._peaks:
            trace = self.trace(micro_batch)
            self._peaks[micro_batch] = None if trace is None else peak_of(trace)
        return self._peaks[micro_batch]

    def alone(self) -> Prediction:
        """Returns the prediction for batches of one micro-step, which hold no gradients of others."""
        return replace(self, traces=tuple(map(alone, self.traces)))

    @cached_property
    def _peaks(self) -> dict[int, Peak | None]:
        return {}

    def to_json(self) -> str:
        """Returns it as compact JSON, some 10 bytes an event."""
        raw = {"confidence": self.confidence, "notes": self.notes, "traces": [_packed(t) for t in self.traces]}
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        """Returns the prediction that `to_json` wrote; raises ValueError where the text is not one."""
        try:
            raw = json.loads(text)
            traces = tuple(_unpacked(t) for t in raw["traces"])
            return cls(raw["confidence"], tuple(raw["notes"]), traces)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"not a prediction: {type(error).__name__} {error}") from None


def _packed(trace: Trace) -> dict[str, object]:
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
