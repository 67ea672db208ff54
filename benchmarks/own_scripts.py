"""What a search buys trainings that were not made for it: scripts as people write them, tuned as people would.

    python -m benchmarks.own_scripts --time 180
    python -m benchmarks.own_scripts --names unet_loop gru_contract --extra card=auto card.memory_gib=0.0125

`benchmarks/scripts/NAME_script.py` is a plain script, `NAME_loop.py` the same with its loop driven by `run`, and
`NAME_contract.py` imports it and declares it by the contract. A row has the lines that differ (of a loop those above
SPACE, without those that only moved), and what a search of `--time` seconds found: quality of `before` and the pick,
speed over `before`, trials by their outcome, and what was found to change what is learned. One JSON line each.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import provenance

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if not path.stem.endswith("_script"))


def changed(plain: str, own: str) -> dict[str, int]:
    """Returns how many lines are new above SPACE and how many of the plain script are gone, moved ones left out."""
    ours, theirs = own.split("\nSPACE")[0].splitlines(), plain.split('\nif __name__ == "__main__"')[0].splitlines()
    signs = {"+": "new", "-": "gone"}
    kept = {"new": {line.strip() for line in theirs}, "gone": {line.strip() for line in ours}}
    found = {"new": 0, "gone": 0}
    for line in difflib.ndiff(theirs, ours):
        side, text = signs.get(line[0]), line[2:].strip()
        if side and text and not text.startswith('"""') and text not in kept[side]:
            found[side] += 1
    return found


def study(name: str, time_s: float, seed: int, extra: Sequence[str]) -> dict[str, Any]:
    """Returns what a search found, as `python -m tuning show --json` has it, in the words of a row."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{folder}/cache"}
        asked = [f"workload={SCRIPTS / name}.py", f"search.max_time={time_s:g}s", f"search.seed={seed}", *extra]
        shared: Any = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "check": False}
        done = subprocess.run([sys.executable, "-m", "tuning.run", *asked, "name=one"], **shared)
        if done.returncode:
            return {"exit": done.returncode, "why": done.stderr[-1500:]}
        shown = subprocess.run([sys.executable, "-m", "tuning", "show", "one", "--json"], **shared)
        found = json.loads(shown.stdout)
    named, gains = found["named"], {gain["over"]: gain for gain in found["gains"] if gain["of"] == "best"}
    return {
        "exit": 0,
        "trials": found["trial_counts"],
        "probes": found["probe_counts"],
        "gain": gains.get("before"),
        "knobs": named["best"]["config"],
        "says": named["best"].get("says"),
        "quality": {n: named[n]["quality"] for n in ("before", "best") if n in named},
        "notes": found["notes"],
    }


def main() -> int:
    """Prints one JSON line a script, and appends it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--time", type=float, default=180.0, metavar="S", help="wall seconds of a search  [180]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", nargs="*", default=[], metavar="KEY=VALUE", help="for every search")
    parser.add_argument("--lines", action="store_true", help="count lines alone")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    for name in asked.names:
        base, _, way = name.rpartition("_")
        own = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
        plain = (SCRIPTS / f"{base}_script.py").read_text(encoding="utf-8")
        lines = changed(plain, own) if way == "loop" else {"file": len(own.splitlines())}
        row: dict[str, Any] = {"script": base, "way": way, "lines": lines}
        if not asked.lines:
            row |= {"time_s": asked.time, "seed": asked.seed, "extra": asked.extra, **provenance("own_scripts")}
            row |= study(name, asked.time, asked.seed, asked.extra)
        line = json.dumps(row)
        print(line, flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
