"""What variables of the environment buy on this machine: whole trainings with them and without, in turns.

    python -m benchmarks.environment benchmarks/results/best/*.yaml --over GOMP_SPINCOUNT=1000
    python -m benchmarks.environment benchmarks/results/best/nli.yaml --over MALLOC_PERTURB_=0 --pairs 8 --samples 352

Each training is `python -m tuning train` in a process of its own, as it is (with what --set adds) over the same with
what --over adds; which goes first changes from pair to pair. MALLOC_PERTURB_=0 is one of glibc's own settings at its
default. The gain is the geometric mean of the pairs' ratios of samples/s with its 95 % interval. One JSON document a
file; nothing is written unless --out names a file.
"""

from __future__ import annotations

import argparse
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from benchmarks.fresh import trained
from tuning.stats.uncertainty import gain


def training(best: Path, samples: int | None, environment: dict[str, str]) -> dict[str, Any]:
    """Returns samples a second, page faults and system seconds of one training in a fresh process."""
    arguments = ["-m", "tuning", "train", "--from", str(best)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = trained([*arguments, *([] if samples is None else ["--samples", str(samples)])], environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "samples_per_s": result["samples_per_s"],
        "page_faults": after.ru_minflt - before.ru_minflt,
        "system_s": after.ru_stime - before.ru_stime,
    }


def measured(best: Path, samples: int | None, pairs: int, sides: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Returns the pairs of one file and their gain; `sides` are two environments by name, the first over the second."""
    found = []
    for number in range(pairs):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        found.append({side: training(best, samples, sides[side]) for side in order})
        speeds = "  ".join(f"{side} {found[-1][side]['samples_per_s']:.1f}" for side in sides)
        print(f"{best.stem} {number + 1}/{pairs}  {speeds} samples/s", file=sys.stderr)
    one, other = sides
    own = gain(one, other, [(pair[one]["samples_per_s"], pair[other]["samples_per_s"]) for pair in found])
    return {
        **provenance("environment"),
        "best": best.name,
        "samples": samples,
        "sides": sides,
        "gain": asdict(own) if own else None,
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
        own = one["gain"]
        print(f"{best.stem}: {own['ratio']:.3f} ({own['low']:.3f} to {own['high']:.3f})", file=sys.stderr)


if __name__ == "__main__":
    main()
