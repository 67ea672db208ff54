"""Traces what standard input asks for: one JSON request a line, and for each one JSON prediction a line of the output.

A request: {"workload", "options", "knobs", "kernels": "cuda" | "cpu", "capability": [8, 6]}. All requests of a process
are of the same kernels and the same capability.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

from tuning.memory.prediction import Prediction
from tuning.memory.tracing import shim


def main() -> int:
    """Returns 0 once every request is answered; what cannot be traced is an answer too."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    requests = [json.loads(line) for line in sys.stdin if line.strip()]
    note = ""
    if requests and requests[0]["kernels"] == "cuda":
        try:
            shim.load(shim.library(), tuple(requests[0]["capability"]))
        except shim.NoShim as error:
            note = f"the CPU's kernels were traced in the place of CUDA's: {error}"
    warnings.simplefilter("ignore")
    for request in requests:
        print(_answer(request, note).to_json(), file=out, flush=True)
    return 0


def _answer(request: dict[str, Any], note: str) -> Prediction:
    try:
        from tuning.memory.tracing import step  # imports torch: after the shim

        found = step.answer(request, fallback=bool(note))
    except Exception as error:
        return Prediction("none", (f"{type(error).__name__}: {error}",), ())
    if not note or found.confidence == "none":
        return found
    return Prediction("fallback", (note, *found.notes), found.traces)


if __name__ == "__main__":
    sys.exit(main())
