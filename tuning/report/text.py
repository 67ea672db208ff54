"""A run as text on a terminal or in a pipe: plan, events, and the result with the answer first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trainables.knob_columns import Kind
from trainables.knobs import KnobTable, Scalar
from tuning.config.cards import HERE
from tuning.config.schema import StudyConfig
from tuning.config.space import Choice, Range, values_of
from tuning.journal import events
from tuning.report import format as fmt
from tuning.report import sentences, tables
from tuning.report.format import duration, labelled, percent, plain, rate, size
from tuning.report.named import Named
from tuning.report.summary import Summary
from tuning.report.trial_views import SPEED
from tuning.search import runtime_check
from tuning.search.ablation import AblationResult
from tuning.search.probe import probes_s

MESSAGE_COLUMNS = 160
"""Of what an error says, so much stands in the line of a trial."""
_COUNTED = {"total": "parameters", "trainable": "of them trained"}


def planned(config: StudyConfig) -> list[tuple[str, str]]:
    """Returns the plan as labelled lines, as far as it is known before anything is loaded."""
    budget, search, space = config.budget, config.search, config.space
    limit = f"at most {duration(search.max_time_s)}" if search.max_time_s else "no time limit"
    confirm = f"{budget.confirm.windows} windows and {budget.confirm.seeds} seeds to confirm"
    at_once = "" if config.concurrency == "auto" else f" ({config.concurrency} at a time)"
    trials = f"{'up to ' * (search.trials == 'auto')}{search.most_trials} trials"
    steps = [f"{trials}{at_once}, {confirm}"]
    if search.strategy == "staged":
        steps.insert(0, f"probes for {duration(probes_s(config, search.max_time_s or math.inf))}")
    auto = budget.train_epochs == "auto"
    epochs = (
        "trials as long as the time allows"
        if auto
        else f"{budget.train_epochs:g} epoch{'s' * (budget.train_epochs != 1)} a trial"
    )
    dtypes = space.given("amp_dtype")
    kinds: tuple[Kind, ...] = ("system", "both") if search.trials != 0 else ("system",)
    fixed = {n: v for n, v in fmt.differing(space.fixed, {}, space.table).items() if space.table[n].kind != "learning"}
    batch = space.given("batch_size")
    whole = batch.high if isinstance(batch, Range) else max(map(float, values_of(batch)))
    if fixed.get("micro_batch_size") == whole:  # no batch is cut
        del fixed["micro_batch_size"]
    measured = ", ".join(space.subset(kinds).parameters)
    return [
        ("what", f"{config.workload.name} on {'this machine' if config.card.name in HERE else config.card.name}"),
        ("plan", ", ".join(steps)),
        ("budget", f"{budget.name}, {limit}, {epochs}, seed {search.seed}"),
        ("types", ", ".join(map(str, dtypes.values if isinstance(dtypes, Choice) else (dtypes,)))),
        ("active", ", ".join(fmt.assignments(fixed)) or "nothing beyond plain PyTorch"),
        ("probes" if search.strategy == "staged" else "system", f"of {measured or 'one configuration'}"),
    ]


def trained_on(study: events.StudyRecord, folder: Path) -> list[tuple[str, str]]:
    """Returns what is known once the model is loaded: run, device, parameters, trials, where it is written."""
    device, counted = study.device, study.parameters
    cores, threads = device.get("cores"), study.threads or device.get("threads")
    hardware = [str(device.get("name") or "unknown"), size(device.get("memory_bytes"))]
    if device.get("capability"):
        hardware.append(f"compute capability {'.'.join(map(str, device['capability']))}")
    hardware += [f"{cores} cores"] * bool(cores) + [f"{threads} thread{'s' * (threads != 1)}"] * bool(threads)
    emulated = [f"card {study.card.get('name')}, emulated"] * bool(study.card.get("virtual"))
    ranks = study.setting("devices_per_trial") or 1
    together = f", by {ranks} processes together" if ranks > 1 else ""
    samples = f"{study.horizon_samples:,} samples each" if study.horizon_samples else "as long as the time allows"
    return [
        ("run", folder.name),
        ("device", ", ".join([*emulated, *hardware])),
        *[("model", ", ".join(f"{counted[n]:,} {word}" for n, word in _COUNTED.items() if n in counted))]
        * bool(counted),
        ("trials", f"{samples}, {study.concurrency or 1} at a time{together}"),
        ("writes", f"{folder}/trials.jsonl"),
    ]


def event(
    made: events.Event, reference: Mapping[str, Scalar] | None, table: KnobTable, objective: str = "", count: str = ""
) -> tuple[str, str] | None:
    """Returns label and text of what happened, None for what is not told; knobs are those unlike in `reference`.

    Of the values that were measured it shows the objective's, where there is one of this name. `count` says how many
    of its kind are done, as "3/12".
    """
    match made:
        case events.RungRecord():
            parts = [made.trial, f"{made.samples} samples", _values(made.values, objective)]
        case events.DecisionRecord():
            parts = [made.trial, made.reason]
        case events.RefusedRecord():
            parts = [count, made.reason, _knobs(made.config, reference, table)]
        case events.WindowRecord():
            parts = [count, made.name, _speed(made) or made.outcome]
        case events.ProbeRecord():
            ran = [_speed(made) or made.outcome, _peak(made), _knobs(made.config, reference, table)]
            parts = [count, made.name, *ran, _failed(made)]
        case events.ConfirmedRecord():
            values = _values(made.values, objective)
            parts = [count, made.name, f"seed {made.seed}", values or made.outcome, _speed(made), _failed(made)]
        case events.TrialRecord():
            ended = f"stopped at {made.stopped_at}" if made.stopped_at else made.outcome
            ended += f", ended by itself at {made.samples}" if made.has_ended else ""
            values = _values(made.values, objective)
            # Of a trial that failed the speed is only what was expected.
            speed = _speed(made).replace(" samples", "") if values else ""
            parts = [count, made.trial, ended, values, speed, _knobs(made.config, reference, table), _failed(made)]
        case _:
            return None
    label = "again" if isinstance(made, events.ConfirmedRecord) else made.event
    return label, "  ".join(plain(part) for part in parts if part)


def _knobs(config: Mapping[str, Scalar], reference: Mapping[str, Scalar] | None, table: KnobTable) -> str:
    return " ".join(fmt.unlike(config, reference, table)) or "as the best so far" * bool(reference)


def _values(measured: events.Values, objective: str) -> str:
    shown = {objective: measured[objective]} if objective in measured else measured
    return " ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)


def _speed(made: events.MeasuredRecord) -> str:
    return f"{rate(made.samples_per_s)} samples/s" if made.samples_per_s else ""


def _peak(made: events.MeasuredRecord) -> str:
    return size(made.peak_allocated_bytes) if made.peak_allocated_bytes else ""


def _failed(made: events.MeasuredRecord) -> str:
    """Returns what an error says; the whole of it is in the summary."""
    is_failed = made.outcome not in ("", "ok", "stopped", "refused", "cut")
    return fmt.fit(plain(made.message), MESSAGE_COLUMNS) if is_failed else ""


def summary(found: Summary) -> list[RenderableType]:
    """Returns the result to be printed: the answer in a sentence, what to set, what else to choose, then the rest."""
    best, head = found.best, Text(plain(sentences.answer(found)), style="bold")
    rows: list[tuple[str, RenderableType]] = []
    if cut := sentences.cut_sentence(found):
        rows.append(("note", Text(f"{cut}.", style="yellow")))
    if best is not None and not sentences.keeps_today(found):
        before, trial = sentences.present(found), f"({sentences.found_by(best)})"
        chosen = fmt.settings(best.config, found.table, before)
        rows.append(("set", fmt.side_by_side(chosen, "bold") if chosen else f"nothing: the defaults {trial}"))
        if chosen:
            rows.append(("", f"every other knob {'as in before' if before is not None else 'at its default'} {trial}"))
        if before is not None and (changes := fmt.changes(best.config, before, found.table)):
            rows.append(("changes", f"from before: {', '.join(changes)}"))
    rows += [("but", Text(f"{said}.", style="yellow")) for said in sentences.cautions(found)]
    parts = [head, labelled(rows)] if rows else [head]
    if (grid := tables.answers(found, brief=True)) is not None:
        parts += [Text(""), fmt.table(grid.head, grid.rows), Text(plain(sentences.measured_sentence(found))), Text("")]
    return [*parts, labelled(_rest(found)), *_ablated(found), Text("")]


def _rest(found: Summary) -> Iterator[tuple[str, RenderableType]]:
    """Yields what stands behind the answer, and how the run went."""
    best, times = found.best, found.times
    if best is not None:
        if found.rule:
            yield "picked", plain(found.rule)
        yield from _of_best(found, best)
    if found.place.virtual or sentences.is_held(found.place):
        yield "device", sentences.place_sentence(found.place)
    yield from (("knobs", said) for said in sentences.kinds(found.kinds))
    yield from (("note", Text(plain(said), style="yellow")) for said in found.warnings)
    if found.baselines:
        told = (f"{plain(n)} {', '.join(f'{v:.3f}' for v in own.values())}" for n, own in found.baselines.items())
        yield "baselines", ", ".join(told)
    short = found.trials_asked is not None and found.trials_done < found.trials_asked
    yield "trials", fmt.counts(found.trial_counts) + (f" ({found.trials_asked} were asked for)" if short else "")
    yield from (("", said) for said in sentences.failed(found.trials))
    if found.probes:
        yield "probes", fmt.counts(found.probe_counts)
        yield from (("", said) for said in sentences.failed(found.probes))
    shares = [(name, s / times.wall_s) for name, s in sentences.shares(found) if s >= 5e-4 * times.wall_s]
    told = (f"{name} {percent(share)}" for name, share in shares)
    yield "time", f"{duration(times.wall_s)}{': ' if shares else ''}{', '.join(told)}"
    if found.stop_reason and found.stop_reason != "finished":
        yield "ended", found.stop_reason


def _of_best(found: Summary, best: Named) -> Iterator[tuple[str, str]]:
    for name, own in best.quality.items():
        count = len(own.by_seed)
        seeds = f": range of the next run, 95 %, from {count} seeds" if count > 2 else ": two seeds"
        seeds = ": one seed" if count == 1 else seeds
        seeds = ": one seed, which train(run) sets itself" if found.sets_its_seed else seeds
        yield name, fmt.quality(own) + (seeds if own.confirmed else ": one seed, in the search itself")
    if best.peak_allocated_bytes:
        cap = f" of {size(found.place.cap_bytes)}" if found.place.cap_bytes else ""
        yield "memory", f"{size(best.peak_allocated_bytes)}{cap} at its peak"
    if best.verdict:
        yield "bound by", sentences.verdict_sentence(best.verdict)
    if best.card:
        yield "card", best.card
    asked_for = {name: value for name, value in best.config.items() if found.asks_for(name)}
    for text in runtime_check.disagreements(asked_for, best.active, found.table):
        yield "note", text


def _ablated(found: Summary) -> Iterator[RenderableType]:
    """Yields what each optimisation bought, as far as that was measured."""
    if found.ablation:
        yield Text("")
        yield from ablation(found.ablation)


def ablation_window(made: events.Event) -> str:
    """Returns one event of an ablation as it is written: a window, or a note on what has none."""
    match made:
        case events.NoteRecord():
            return plain(made.text)
        case events.WindowRecord():
            return f"round {made.round + 1}  {plain(made.name)}: {_speed(made) or plain(made.outcome)}"
    return ""


def ablation(found: Sequence[AblationResult]) -> Iterator[RenderableType]:
    """Yields what each optimisation bought, and how many of the intervals tell nothing."""
    for grid in tables.ablation(found):
        yield fmt.table(grid.head, grid.rows)
        yield Text("")
    untold = sum(1 for one in found if one.gain and one.gain.low is not None and not one.gain.is_told)
    if untold:
        yield Text(f"{untold} of {len(found)} intervals hold 1.00: those knobs bought nothing here that can be told.")


def trained(
    result: Mapping[str, Any], measured: Mapping[str, Any], samples: int | None, name: str = "best.yaml"
) -> Iterator[str]:
    """Yields the result of a training, each figure beside what the file `name` says was measured after `samples`."""
    now, said = result[SPEED], measured[SPEED]["median"]
    if now:  # None where a resumed run had nothing left to train
        yield f"{now:.1f} samples/s" + (f"  ({name}: {said:.1f}, {now / said - 1:+.1%})" if said else "")
    if result.get("ended_early"):
        yield f"ended by itself after {result['samples']} samples"
    samples = measured.get("samples") or samples
    after = "" if samples in (None, result["samples"]) else f" after {samples} samples"
    for objective, value in result["values"].items():
        known = measured["quality"].get(objective)
        interval = f", {known['interval'][0]:.4f} .. {known['interval'][1]:.4f}" if known and known["interval"] else ""
        beside = f"  ({name}{after}: {known['mean']:.4f}{interval})" if known else ""
        yield f"{objective} {'not finite' if value is None else f'{value:.4f}'}{beside}"
