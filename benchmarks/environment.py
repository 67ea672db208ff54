"""What variables of the environment buy on this machine: whole trainings with them and without, in turns.

    python -m benchmarks.environment benchmarks/results/best/*.yaml --over GOMP_SPINCOUNT=1000
    python -m benchmarks.environment benchmarks/results/best/*.yaml --over MALLOC_PERTURB_=0

Each training is `python -m tuning train` in a process of its own, with what --set adds over the same with what --over
adds; which goes first changes from pair to pair. MALLOC_PERTURB_=0 is one of glibc's own settings at its default, so
that its malloc is left as it is. The gain is the geometric mean of the pairs' ratios of samples/s with its 95 %
interval; beside it the page faults, the system's seconds and the most that a process held of the host's memory. One
JSON document a file; nothing is written unless --out names a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from tuning.stats.uncertainty import gain


def training(best: Path, samples: int | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the speed of one training in a fresh process, and what the system counted of it.

    Raises RuntimeError with its last words where it fails.
    """
    command = [sys.executable, "-m", "tuning", "train", "--from", str(best), "--json"]
    command += [] if samples is None else ["--samples", str(samples)]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        process = subprocess.Popen(
            [*command, "--out", f"{folder}/train"], stdout=out, stderr=err, env={**os.environ, **environment}
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{best} ended with {process.returncode}: {err.read()[-2000:]}")
        rate = json.load(out)["samples_per_s"]
    return {
        "samples_per_s": rate,
        "page_faults": used.ru_minflt,
        "system_s": used.ru_stime,
        "host_peak_mib": used.ru_maxrss / 1024,
    }


def measured(best: Path, samples: int | None, pairs: int, sides: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Returns the pairs of one file and their gain; `sides` are two environments by name, the first over the second."""
    found: list[dict[str, Any]] = []
    for number in range(pairs):
        order = list(sides)[:: 1 if number % 2 == 0 else -1]
        found.append({side: training(best, samples, sides[side]) for side in order})
        speeds = "  ".join(f"{side} {found[-1][side]['samples_per_s']:.1f}" for side in sides)
        print(f"{best.stem} {number + 1}/{pairs}  {speeds} samples/s", file=sys.stderr)
    one, other = sides
    own = gain(one, other, [(pair[one]["samples_per_s"], pair[other]["samples_per_s"]) for pair in found])
    medians = {
        side: {name: statistics.median(pair[side][name] for pair in found) for name in found[0][side]} for side in sides
    }
    return {
        **provenance("environment"),
        "best": best.name,
        "samples": samples,
        "sides": sides,
        "gain": asdict(own) if own else None,
        "medians": medians,
        "pairs": found,
    }


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def main() -> None:
    """Measures, prints a gain a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("best", type=Path, nargs="+", help="best.yaml files")
    parser.add_argument("--set", type=_variable, nargs="+", default=[], metavar="NAME=VALUE", help="of the one side")
    parser.add_argument("--over", type=_variable, nargs="+", default=[], metavar="NAME=VALUE", help="of the other side")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--samples", type=int, help="of each training  [what the file says]")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs}: 2 or more")
    sides = {" ".join("=".join(p) for p in side) or "as it is": dict(side) for side in (asked.set, asked.over)}
    if len(sides) < 2:
        parser.error("both sides are alike: --set or --over says in what they differ")
    for best in asked.best:
        one = measured(best, asked.samples, asked.pairs, sides)
        publish(one, asked.out, append=True)
        own, medians = one["gain"], one["medians"]
        told = "; ".join(
            f"{side}: {m['page_faults']:,.0f} page faults, system {m['system_s']:.1f} s, {m['host_peak_mib']:,.0f} MiB"
            for side, m in medians.items()
        )
        print(f"{best.stem}: {own['ratio']:.3f} ({own['low']:.3f} to {own['high']:.3f})  {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
