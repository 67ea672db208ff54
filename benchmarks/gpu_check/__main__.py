"""What is true on the card at hand: predicted memory, virtual cards, recovery from OOMs, whole studies.

    make gpu-check
    python -m benchmarks.gpu_check memory cap --out results
    python -m benchmarks.gpu_check --device cpu          # the same code, small, in two minutes

Parts: memory, cap, and search (which needs Ray, Optuna and what makes a report). Each runs in a process of its own and
writes one .json; the minutes, ten with what starting takes, are shared out among the parts that are left. What a part
has measured when its share is over is kept, and the next run goes on from there. A part whose .json is there for the
same sources is not run again without --again. A table comes last, and gpu_check.json, which has all of it, to be sent.
Exit code: 0 where all that was measured meets its bar, 1 where something does not, 2 where a part failed or is not
finished.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.place import ROOT, OutOfTime, Place, read, revision, write
from benchmarks.gpu_check.table import table
from benchmarks.gpu_check.verdicts import exit_code

PARTS: Mapping[str, tuple[str, ...]] = {
    "memory": ("peft", "transformers"),
    "cap": ("peft", "transformers"),
    "search": ("ray", "optuna", "pydantic", "matplotlib", "rich", "jinja2"),
}
"""Every part in the order in which they run, and the packages without which it is skipped."""
MINUTES = 9.0
GRACE_S = 20.0
"""A part is ended where it runs on so long after its share of the minutes."""
ALL = "gpu_check.json"


def parser() -> argparse.ArgumentParser:
    """Returns the arguments."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("parts", nargs="*", metavar="PART", help=f"{' '.join(PARTS)}  [all]")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder  [runs/gpu_check]")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"of all parts together  [{MINUTES:g}]")
    made.add_argument("--again", action="store_true", help="measure anew what is there")
    made.add_argument("--part", nargs=3, metavar=("PART", "REVISION", "SECONDS"), help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    made = parser()
    asked = made.parse_args(argv)
    if asked.part:  # as `run` starts it
        name, sources, seconds = asked.part
        measure(Place(asked.device, asked.out, sources, asked.seed, asked.again, float(seconds)), name)
        return 0
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown:
        made.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if not 0 < asked.minutes < math.inf:
        made.error(f"--minutes {asked.minutes:g}: more than 0, {MINUTES:g} as it is")
    if asked.seed < 0:
        made.error(f"--seed {asked.seed}: 0 or more")
    if not (folder := next(p for p in (asked.out, *asked.out.resolve().parents) if p.exists())).is_dir():
        made.error(f"--out {asked.out}: {folder} is a file; name a folder")
    place = Place(asked.device, asked.out.resolve(), revision(), asked.seed, asked.again, asked.minutes * 60.0)
    if asked.device == "cuda" and not has_card():
        print("torch sees no CUDA device here; --device cpu runs the same code, small", file=sys.stderr)
        return 2
    names, until = list(asked.parts or PARTS), time.monotonic() + place.limit_s
    for number, name in enumerate(names):
        document = read(place.document(name))
        if document is not None and settled(document, place):
            print(f"{name}: measured already, {place.document(name)}", file=sys.stderr)
            continue
        missing = [package for package in PARTS[name] if importlib.util.find_spec(package) is None]
        if missing:
            skip(place, name, f"not installed: {', '.join(missing)}")
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        run(replace(place, limit_s=max(1.0, until - time.monotonic()) / (len(names) - number)), name)
    documents = [found for name in PARTS if (found := read(place.document(name))) is not None]
    print("\n".join(table(documents, place.revision)))
    write(place.out / ALL, {"revision": place.revision, "parts": documents})
    print(f"all of it, to be sent: {place.out / ALL}", file=sys.stderr)
    return exit_code(documents)


def has_card() -> bool:
    """Returns whether torch can use a CUDA device, asked in a process of its own, which keeps no context."""
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asks], check=False).returncode == 0


def settled(document: Mapping[str, Any], place: Place) -> bool:
    """Returns whether a document stands: of these sources and this seed, whole, and not to be made again."""
    same = document.get("revision") == place.revision and document.get("seed") == place.seed
    return same and bool(document.get("finished")) and not place.again


def skip(place: Place, name: str, why: str) -> None:
    """Writes the document of a part that was not run."""
    print(f"{name}: skipped, {why}", file=sys.stderr)
    write(place.document(name), _without_figures(place, name) | {"skipped": why})


def run(place: Place, name: str) -> None:
    """Runs a part in a process of its own; one that ends without a document gets one that says so."""
    path = place.document(name)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, place.revision, str(place.limit_s)]
    command += ["--device", place.device, "--out", str(place.out), "--seed", str(place.seed)]
    command += ["--again"] if place.again else []
    try:
        code = subprocess.run(command, timeout=place.limit_s + GRACE_S, check=False, cwd=ROOT).returncode
        why = f"its process ended with exit code {code}"
    except subprocess.TimeoutExpired:
        why = f"stopped {GRACE_S:.0f} s after its minutes were over"
    if not path.exists():
        write(path, _without_figures(place, name) | {"error": why})


def measure(place: Place, name: str) -> None:
    """Runs a part in this process and writes its document, which says so where the part failed."""
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    found: dict[str, Any] = {}
    error = ""
    try:
        found = importlib.import_module(f"benchmarks.gpu_check.{name}").run(place)
    except OutOfTime:
        found = {"finished": False}
    except Exception as failed:  # the other parts go on, and the table says why this one did not
        traceback.print_exc(file=sys.stderr)
        error = f"{type(failed).__name__}: {failed}"
    from benchmarks.document import provenance  # loads torch, as the process that starts the parts does not

    document = {
        **provenance(f"gpu_check {name}", place.device),
        "part": name,
        "revision": place.revision,
        "seed": place.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "finished": not error and bool(found.get("finished", True)),
        "error": error,
        "found": found,
    }
    write(place.document(name), document)


def _without_figures(place: Place, name: str) -> dict[str, Any]:
    return {
        "part": name,
        "revision": place.revision,
        "seed": place.seed,
        "device": {"type": place.device},
        "finished": False,
        "found": {},
    }


if __name__ == "__main__":
    sys.exit(main())
