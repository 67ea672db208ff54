"""Whether search.max_time is held to: whole studies from the command line.

    python -m benchmarks.time_limits --limits 30 120 240 600 --workload nli
    python -m benchmarks.time_limits --busy 1            # beside a process that takes one core

A run is over its limit by its wall time, from the start of the process to its end, less search.max_time. The bar is 5 %
of the limit or 10 s, whichever is more. Rows are appended to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps so many processes computing inside the block."""
    code = f"import os, signal\nwhile os.getppid() == {os.getpid()}: sum(i * i for i in range(100_000))"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def study(arguments: Sequence[str], limit_s: float, grace_s: float) -> dict[str, Any]:
    """Returns wall seconds, exit code, and how the trials of a study ended; it is killed `grace_s` after its limit."""
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tuning.run", *arguments, f"search.max_time={limit_s:g}s", "name=one"]
        begun = time.monotonic()
        with subprocess.Popen(
            command, cwd=temporary, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=limit_s + grace_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                out, err = process.communicate()
        wall_s = time.monotonic() - begun
        journals = list(Path(temporary).glob("runs/*/one/trials.jsonl"))
        records = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    ends = Counter(r["outcome"] for r in records if r["event"] in ("trial", "confirmed"))
    return {
        "limit_s": limit_s,
        "wall_s": round(wall_s, 1),
        "over_s": round(wall_s - limit_s, 1),
        "held": wall_s - limit_s <= max(0.05 * limit_s, 10.0),
        "exit": process.returncode,
        "trials": dict(ends),
        "said": (out if process.returncode == 0 else err)[-200:],
    }


def main() -> int:
    """Runs the studies and prints a line for each; returns 1 where one was over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="nli")
    parser.add_argument("--limits", type=float, nargs="*", default=[], metavar="S")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the study  [0]")
    parser.add_argument("--slots", default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "time_limits.jsonl")
    asked = parser.parse_args()
    arguments = [f"workload={asked.workload}", f"concurrency={asked.slots}"]
    found = []
    with busy(asked.busy):
        for limit_s in asked.limits:
            known = {"what": asked.workload, "busy": asked.busy, "slots": asked.slots}
            row = {**known, **study(arguments, limit_s, grace_s=120.0)}
            found.append(row)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({n: v for n, v in row.items() if n != "said"}), flush=True)
    return 0 if all(row["held"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
