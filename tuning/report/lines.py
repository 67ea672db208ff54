"""A run in lines of at most 80 columns: plan, events, and the result in hyperfine's manner. Plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.knobs import Knobs, kind_of
from tuning.config.schema import StudyConfig
from tuning.config.space import Choice
from tuning.journal.records import Record
from tuning.report import wording
from tuning.report.ablation_results import Receipt
from tuning.report.summary import Named, Summary
from tuning.report.trial_views import SAMPLES_PER_S
from tuning.search import runtime_check

WIDTH = 80
LABEL = 8  # columns of "best    ", "trials  " and the like
_MAX_VALUE = 36
_RECEIPT_LABEL = 40
_COUNTED = {"total": "parameters", "trainable": "of them trained"}


def plan(config: StudyConfig, facts: Record | Mapping[str, Any], folder: Path, width: int = WIDTH) -> Iterator[str]:
    """Yields the plan: what, on what, how much, until when, where to."""
    device = facts.get("device") or {}
    card = facts.get("card") or {}
    emulated = ", emulated" if card.get("virtual") else ""
    card_name, device_name = card.get("name") or config.card.name, device.get("name") or "unknown"
    what = f"{config.workload.name} on card {card_name}{emulated}, device {device_name}"
    slots = facts.get("concurrency") or config.concurrency
    confirm = config.budget.confirm
    limit = f"at most {wording.duration(config.search.max_time_s)}" if config.search.max_time_s else "no time limit"
    probes = f"probes for {wording.duration(config.budget.probe.max_time_s)},"
    trials = f"{config.search.trials} trials ({slots} at a time),"
    confirmed = f"{confirm.windows} windows and {confirm.seeds} seeds to confirm"
    steps = [probes, trials, confirmed] if config.search.strategy == "staged" else [trials, confirmed]
    horizon = facts.get("horizon_samples") or "?"
    rows = [
        ("run", [folder.name]),
        ("what", what.split(" ")),
        ("plan", steps),
        ("budget", [f"{config.budget.name}, {limit},", f"{horizon} samples a trial,", f"seed {config.search.seed}"]),
        ("writes", [f"{folder}/trials.jsonl"]),
    ]  # fmt: skip
    for label, parts in rows:
        yield from wrapped(label, [wording.plain(p) for p in parts], width, " ")


def banner(config: StudyConfig, facts: Record | Mapping[str, Any], width: int = WIDTH) -> Iterator[str]:
    """Yields what is trained on and how: device, parameters, precision, the optimisations that are on, those tried."""
    device, counts = facts.get("device") or {}, facts.get("parameters") or {}
    cores, threads = device.get("cores"), facts.get("threads") or device.get("threads")
    hardware = [wording.plain(device.get("name") or "unknown"), wording.size(device.get("memory_bytes"))]
    if device.get("capability"):
        hardware.append(f"compute capability {'.'.join(map(str, device['capability']))}")
    hardware += [f"{cores} cores"] * bool(cores) + [f"{threads} thread{'s' * (threads != 1)}"] * bool(threads)
    space = config.space
    dtypes = space.parameters.get("amp_dtype", space.fixed.get("amp_dtype", Knobs().amp_dtype))
    fixed = {n: v for n, v in wording.differing(space.fixed, {}).items() if kind_of(n) != "learning"}
    rows = [
        ("device", hardware),
        ("model", [f"{counts[name]:,} {word}" for name, word in _COUNTED.items() if name in counts]),
        ("types", [str(v) for v in (dtypes.values if isinstance(dtypes, Choice) else (dtypes,))]),
        ("active", wording.knobs(fixed) or ["nothing beyond plain PyTorch"]),
        ("tried", [n for n in space.parameters if kind_of(n) != "learning"]),
    ]
    for label, parts in rows:
        yield from wrapped(label, [f"{part}," for part in parts[:-1]] + list(parts[-1:]), width, " ")


def event(record: Record, reference: Mapping[str, Any] | None, objective: str = "") -> str:
    """Returns what happened in a line, "" for events that are not told; knobs are those unlike in `reference`.

    Of the values that were measured it shows the objective's, where there is one of this name.
    """
    config = record.get("config") or {}
    differing = wording.differing(config, reference)
    first: dict[str, object] = {k: differing[k] for k in ("learning_rate", "batch_size") if k in differing}
    knobs = " ".join(wording.knobs({**first, **differing}))
    name = wording.plain(record.get("trial") or record.get("name") or "")
    speed = record.get(SAMPLES_PER_S)
    rate = f"{wording.rate(speed)} samples/s" if speed else ""
    outcome = wording.plain(record.get("outcome") or "ok")
    if record.event == "probe":
        told = rate if speed else outcome
        return f"{'probe':<{LABEL}}{name:<8}{told:<17} {wording.size(record.get('peak_allocated_bytes')):<9} {knobs}"
    measured = record.get("values") or {}
    shown = {objective: measured[objective]} if objective in measured else measured
    values = " ".join(f"{wording.plain(k)} {v:.3f}" for k, v in shown.items() if v is not None)
    if record.event == "trial":
        told = f"stopped at {record.get('stopped_at')}" if record.get("stopped_at") else outcome
        rate = rate if values else ""  # of one that failed it is only what was expected
        return f"{'trial':<{LABEL}}{name:<6}{told:<16}{values:<15} {rate.replace(' samples', ''):<9} {knobs}"
    if record.event == "rated":
        return f"{'rated':<{LABEL}}{name:<6}{rate}  {knobs}"
    if record.event == "rung":
        return f"{'rung':<{LABEL}}{name:<6}{record.get('samples')} samples  {values}"
    if record.event == "refused":
        return f"{'refused':<{LABEL}}{wording.plain(record.get('reason') or '')}  {knobs}"
    if record.event in ("retired", "widened", "lost"):
        return f"{record.event:<{LABEL}}{name:<6}{wording.plain(record.get('reason') or '')}"
    if record.event == "rival":
        return f"{'rival':<{LABEL}}{name:<6}{wording.rival(record.fields)}"
    if record.event == "window":
        return f"{'window':<{LABEL}}{name:<8}{rate or outcome}"
    if record.event == "confirmed":
        return f"{'again':<{LABEL}}{name:<8}seed {record.get('seed')}  {values or outcome}  {rate}"
    return ""


def receipt(record: Record) -> str:
    """Returns one measured pair of an ablation as it is written."""
    rates = [record.get(f"{side}_samples_per_s") for side in ("with", "without")]
    told = [
        f"{r:.1f}" if r else str(record.get(f"{s}_outcome")) for s, r in zip(("with", "without"), rates, strict=True)
    ]
    what = f"{record['base']}, {record['knobs']}={record['value']}"
    return f"round {int(record['round']) + 1}  {what}: {told[0]} samples/s, with {record['instead_of']} {told[1]}"


def receipts(found: Sequence[Receipt], width: int = WIDTH) -> list[str]:
    """Returns what each optimisation bought: its knob, speed with it over without it, memory likewise, the claim."""
    lines: list[str] = []
    for base, title in (("best", "at the best: with it, over the best without it"), ("before", "added to before")):
        own = [r for r in found if r.base == base]
        lines += [title] * bool(own)
        for one in own:
            label = f"  {one.knobs}={one.value} ({one.instead_of})"
            bought = wording.ratio(one.gain, "x") if one.gain else one.why
            memory = f"memory {one.memory_ratio:.2f}x" if one.memory_ratio else ""
            claim = f"claimed {wording.plain(one.claim)}" if one.claim else ""
            figures = f"{bought:<22} {memory:<13} {claim}".rstrip()
            if len(label) > _RECEIPT_LABEL:
                lines += [label, " " * _RECEIPT_LABEL + figures]
            else:
                lines.append(f"{label:<{_RECEIPT_LABEL}}{figures}")
    untold = sum(1 for r in found if r.gain and not r.gain.is_told)
    if untold:
        said = f"{untold} of {len(found)} intervals hold 1.00: those knobs bought nothing here that can be told."
        lines += textwrap.wrap(said, width)
    return lines


def summary(found: Summary, folder: Path, width: int = WIDTH) -> list[str]:
    """Returns the result: the best, what it gains, what was tried, where the time went, what next.

    No line but a command or a path that cannot be cut is longer than `width` columns.
    """
    lines = _best_lines(found, width)
    if found.baselines:
        texts = [
            f"{wording.plain(name)} {', '.join(f'{v:.3f}' for v in values.values())}"
            for name, values in found.baselines.items()
        ]
        lines += wrapped("baselines:", [f"{t}," for t in texts[:-1]] + texts[-1:], width, " ")
    lines += wrapped("trials", wording.counts(found.trial_counts).split(" "), width, " ")
    if found.probes:
        probes = wording.counts(found.probe_counts, always=("ok", "oom", "refused"))
        lines += wrapped("probes", probes.split(" "), width, " ")
    times = found.times
    shares = [f"{name} {wording.percent(seconds / times.wall_s)}" for name, seconds in wording.shares(times)]
    told = [f"{wording.duration(times.wall_s)}:", *(f"{share}," for share in shares[:-1]), *shares[-1:]]
    told += f"({wording.percent(times.overhead_frac)} neither measured nor trained)".split(" ")
    lines += wrapped("time", told, width, " ")
    if found.stop_reason and found.stop_reason != "finished":
        lines += wrapped("ended", wording.plain(found.stop_reason).split(" "), width, " ")
    for number, command in enumerate(wording.next_commands(found, folder)):
        label = "next" if number == 0 else ""
        lines += wrapped(label, wording.shell_words(command), width, " ", broken=" \\")
    return lines


def trained(result: Mapping[str, Any], measured: Mapping[str, Any], model: Path) -> Iterator[str]:
    """Yields the result of a training, each figure beside what best.yaml says was measured, and where the model is."""
    speed, said = result[SAMPLES_PER_S], measured[SAMPLES_PER_S]["median"]
    if speed:  # None where a resumed run had nothing left to train
        yield f"{speed:.1f} samples/s" + (f"  (best.yaml: {said:.1f}, {speed / said - 1:+.1%})" if said else "")
    for name, value in result["values"].items():
        known = measured["quality"].get(name)
        interval = known and known["interval"]
        beside = f"  (best.yaml: {known['mean']:.4f}, {interval[0]:.4f} .. {interval[1]:.4f})" if interval else ""
        yield f"{name} {value:.4f}{beside}"
    yield f"model   {model}"


def _best_lines(summary: Summary, width: int) -> list[str]:
    best = summary.best
    if best is None:
        return ["no configuration was picked"]
    segments = [best.trial, f"{wording.named_rate(best)} samples/s"]
    segments += [f"{wording.plain(name)} {wording.quality(found)}" for name, found in best.quality.items()]
    segments += [wording.size(best.peak_allocated_bytes)] if best.peak_allocated_bytes else []
    lines = wrapped("best", segments, width, "   ")
    lines += wrapped("", _knob_texts(summary, best), width, " ")
    lines += textwrap.wrap(wording.baseline_sentence(summary), width)
    lines += textwrap.wrap(wording.verdict_sentence(best.verdict), width) if best.verdict else []
    for gain in summary.gains:
        if gain.of == "best":
            lines += textwrap.wrap(wording.gain_sentence(gain), width)
    claim = wording.claim_sentence(summary.claim, summary.gain("after", "before"))
    lines += textwrap.wrap(claim, width) if claim else []
    lines += _rival_lines(summary, best, width)
    for text in runtime_check.disagreements(best.config, best.active):
        lines += textwrap.wrap(wording.plain(text), width)
    if summary.place.virtual or wording.is_held(summary.place):
        lines += textwrap.wrap(wording.place_sentence(summary.place), width)
    return lines


def _rival_lines(summary: Summary, best: Named, width: int) -> list[str]:
    """Who else was trained on the same fresh seeds, for the rule to choose among."""
    lines: list[str] = []
    for one in (o for o in summary.confirmed if o.name != best.trial):
        found = one.quality.get(summary.objective)
        told = f"{wording.plain(summary.objective)} {wording.quality(found)}" if found else wording.plain(one.outcome)
        lines += wrapped(
            "rival" if not lines else "", [one.name, f"{wording.named_rate(one)} samples/s", told], width, "   "
        )
    return lines


def _knob_texts(summary: Summary, best: Named) -> list[str]:
    """The knobs that are otherwise than in `before`, each cut in its middle where its value is long."""
    before = summary.named.get("before")
    differing = wording.differing(best.config, before.config if before else None)
    texts = [f"{wording.plain(k)}={_cut(wording.plain(v), _MAX_VALUE)}" for k, v in differing.items()]
    return texts or (["the knobs of before"] if before else [])


def wrapped(label: str, parts: Sequence[str], width: int, between: str, broken: str = "") -> list[str]:
    """Returns `parts` after a label, in as many lines as it takes; a part that is too long has a line of its own."""
    indent = max(LABEL, len(label) + 1) if label else LABEL
    lines = [f"{label:<{indent}}"]
    room = width - len(broken)
    for number, part in enumerate(parts):
        start = number == 0 or len(lines[-1]) <= indent
        if not start and len(lines[-1]) + len(between) + len(part) > room:
            lines[-1] += broken
            lines.append(" " * indent)
            start = True
        lines[-1] += part if start else between + part
    return [line.rstrip() for line in lines] if parts else []


def _cut(text: str, limit: int) -> str:
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def fit(line: str, width: int) -> str:
    """Returns `line`, cut to `width` columns."""
    line = line.rstrip()
    return line if len(line) <= width else f"{line[: max(1, width - 1)]}…"
