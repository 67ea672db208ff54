"""Do cardtune's parts for Ray Tune keep OOMs away, and what do they find beside OptunaSearch with ASHA?

    python -m benchmarks.ray_parts --seeds 5 --out benchmarks/results/ray_parts.jsonl

The task is `tuning/examples/my_tune.py`: digits by a perceptron on an emulated card that a third of the space does not
fit. Both ways start so many trials at most, one at a time, with reused actors:
  parts   KnownSpeedSearcher with OomAwareScheduler
  tune    OptunaSearch over speed and accuracy with ASHA, today's config first; an OOM is raised, as in a plain script
The pick of each is the fastest trial that is as accurate as today's by the search's seed. It and today's config are
then trained on fresh seeds in turns, in this process. `unfit` are the cells of the space that are over the cap if one
epoch is trained without it. A line of the file is a way and seed; what it holds already is not run again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from benchmarks.document import provenance
from tuning.examples import my_tune as example
from tuning.ray import KnownSpeedSearcher, OomAwareScheduler, measured
from tuning.ray.training import StepMeter
from tuning.workers.ray_cluster import RayCluster

WAYS = ("parts", "tune")
MEASURE_S = 60.0
FRESH = (101, 102, 103)
SIZES = ("batch_size", "width", "depth")
Config = Mapping[str, Any]
my_tune: Any = example
"""Without types, as a user's file is."""


def plain(cap_bytes: int, config: dict[str, Any]) -> None:
    """Trains on the emulated card; an OOM is raised."""
    with StepMeter(cap_bytes, config["batch_size"]):
        my_tune.train(config)


