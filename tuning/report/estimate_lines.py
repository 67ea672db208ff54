"""The answer of `python -m tuning estimate` in words: a table, and what to do about what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainables.knobs import Scalar
from tuning.memory.fitting import MAX_MICRO_BATCH, Cell, Fit, Word
from tuning.memory.need import MARGINS
from tuning.report.estimate_request import Question
from tuning.report.format import percent, plain

_GIB_BYTES = 2**30
_LEFT_WIDTH, _PART_WIDTH, _MOST_PARTS = 48, 16, 5
_PART_WORDS = {
    "parameter": "weights",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer": "the optimiser's state",
    "activation": "activations kept for the backward pass",
    "temporary": "temporaries of operators",
    "workspace": "workspaces of kernels",
    "batch": "the batch itself",
}
_TRUST = {
    "workspaces modelled": "kernels of convolutions take workspaces that are modelled, not seen",
    "workspaces unseen": "kernels of RNNs take workspaces that cannot be seen",
    "fallback": "kernels of the CPU were traced in the place of CUDA's, which could not be (the reason is in a note)",
}


@dataclass(frozen=True)
class Remedy:
    """Knobs that make one sample of the smallest row need less memory, those of the remedies before it included."""

    knobs: Mapping[str, Scalar]
    cost: str
    needed_bytes: int
    verdict: Word


@dataclass(frozen=True)
class Estimated:
    """A row for each memory group of a question; `remedies` only if no row fits with one sample."""

    about: Question
    notes: Sequence[str]
    rows: Sequence[Fit]
    remedies: Sequence[Remedy]


def shown(answer: Estimated, width: int) -> Iterator[RenderableType]:
    """Yields the paragraphs of an answer and its table, for a console of `width` columns."""
    texts = [*_heading(answer)]
    if any(row.cells for row in answer.rows):
        yield from (Text(plain(text)) for text in texts)
        yield ""
        yield _table(answer, min(_MOST_PARTS, max(2, (width - _LEFT_WIDTH) // _PART_WIDTH)))
        texts = ["", *_advice(answer), *_notes(answer)]
    else:
        texts += _unknown(answer)
    yield from (Text(plain(text)) for text in texts)


def _unknown(answer: Estimated) -> Iterator[str]:
    """Yields why nothing is predicted, and what tells it instead."""
    reasons = [note.removeprefix("Untraceable: ") for note in answer.notes]
    yield f"This step cannot be predicted: {'; '.join(reasons) or 'it was not traced'}."
    card = f" card={_card(answer)}" if answer.about.card.cap_bytes is not None else ""
    yield (
        f"To measure it instead, without training: python -m tuning.run workload={answer.about.workload.ref}{card} "
        "search.trials=0. A search measures memory as it goes, and only its trials can tell what fits."
    )


def _card(answer: Estimated) -> str:
    return " ".join(filter(None, (answer.about.card.name, answer.about.card_typed)))


def _heading(answer: Estimated) -> Iterator[str]:
    card = answer.about.card
    usable, whole = card.cap_bytes, card.memory_bytes
    if usable is None or whole is None:
        limit = "no limit to its memory"
    else:
        limit = f"{gib(usable)} of {gib(whole)} GiB for tensors"
        limit += ", the rest for CUDA and other programs" if usable < whole else ""
    is_cuda = answer.about.kernels == "cuda"
    kernels = f"compute capability {'.'.join(map(str, card.capability or ()))}" if is_cuda else "the CPU"
    yield f"{answer.about.workload.name} on {_card(answer)}: {limit}; peak of one training step, kernels of {kernels}"
    chosen = [
        f"{name}={plain(answer.about.knobs[name])} (searched too: {', '.join(map(plain, others))})"
        for name, others in answer.about.searched.items()
        if others and name in answer.about.table.both
    ]
    if chosen:
        yield "with " + ", ".join(chosen)


def _table(answer: Estimated, parts: int) -> Table:
    """Returns the table; of each peak the `parts` largest categories."""
    limited = answer.about.card.cap_bytes is not None
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", expand=True)
    asked = [name for name in ("adapter", "base_dtype") if name in answer.rows[0].knobs]
    own = [name for name in asked if len({row.knobs[name] for row in answer.rows}) > 1] or asked[:1]
    for name in ("dtype", "ckpt", *(name.partition("_")[0] for name in own)):
        made.add_column(name, no_wrap=True)
    for name in ("micro", "GiB", *(("card",) if limited else ())):
        made.add_column(name, justify="right", no_wrap=True)
    if limited:
        made.add_column("", no_wrap=True)
    made.add_column("of the peak", no_wrap=True, overflow="ellipsis", ratio=1)  # figures keep their letters, this not
    for row in answer.rows:
        knobs = row.knobs
        label = [knobs["amp_dtype"], "on" if knobs["activation_checkpointing"] else "off", *(knobs[n] for n in own)]
        cells = [(f"{cell.micro_batch}", cell) for cell in row.cells]
        if (most := row.largest_cell) is not None and most.micro_batch not in [cell.micro_batch for cell in row.cells]:
            sign = ">=" if most.micro_batch >= MAX_MICRO_BATCH else "<="  # no further is looked than MAX_MICRO_BATCH
            cells.append((f"{sign}{most.micro_batch}", most))
        for size, cell in cells:
            figures = [size, gib(cell.needed_bytes)]
            figures += [percent(cell.share_frac), cell.verdict] if limited else []
            made.add_row(*(Text(plain(v)) for v in (*label, *figures, _parts(cell, parts))))
            label = [""] * len(label)
        if not cells or row.largest == 0:
            text = "cannot be predicted" if not cells else "not one sample fits"
            made.add_row(*(Text(plain(v)) for v in label), *[""] * (2 + 2 * limited), text)
    return made


def _parts(cell: Cell, count: int) -> str:
    whole = max(1, cell.peak.live_bytes)
    named = [f"{name} {percent(size / whole)}" for name, size in cell.peak.breakdown.items()]
    return ", ".join(named[:count])


def _advice(answer: Estimated) -> Iterator[str]:
    """Yields what dominates the peak, and what fits in the place of the first size that does not."""
    rows = [row for row in answer.rows if row.cells]
    first, last = rows[0], rows[0].cells[-1]
    main = next(iter(last.peak.breakdown), "")
    yield (
        f"The peak of {_name(first)} at micro-batch {last.micro_batch} is in the {last.peak.phase} phase, at "
        f"{last.peak.operator or 'no operator'}; most of it is {_PART_WORDS.get(main, 'nothing')}."
    )
    if answer.about.card.cap_bytes is None:
        return
    short = next((cell for cell in first.cells if cell.verdict == "no"), None)
    if short is None:
        whole = all(row.cells and _fits(row) for row in answer.rows)
        if _fits(first):
            yield f"All {'of these sizes' if whole else f'sizes of {_name(first)}'} fit; nothing has to be given up."
        else:
            yield f"No size of {_name(first)} is too large; one that is tight may run out of memory."
        return
    ways = list(_ways(rows, short.micro_batch))
    if ways:
        yield f"{_name(first)} at micro-batch {short.micro_batch} does not fit. Cheapest first, these fit:"
        yield from ways
    elif answer.remedies:
        yield "Not one sample fits. From the smallest row, at one sample, add these in order until one fits:"
        for one in answer.remedies:
            fits = "which still does not fit" if one.verdict == "no" else "which fits"
            yield _way(one.knobs, one.needed_bytes, f", {fits}; costs {one.cost}")
    else:
        yield "Nothing of this fits, and no knob saves anything: a larger card, or a smaller model."


def _fits(row: Fit) -> bool:
    return all(cell.verdict == "fits" for cell in row.cells)


def _ways(rows: Sequence[Fit], micro_batch: int) -> Iterator[str]:
    """Yields what fits in place of the first row at a micro-batch size: fewer samples at a time, then other rows."""
    first = rows[0]
    if first.largest and first.largest_cell is not None:
        needed_bytes = first.largest_cell.needed_bytes
        yield _way({"micro_batch_size": first.largest}, needed_bytes, ", the same batches in more steps")
    for row in rows[1:]:
        changed = {n: v for n, v in row.knobs.items() if v != first.knobs[n]}
        cell = next((c for c in row.cells if c.micro_batch == micro_batch and c.verdict != "no"), None)
        if cell is not None:
            yield _way(changed, cell.needed_bytes)
        elif row.largest and row.largest_cell is not None and not first.largest:
            yield _way({**changed, "micro_batch_size": row.largest}, row.largest_cell.needed_bytes)


def _way(knobs: Mapping[str, Scalar], needed_bytes: int, more: str = "") -> str:
    typed = " ".join(f"knobs.{name}={plain(value)}" for name, value in knobs.items())
    return f"  {typed}: {gib(needed_bytes)} GiB{more}"


def _notes(answer: Estimated) -> Iterator[str]:
    kinds = {row.confidence for row in answer.rows}
    trust = [
        f"{text}: {percent(MARGINS[kind].more_frac)} more than was traced is expected for each sample"
        for kind, text in _TRUST.items()
        if kind in kinds
    ]
    tight = any(cell.verdict == "tight" for row in answer.rows for cell in row.cells)
    more = ["tight: a search would try it, and it may run out of memory"] if tight else []
    notes = [*trust, *more, *answer.notes]
    yield from (f"note: {note}" for note in dict.fromkeys(notes))


def _name(row: Fit) -> str:
    knobs = row.knobs
    return f"{knobs['amp_dtype']}{' with checkpointing' if knobs['activation_checkpointing'] else ''}"


def gib(size: int) -> str:
    """Returns bytes in GiB, as the table has them."""
    figure = size / _GIB_BYTES
    return f"{figure:.2f}" if figure < 99.95 else f"{figure:.0f}"
