"""What keeping freed memory buys on a CPU: whole trainings with it and without, in turns.

    python -m benchmarks.host_malloc benchmarks/results/best/nli.yaml --pairs 8 --samples 352

Each training is `python -m tuning train` in a process of its own; which goes first changes from pair to pair. The side
without has one of glibc's own settings in its environment, which `tuning.backends.host_memory` leaves alone. The gain
is the geometric mean of the pairs' ratios with its 95 % interval. The last line of stdout is one JSON document; nothing
is written unless --out names a file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from tuning.uncertainty import gain

SIDES = {"kept": {}, "given back": {"MALLOC_PERTURB_": "0"}}
"""What each side has in its environment; 0 is that setting's default."""


def training(best: Path, samples: int, environment: dict[str, str]) -> dict[str, Any]:
    """Returns samples a second, page faults and system seconds of one training in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            sys.executable,
            "-m",
            "tuning",
            "train",
            "--from",
            str(best),
            "--out",
            str(out),
            "--samples",
            str(samples),
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {
        "samples_per_s": result["samples_per_s"],
        "page_faults": after.ru_minflt - before.ru_minflt,
        "system_s": after.ru_stime - before.ru_stime,
    }


def main() -> None:
    """Measures, and prints the gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("best", type=Path, help="a best.yaml")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=352)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs}: 2 or more")
    pairs = []
    for number in range(asked.pairs):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        pairs.append({side: training(asked.best, asked.samples, SIDES[side]) for side in order})
        speeds = "  ".join(f"{side} {pairs[-1][side]['samples_per_s']:.1f}" for side in SIDES)
        print(f"{number + 1}/{asked.pairs}  {speeds} samples/s", file=sys.stderr)
    found = gain("kept", "given back", [tuple(pair[side]["samples_per_s"] for side in SIDES) for pair in pairs])
    document = {
        **provenance("host_malloc"),
        "best": asked.best.name,
        "samples": asked.samples,
        "gain": asdict(found) if found else None,
        "pairs": pairs,
    }
    publish(document, asked.out)


if __name__ == "__main__":
    main()