class Seen(tune.Callback):
    """Every trial that Tune starts: its config, its last result, and whether its actor ended with an error."""

    def __init__(self) -> None:
        self.trials: dict[str, dict[str, Any]] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Takes the config."""
        self.trials[trial.trial_id] = {"config": dict(trial.config), "epochs": 0, "error": ""}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Takes a result; NaN is None."""
        told = {name: result.get(name) for name in ("accuracy", "samples_per_s", "outcome")}
        is_nan = isinstance(told["accuracy"], float) and math.isnan(told["accuracy"])
        told |= {"accuracy": None if is_nan else told["accuracy"], "epochs": result["training_iteration"]}
        self.trials[trial.trial_id] |= told

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Takes the error."""
        said = (
            Path(trial.error_file).read_text(encoding="utf-8").strip().splitlines()[-1] if trial.error_file else "lost"
        )
        self.trials[trial.trial_id]["error"] = said[-200:]


def searched(trainable: Any, trials: int, search: Any, scheduler: Any, folder: str) -> list[dict[str, Any]]:
    """Returns every trial that was started, by the Tuner that both ways have."""
    seen = Seen()
    asked: dict[str, Any] = {"num_samples": trials, "max_concurrent_trials": 1, "reuse_actors": True}
    tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(search_alg=search, scheduler=scheduler, **asked),
        run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[seen]),
    ).fit()
    return list(seen.trials.values())


def by_parts(seed: int, trials: int, folder: str) -> dict[str, Any]:
    """Returns what our parts started, refused and picked."""
    began = time.monotonic()
    trainable = measured(my_tune.train, metric="accuracy", cap_bytes=my_tune.CAP_BYTES)
    searcher = KnownSpeedSearcher(my_tune.SPACE, "accuracy", "max", reference=my_tune.TODAY, seed=seed)
    searcher.measure(trainable, limit_s=MEASURE_S)
    measured_s = time.monotonic() - began
    scheduler = OomAwareScheduler(searcher, max_t=my_tune.EPOCHS, grace_period=4)
    started = searched(trainable, trials, searcher, scheduler, folder)
    run, best = searcher.journal.run, searcher.best
    return {
        "trials": started,
        "pick": dict(best.config) if best else dict(my_tune.TODAY),
        "probes": len(run.probes),
        "probe_ooms": sum(probe.outcome == "oom" for probe in run.probes),
        "footprint_ooms": sum(bool(one.failed) for one in run.footprints),
        "refused": len(run.refused),
        "measured_s": measured_s,
        "stop_reason": searcher.stop_reason,
    }


def by_tune(seed: int, trials: int, folder: str) -> dict[str, Any]:
    """Returns what OptunaSearch with ASHA started, and the pick by our rule over what its trials reported."""
    search = OptunaSearch(
        dict(my_tune.SPACE),
        metric=["samples_per_s", "accuracy"],
        mode=["max", "max"],
        points_to_evaluate=[dict(my_tune.TODAY)],
        seed=seed,
    )
    asha = ASHAScheduler(metric="accuracy", mode="max", max_t=my_tune.EPOCHS, grace_period=4, reduction_factor=3)
    trainable = functools.partial(plain, my_tune.CAP_BYTES)
    started = searched(trainable, trials, search, asha, folder)
    whole = [one for one in started if one["epochs"] == my_tune.EPOCHS and one["samples_per_s"]]
    today = next((one for one in whole if one["config"] == my_tune.TODAY), None)
    good = [one for one in whole if today is not None and one["accuracy"] >= today["accuracy"]]
    pick = max(good, key=lambda one: one["samples_per_s"], default={"config": dict(my_tune.TODAY)})
    return {"trials": started, "pick": pick["config"]}


def cells() -> dict[tuple[Any, ...], int]:
    """Returns the peak bytes of one epoch of every cell of the space."""
    found, epochs = {}, my_tune.EPOCHS
    my_tune.EPOCHS = 1
    for cell in itertools.product(*(my_tune.SPACE[name].categories for name in SIZES)):
        with StepMeter(2**40) as meter, Unreported():
            my_tune.train({"lr": 1e-3, **dict(zip(SIZES, cell, strict=True))})
        found[cell] = meter.peak_bytes or 0
    my_tune.EPOCHS = epochs
    return found


class Unreported:
    """Takes the reports of a training in this process: `reported` has them."""

    def __enter__(self) -> Unreported:
        self.reported: list[float] = []
        self._before = my_tune.report
        my_tune.report = lambda metrics: self.reported.append(metrics["accuracy"])
        return self

    def __exit__(self, *_: object) -> None:
        my_tune.report = self._before


def confirmed(pick: Config) -> dict[str, Any]:
    """Returns gain in speed and accuracy of the pick over today's config, on fresh seeds in turns."""
    rows = []
    for seed in FRESH:
        row = {}
        for name, config in (("today", my_tune.TODAY), ("pick", pick)):
            with StepMeter(my_tune.CAP_BYTES, config["batch_size"]) as meter, Unreported() as told:
                my_tune.train({**config, "seed": seed})
            row[name] = (meter.samples_per_s or 0.0, told.reported[-1])
        rows.append(row)
    gains = [row["pick"][0] / row["today"][0] for row in rows]
    apart = [row["pick"][1] - row["today"][1] for row in rows]
    return {"rows": rows, "gain": statistics.geometric_mean(gains), "accuracy_apart": statistics.fmean(apart)}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the rows as lines of Markdown."""
    columns = (
        "seed | way | trials | actors that an OOM killed | unfit started | OOMs of probes | seconds | gain | accuracy"
    )
    lines = [f"| {columns} |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        probes = row.get("probe_ooms", 0) + row.get("footprint_ooms", 0) if row["way"] == "parts" else "none are run"
        ends = f"{row['confirmed']['gain']:.2f} | {row['confirmed']['accuracy_apart']:+.3f}"
        counts = f"{len(row['trials'])} | {row['oom_errors']} | {row['unfit_started']} | {probes} | {row['wall_s']:.0f}"
        lines.append(f"| {row['seed']} | `{row['way']}` | {counts} | {ends} |")
    return lines


def one_way(seed: int, way: str, trials: int, peaks: Mapping[tuple[Any, ...], int]) -> dict[str, Any]:
    """Returns the row of a way and seed."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = (by_parts if way == "parts" else by_tune)(seed, trials, folder)
        wall_s = time.monotonic() - began
    sizes = [tuple(one["config"][name] for name in SIZES) for one in found["trials"]]
    unfit = sum(peaks[size] > my_tune.CAP_BYTES for size in sizes)
    ooms = sum("memory" in one["error"].lower() for one in found["trials"])
    return {
        **found,
        "wall_s": wall_s,
        "oom_errors": ooms,
        "unfit_started": unfit,
        "confirmed": confirmed(found["pick"]),
    }


def main() -> None:
    """Runs what the file lacks, a row at a time; prints a table."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--trials", type=int, default=16, help="the most that a way starts with a seed")
    asked.add_argument("--out", type=Path, default=Path("ray_parts.jsonl"), help="goes on with what it holds")
    arguments = asked.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    peaks = cells()
    share = sum(peak > my_tune.CAP_BYTES for peak in peaks.values()) / len(peaks)
    print(f"{share:.1%} of {len(peaks)} cells do not fit", flush=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    with RayCluster(cores=2, gpus=0, dashboard=False):
        for seed, way in itertools.product(range(arguments.seeds), WAYS):
            if any((row["seed"], row["way"]) == (seed, way) for row in rows):
                continue
            about = {"seed": seed, "way": way, "most_trials": arguments.trials, "unfit_frac": share}
            row = {**about, **provenance("ray_parts"), **one_way(seed, way, arguments.trials, peaks)}
            rows.append(row)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(table([row])[-1], flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
