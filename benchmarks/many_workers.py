"""What many workers cost: eight that train here against one at equal work, and a hundred that only pretend to.

    python -m benchmarks.many_workers --trials 160 --fake-trials 200 1000

**Overhead.** One study with `concurrency=1`, then one with 8 (by Ray), of the same seed, with random proposals in one
flat space and no pruner, so that both train the same configurations on as many samples. A step waits, as for a card:
eight that compute would wait for the cores of a small machine, and that would be measured. Where there are fewer cores
than slots the study is told that there are as many. A slot is a worker's process. The overhead of a trial is the time
from the end of the one before it in its slot (`returned_at`) to its own, less its `train_s` and `evaluate_s`: to
decide, write, propose, hand over, set up, and report at rungs. The first trial of a slot, which loads torch and data,
has none. `at best` is what was trained and evaluated, over the slots; `took` is from the first step of any trial to the
last end, slots that still load included. The median is of all trials, also of those that ran while other slots loaded
torch on the same cores; `loaded_ms` is that of the later ones alone.

**Decisions.** Scheduler, dispatcher, sampler, pruner and journal (on disk) as shipped, with 100 slots whose trials are
formulas. A loop without a pause takes trials until the slots are full, then has the next one report. A decision is a
proposal, an answer at a rung, or an end; the rate is all of them over the seconds of the loop.

Memory is the peak resident memory of the process that decides. Rows are appended to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.document import provenance
from benchmarks.fake_workers import peak_kib

ROOT = Path(__file__).parents[1]
MOST_MS, LEAST_PER_S = 50.0, 100.0
"""The bars: overhead of a trial in the median, and decisions a second."""
WAITING = '''
"""Moons whose steps wait as for a card."""
import time
from tests.data.mine import Moons


class Waiting(Moons):
    default_space = {"learning_rate": {"low": 1e-3, "high": 3e-2, "log": True}, "batch_size": [32]}

    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)


WORKLOAD = Waiting()
'''
STUDY = [
    *("workload=waiting.py", "name=one", "search.strategy=joint", "search.sampler=random", "search.pruner=none"),
    *("budget.train_epochs=1", "search.max_time=30m", "budget.confirm.window_s=0.05", "budget.confirm.seeds=1"),
]

LEADING = """
import sys
from tuning.search import endings
from tuning.workers import machine

endings._KEPT = (*endings._KEPT, "pid")
own = machine.cores
machine.cores = lambda *root: max({slots}, own(*root))
from tuning.run import main

sys.exit(main())
"""
"""`python -m tuning.run`, whose records name the process too, and which takes more slots than there are cores."""
FAKE = """
import cProfile, json, pstats, sys
from tuning.config.environment import algebra_on_one_thread

algebra_on_one_thread()
from benchmarks.fake_workers import decisions

