"""A run as text on a terminal or in a pipe: plan, events, and the result with the answer first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import RenderableType
from rich.text import Text

from trainables.knob_columns import Kind
from tuning.config.cards import HERE
from tuning.config.schema import StudyConfig
from tuning.config.space import Choice
from tuning.journal import events
from tuning.report import format as fmt
from tuning.report import sentences, tables, words
from tuning.report.format import duration, labelled, plain, plural, size
from tuning.report.named import Named
from tuning.report.summary import Summary
from tuning.search import runtime_check
from tuning.search.ablation import AblationResult
from tuning.search.probe import probes_s

_COUNTED = {"total": "parameters", "trainable": "of them trained"}


def planned(config: StudyConfig) -> list[tuple[str, str]]:
    """Returns the plan as labelled lines, as far as it is known before anything is loaded."""
    budget, search, space = config.budget, config.search, config.space
    limit = f"at most {duration(search.max_time_s)}" if search.max_time_s else "no time limit"
    rounds = f"{plural(budget.confirm.windows, 'round')} of alternating timings"
    at_once = "" if config.concurrency == "auto" else f" ({config.concurrency} at a time)"
    trials = "up to " * (search.trials == "auto") + plural(search.most_trials, "trial")
    confirm = f"then up to {plural(budget.confirm.seeds, 'fresh seed')} and {rounds}"
    then = f"{trials}{at_once}, {confirm}" if search.trials else f"then up to {rounds}; nothing is trained"
    probes = f"probes for {duration(probes_s(config, search.max_time_s or math.inf))}"
    length = budget.train_epochs
    epochs = "trials of a length that the time allows" if length == "auto" else f"epochs of a trial: {length:g}"
    dtypes = space.given("amp_dtype")
    kinds: tuple[Kind, ...] = ("system", "both") if search.trials != 0 else ("system",)
    measured = ", ".join(space.subset(kinds).parameters)
    return [
        ("what", f"{config.workload.name} on {'this machine' if config.card.name in HERE else config.card.name}"),
        ("plan", f"{probes}, {then}"),
        ("budget", f"{budget.name}, {limit}, {epochs}, seed {search.seed}"),
        ("dtypes", ", ".join(map(str, dtypes.values if isinstance(dtypes, Choice) else (dtypes,)))),
        ("probes", f"of {measured or 'one configuration'}"),
    ]


def trained_on(study: events.StudyRecord, folder: Path) -> list[tuple[str, str]]:
    """Returns what is known once the model is loaded: run, device, parameters, trials, where it is written."""
    device, counted = study.device, study.parameters
    cores, threads = device.get("cores"), study.threads or device.get("threads")
    hardware = [str(device.get("name") or "unknown"), size(device.get("memory_bytes"))]
    if device.get("capability"):
        hardware.append(f"compute capability {'.'.join(map(str, device['capability']))}")
    hardware += [plural(count, word) for count, word in ((cores, "core"), (threads, "thread")) if count]
    emulated = [f"card {study.card.get('name')}, emulated"] * bool(study.card.get("virtual"))
    ranks = study.setting("devices_per_trial") or 1
    together = f", by {ranks} processes together" if ranks > 1 else ""
    samples = f"{study.horizon_samples:,} samples each" if study.horizon_samples else "of a length that the time allows"
    return [
        ("run", folder.name),
        ("device", ", ".join([*emulated, *hardware])),
        *[("model", ", ".join(f"{counted[n]:,} {word}" for n, word in _COUNTED.items() if n in counted))]
        * bool(counted),
        ("trials", f"{samples}, {study.concurrency or 1} at a time{together}"),
        ("writes", f"{folder}/trials.jsonl"),
    ]


def summary(found: Summary) -> list[RenderableType]:
    """Returns the result to be printed: the answer in a sentence, what to set, what else to choose, then the rest."""
    best = found.best
    parts: list[RenderableType] = [Text(plain(sentences.answer(found)), style="bold")]
    rows: list[tuple[str, RenderableType]] = []
    if unfinished := sentences.unfinished_sentence(found):
        rows.append(("note", Text(f"{unfinished}.", style="yellow")))
    if best is not None and not sentences.keeps_today(found):
        base, origin = sentences.today(found), sentences.found_by(found, best)
        others = "at its default" if base is None else f"as in {sentences.called(base.name)}"
        if chosen := fmt.settings(best.config, found.table, base.config if base else None):
            texts = [Text(plain(text), style="bold", overflow="fold") for text in chosen]
            rows += [("set", Columns(texts, padding=(0, 2), equal=True)), ("", f"every other knob {others}; {origin}")]
        else:
            rows.append(("set", f"nothing: every knob {others}; {origin}"))
        if found.study.program:
            rows.append(("command", Text(sentences.command_with(found, best.config), overflow="fold")))
            rows += [("", f"and in the code, {plain(said)}") for said in sentences.beside_command(found, best.config)]
    rows += [("but", Text(f"{said}.", style="yellow")) for said in sentences.cautions(found)]
    if rows:
        parts.append(labelled(rows))
    if (grid := tables.answers(found, brief=True)) is not None:
        said = sentences.measured_sentence(found)
        parts += [Text(""), fmt.table(grid.head, grid.rows), *[Text(plain(said))] * bool(said), Text("")]
    ablated = [Text(""), *ablation(found.ablation)] if found.ablation else []
    return [*parts, labelled(_rest(found)), *ablated, Text("")]


def _rest(found: Summary) -> Iterator[tuple[str, RenderableType]]:
    """Yields what stands behind the answer, and how the run went."""
    best = found.best
    if best is not None:
        if found.rule:
            yield "picked", plain(found.rule)
        yield from _of_best(found, best)
    if found.place.virtual or sentences.is_held(found.place):
        yield "device", sentences.place_sentence(found.place)
    yield from (("knobs", said) for said in sentences.kinds(found.kinds))
    yield from (("note", Text(plain(said), style="yellow")) for said in found.warnings)
    is_short = found.trials_done < (found.trials_asked or 0)
    samples, epoch = found.horizon_samples or 0, found.study.train_samples
    seen = f", {fmt.epochs(samples / epoch)}" if epoch else ""
    long = f"; each at most {samples:,} samples{seen}" * bool(samples and found.trials)
    yield "trials", words.counts(found.trial_counts) + f" ({found.trials_asked} were asked for)" * is_short + long
    yield from (("", said) for said in sentences.failed(found.trials))
    if found.probes:
        yield "probes", f"{words.counts(found.probe_counts)} (short timings)"
        yield from (("", said) for said in sentences.failed(found.probes))
    ended = f"; {found.stop_reason}" if found.stop_reason not in ("", "finished") else ""
    yield "time", duration(found.times.wall_s) + ended + sentences.startup(found)


def _of_best(found: Summary, best: Named) -> Iterator[tuple[str, str]]:
    if best.samples_per_s and tables.answers(found, brief=True) is None:
        slow = found.slowing
        later = f" at the beginning, {fmt.rate(slow.after_per_s)} after sample {slow.samples:,}" if slow else ""
        yield "speed", f"{fmt.rate(best.samples_per_s)} samples/s{later}"
    for name, own in best.quality.items():
        yield name, sentences.quality_sentence(found, own)
    if best.peak_allocated_bytes:
        cap = f" of {size(found.place.cap_bytes)}" if found.place.cap_bytes else ""
        said = f"{size(best.peak_allocated_bytes)}{cap} at its peak"
        today = None if sentences.keeps_today(found) else sentences.today(found)
        if today is not None and today.peak_allocated_bytes:
            said += f", {sentences.called(today.name)} {size(today.peak_allocated_bytes)}"
        yield "memory", said
    if best.verdict:
        yield "bound by", sentences.verdict_sentence(best.verdict)
    if best.card:
        yield "card", best.card
    asked_for = {name: value for name, value in best.config.items() if found.asks_for(name)}
    yield from (("note", text) for text in runtime_check.disagreements(asked_for, best.active, found.table))


def ablation_window(made: events.Event) -> str:
    """Returns one event of an ablation as it is written: a window, or a note on what has none."""
    match made:
        case events.NoteRecord():
            return plain(made.text)
        case events.WindowRecord():
            return f"round {made.round + 1}  {fmt.spoken(made.name)}: {plain(words.speed(made))}"
    return ""


def ablation(found: Sequence[AblationResult]) -> Iterator[RenderableType]:
    """Yields what each optimisation bought, and how many of the intervals tell nothing."""
    for grid in tables.ablation(found):
        yield fmt.table(grid.head, grid.rows)
        yield Text("")
    untold = sum(one.gain is not None and one.gain.low is not None and not one.gain.is_told for one in found)
    if untold:
        yield Text(f"{untold} of {len(found)} intervals hold 1.00: of those no effect was seen. Effects interact.")
