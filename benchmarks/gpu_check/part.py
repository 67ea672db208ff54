"""Runs one part in this process and writes its document; started by `python -m benchmarks.gpu_check`.

python -m benchmarks.gpu_check.part memory --device cpu --out FOLDER
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.place import OutOfTime, Place, revision, write


def parser() -> argparse.ArgumentParser:
    """Returns the arguments."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("part")
    made.add_argument("--device", choices=("cuda", "cpu"), required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--revision", default="")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--seconds", type=float, default=540.0)
    made.add_argument("--again", action="store_true")
    return made


def main() -> int:
    """Returns 0 once the document is written, also where it says that the part failed."""
    asked = parser().parse_args()
    warnings.simplefilter("ignore")
    place = Place(asked.device, asked.out, asked.revision or revision(), asked.seed, asked.again, limit_s=asked.seconds)
    began = time.perf_counter()
    found: dict[str, Any] = {}
    error = ""
    try:
        found = importlib.import_module(f"benchmarks.gpu_check.{asked.part}").run(place)
    except OutOfTime:
        found = {"finished": False}
    except Exception as failed:  # the other parts go on, and the table says why this one did not
        traceback.print_exc(file=sys.stderr)
        error = f"{type(failed).__name__}: {failed}"
    write(place.document(asked.part), document(asked.part, place, found, error, time.perf_counter() - began))
    return 0


def document(part: str, place: Place, found: dict[str, Any], error: str, seconds: float) -> dict[str, Any]:
    """Returns a part's result with where it comes from; `error` is empty where it did not fail."""
    # By name and late, like the part: processes that predict import this module, and are to do so without torch.
    provenance = importlib.import_module("benchmarks.document").provenance
    return {
        **provenance(f"gpu_check {part}", place.device),
        "part": part,
        "revision": place.revision,
        "seed": place.seed,
        "seconds": round(seconds, 1),
        "finished": not error and bool(found.get("finished", True)),
        "error": error,
        "found": found,
    }


if __name__ == "__main__":
    sys.exit(main())