profile = cProfile.Profile() if "profile" in sys.argv else None
found = decisions(int(sys.argv[1]), int(sys.argv[2]), profile)
if profile:
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
print(json.dumps(found))
"""
"""In a process of its own, which has loaded what the one that leads a study has, and no more."""


def decisions(trials: int, seed: int, profiled: bool) -> dict[str, Any]:
    """Returns what `benchmarks.fake_workers` finds."""
    command = [sys.executable, "-c", FAKE, str(trials), str(seed), *["profile"] * profiled]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def study(slots: int, trials: int, seed: int) -> dict[str, Any]:
    """Returns what a study with so many slots took, and its overheads."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "waiting.py").write_text(WAITING, encoding="utf-8")
        asked = [*STUDY, f"concurrency={slots}", f"search.trials={trials}", f"search.seed={seed}"]
        begun, most_kib = time.monotonic(), 0
        with (
            (folder / "said").open("w") as said,
            subprocess.Popen(
                [sys.executable, "-c", LEADING.format(slots=slots), *asked],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": temporary},
                stdout=said,
                stderr=said,
            ) as process,
        ):
            while process.poll() is None:
                most_kib = max(most_kib, peak_kib(process.pid))
                time.sleep(0.1)
        wall_s = time.monotonic() - begun
        if process.returncode:
            raise RuntimeError((folder / "said").read_text(encoding="utf-8")[-2000:])
        lines = (folder / "runs/waiting/one/trials.jsonl").read_text(encoding="utf-8").splitlines()
    ended = [r for r in map(json.loads, lines) if r["event"] == "trial"]
    took_s = [r["train_s"] + r["evaluate_s"] for r in ended]
    spans = (max(r["returned_at"] for r in ended) - min(r["first_step_at"] for r in ended), sum(took_s) / slots)
    found, later = overheads_ms(ended), overheads_ms(ended, after_loading=True)
    return {
        **{"slots": slots, "trials": len(ended), "outcomes": dict(Counter(r["outcome"] for r in ended))},
        **{"samples": sum(r["samples"] for r in ended), "rates": sorted(r["config"]["learning_rate"] for r in ended)},
        **{"median_ms": statistics.median(found), "mean_ms": statistics.fmean(found), "most_ms": max(found)},
        "loaded_ms": statistics.median(later) if later else None,
        "setup_ms": 1e3 * statistics.median(r["setup_s"] for r in ended),
        **{"trial_s": statistics.median(took_s), "took_s": spans[0], "at_best_s": spans[1], "wall_s": wall_s},
        "driver_mib": most_kib / 1024,
    }


def overheads_ms(ended: list[dict[str, Any]], *, after_loading: bool = False) -> list[float]:
    """Returns the overhead of each trial but the first of each slot, or of those after all first ones alone."""
    slots = [[r for r in ended if r["pid"] == pid] for pid in {r["pid"] for r in ended}]
    loaded_at = max(min(float(r["first_step_at"]) for r in own) for own in slots) if after_loading else 0.0
    pairs = [pair for own in slots for pair in itertools.pairwise(sorted(own, key=lambda r: float(r["returned_at"])))]
    return [
        1e3 * (b["returned_at"] - a["returned_at"] - b["train_s"] - b["evaluate_s"])
        for a, b in pairs
        if a["returned_at"] >= loaded_at
    ]


def main() -> int:
    """Measures what is asked for; returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 8], metavar="N", help="of trained trials  [1 8]")
    parser.add_argument("--trials", type=int, default=160, metavar="N", help="trained with each  [160]")
    parser.add_argument("--fake-trials", type=int, nargs="*", default=[200, 1000], metavar="N", help="[200 1000]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="says where the time of the decisions goes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "many_workers.jsonl")
    asked = parser.parse_args()
    about = {**provenance("many_workers"), "command": " ".join(sys.argv[1:]), "seed": asked.seed}
    lines, works, is_ok = list[str](), list[Any](), True

    def keep(part: str, row: dict[str, Any]) -> None:
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, "part": part, **row}) + "\n")

    for count in sorted(asked.fake_trials):
        row = decisions(count, asked.seed, asked.profile)
        keep("decisions", row)
        is_ok = is_ok and row["per_s"] >= LEAST_PER_S
        lines.append(f"{row['per_s']:.0f} decisions/s at 100 workers, {count} trials, {row['driver_mib']:.0f} MiB")
    for slots in asked.slots:
        row = study(slots, asked.trials, asked.seed)
        works.append((row["samples"], row.pop("rates")))
        keep("overhead", row)
        is_ok = is_ok and row["median_ms"] <= MOST_MS
        spent = f"took {row['took_s']:.1f} s, {row['at_best_s']:.1f} at best"
        lines.append(
            f"{row['median_ms']:.0f} ms a trial with {slots} workers (mean {row['mean_ms']:.0f}, set-up "
            f"{row['setup_ms']:.0f}), {spent}, {row['driver_mib']:.0f} MiB"
        )
    if any(work != works[0] for work in works):
        is_ok = False
        lines.append("the work was not equal")
    print("\n".join(["holds" if is_ok else "DOES NOT HOLD", *lines]))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
