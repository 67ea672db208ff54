"""python -m tuning ablate ID [knobs.NAME=VALUE ...]: what each knob is worth, measured in turns on the machine at hand.

The windows are kept beside the run's records in `ablation.jsonl`; what that holds already is not measured again.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainables.knobs import Scalar
from tuning.cli.replies import AblateReply, as_line
from tuning.cli.runs import with_id
from tuning.cli.terminal import console, line, show
from tuning.config.cards import Card, restrict
from tuning.config.choices import PLAIN
from tuning.config.command_line import parse, value_of
from tuning.config.errors import ConfigError, NoUsableTrial
from tuning.config.resolve import parse_named
from tuning.config.schema import ConfirmSection
from tuning.config.shareable import is_masked
from tuning.config.space import Space
from tuning.journal.events import AblationRecord, Event
from tuning.journal.records import Journal, read, writer_of
from tuning.journal.run import History
from tuning.journal.runs import ABLATION, JOURNAL, find_run, require_known
from tuning.report import export, report, summary, text
from tuning.report.summary import Summary
from tuning.search import ablation
from tuning.search.confirm import measure_windows, windows_s
from tuning.search.optuna_study import importances_of
from tuning.workers import machine, nvml
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; raises NoUsableTrial for a run without a best, ConfigError for values out of range."""
    does = "Times the best with and without each of its knobs, and the reference likewise; the timings alternate."
    made = with_id("ablate", does)
    said = "knobs that the best has otherwise, such as knobs.compile=default: each is timed at the best, too"
    made.add_argument("settings", nargs="*", metavar="knobs.NAME=VALUE", help=said)
    made.add_argument("--rounds", type=int, default=5, help="windows of each configuration, 2 to 100  [5]")
    made.add_argument("--window", type=float, default=1.0, metavar="S", help="seconds of each measurement  [1]")
    asked = made.parse_intermixed_args(argv)
    if not 2 <= asked.rounds <= 100:
        raise ConfigError(f"--rounds {asked.rounds}", allowed="2 to 100", remedy="--rounds 5")
    if not 0 < asked.window <= 600:
        what = f"--window {asked.window:g}"
        raise ConfigError(what, allowed="more than 0 and at most 600 seconds", remedy="--window 1")
    folder = find_run(asked.runs_dir, asked.id)
    if any(writer_of(folder / name) is not None for name in (JOURNAL, ABLATION)):
        raise ConfigError(f"run {folder.name} goes on: both would be measured beside each other", remedy="wait for it")
    run = History(read(folder / JOURNAL)[0])
    require_known(run.study, folder)
    found = summary.of_run(run)
    further = _knobs_of(asked.settings, found)
    if found.best is None:
        raise NoUsableTrial(f"run {asked.id} has no best configuration yet", remedy=f"python -m tuning show {asked.id}")
    best, reference = found.best.config, found.reference
    today, name = (reference.config, reference.name) if reference else ({}, PLAIN)
    changes, idle = ablation.changes(best, today, found.table, name, further)
    messages, result = console(sys.stderr, os.environ), console(sys.stdout, os.environ)
    if not changes:
        alike = f"the best of run {folder.name} and {name} differ in nothing that changes speed"
        line(messages, f"{alike}: there is nothing to take apart")
        if asked.json:
            print(as_line(AblateReply(device=None, ablation=[], idle=idle)))
        return 0
    worker = worker_of(folder, run)
    turns = ablation.turns({"best": best, name: today}, changes, found.table)
    budget = ConfirmSection.model_construct(windows=asked.rounds, window_s=asked.window, seeds=1, top=1)
    minutes = math.ceil(windows_s(budget, len(turns)) / 60)
    line(messages, f"{len(turns)} configurations, {asked.rounds} rounds, about {minutes} minutes")
    with Worker(worker) as profiler:
        facts = profiler.describe(best).device
        of = {"turns": turns, "device": facts, "window_s": asked.window}
        path = folder / ABLATION
        earlier = History(read(path)[0]).ablation if path.is_file() else None
        if path.is_file() and (earlier is None or earlier.of != of):
            path.unlink()  # what was measured otherwise is no part of the same turns
        with Journal.open(path, create=True) as journal:
            journal.append(AblationRecord, best=dict(best), of=of, changes=ablation.raw(changes))

            def told(made: Event) -> None:
                line(messages, text.ablation_window(made))

            measure_windows(profiler, journal, turns, budget, told, lambda: math.inf)
            whole = summary.of_run(run, journal.run)
    export.write_all(whole, folder)
    report.write_report(whole, folder / "report.html", importances_of(run))
    if asked.json:
        print(as_line(AblateReply(device=facts, ablation=whole.ablation, idle=idle)))
        return 0
    line(result, f"ablation on {facts['name']}, {facts['cores']} cores, {facts['threads']} threads")
    for part in text.ablation(whole.ablation):
        show(result, part)
    for label, why in idle.items():
        line(messages, f"{label}: {why}")
    return 0


def _knobs_of(typed: Sequence[str], found: Summary) -> dict[str, Scalar]:
    """Returns the knobs that were typed; raises ConfigError for those that the run or its device cannot have."""
    table, given = found.table, parse(typed)
    texts = {key.removeprefix("knobs."): text for key, text in {**given.groups, **given.values}.items()}
    raw = {name: value_of(f"knobs.{name}", text, table) for name, text in texts.items()}
    knobs = parse_named("knobs", raw, {}, table)
    for name in knobs:
        learned = table[name].kind == "learning" and name not in ablation.BATCHES
        if learned or not found.asks_for(name):
            why = "it changes what is learned, and not how fast" if learned else "this run's loop does not ask for it"
            raise ConfigError(f"knobs.{name}={texts[name]}: {why}", remedy="leave it out")
    device = found.study.device
    capability = tuple(device["capability"]) if "capability" in device else None
    card = Card(str(device["name"]), capability=capability, device=device["type"])
    restrict(Space.parse(knobs, table), card, knobs)
    return knobs


def worker_of(folder: Path, run: History) -> WorkerConfig:
    """Returns how the worker of a finished run is made, so that it measures as the run did."""
    study = run.study
    if study is None:
        raise NoUsableTrial(f"{folder / JOURNAL} has no study record", remedy="start a new run")
    own: Mapping[str, Scalar] = study.setting("workload", "options")
    if lost := next((name for name, value in own.items() if is_masked(value)), ""):
        what = f"run {folder.name}: workload.{lost} is a secret, which was not written down"
        raise ConfigError(what, remedy="a run without it, with the data or model in a local folder")
    device = "cuda" if study.device["type"] == "cuda" else "cpu"
    if device == "cuda":
        nvml.choose(study.setting("devices") or "all")
    if device == "cuda" and not nvml.gpus():
        what = f"run {folder.name} was made on a CUDA device, and there is none here"
        raise ConfigError(what, remedy="ablate it there")
    cap_bytes = study.cap_bytes if study.card.get("virtual") else None
    ref, ranks = study.setting("workload", "ref"), int(study.setting("devices_per_trial") or 1)
    threads = max(1, machine.threads() // ranks)
    start = next((end.config for end in run.ended), {})
    hang_s = float(study.setting("search", "hang_time") or WorkerConfig.hang_s)
    return WorkerConfig(ref, own, device, threads, cap_bytes, study.seed, hang_s, ranks=ranks, start=start)
