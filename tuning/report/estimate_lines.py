"""The answer of `python -m tuning estimate` in words: a table of 80 columns, and what to do about what does not fit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainables.knobs import kind_of
from tuning.config.cards import GIB_BYTES
from tuning.memory.fitting import MOST
from tuning.report.format import percent, plain

WIDTH = 80
_HEAD = f"{'dtype':<6}{'ckpt':<5}{'adapter':<8}{'micro':>6}{'GiB':>8}{'card':>7}  {'':<6}of the peak"


def lines(answer: Mapping[str, Any]) -> list[str]:
    """Returns the lines of an answer, none longer than 80 characters."""
    made = [*_heading(answer), ""]
    rows = answer["rows"]
    if not any(row["cells"] for row in rows):
        return [
            *made[:-1],
            *_notes(answer),
            *_wrapped(
                "This step cannot be predicted: only trials can tell what fits, and the search learns it from them."
            ),
        ]
    made.append(_HEAD.rstrip())
    for row in rows:
        made += _row(row)
    return [*made, "", *_advice(answer), *_notes(answer)]


def _heading(answer: Mapping[str, Any]) -> Iterator[str]:
    card = answer["card"]
    usable, whole = card["usable_bytes"], card["memory_bytes"]
    place = f"{answer['workload']} on {card['name']}"
    if usable is None:
        limit = "no limit to its memory"
    else:
        limit = f"{_gib(usable)} of {_gib(whole)} GiB for tensors"
        limit += ", the rest for its context" if usable < whole else ""
    kernels = "CUDA " + ".".join(map(str, card["capability"])) if answer["kernels"] == "cuda" else "the CPU"
    yield from _wrapped(f"{place}: {limit}; peak of one training step, kernels of {kernels}")
    chosen = [
        f"{name}={plain(answer['knobs'][name])} (searched too: {', '.join(map(plain, others))})"
        for name, others in answer["searched"].items()
        if others and kind_of(name) == "both"
    ]
    if chosen:
        yield from _wrapped("with " + ", ".join(chosen))


def _row(row: Mapping[str, Any]) -> Iterator[str]:
    knobs = row["knobs"]
    adapter = plain(knobs["adapter"]) if "adapter" in knobs else ""
    label = f"{knobs['amp_dtype']:<6}{'on' if knobs['activation_checkpointing'] else 'off':<5}{adapter:<8}"
    cells = list(row["cells"])
    for cell in cells:
        yield _cell_line(label, f"{cell['micro_batch']}", cell)
        label = " " * len(label)
    if row["largest_cell"] is not None and row["largest"] not in [cell["micro_batch"] for cell in cells]:
        sign = ">=" if row["largest"] >= MOST else "<="  # no further is looked than MOST
        yield _cell_line(label, f"{sign}{row['largest']}", row["largest_cell"])
    elif row["largest"] == 0:
        yield f"{label}   not one sample fits"
    if not cells:
        yield f"{label}   cannot be predicted"


def _cell_line(label: str, micro_batch: str, cell: Mapping[str, Any]) -> str:
    share = percent(cell["share_frac"]) if cell["share_frac"] is not None else ""
    start = f"{label}{micro_batch:>6}{_gib(cell['needed_bytes']):>8}{share:>7}  {cell['verdict']:<6}"
    whole = max(1, cell["live_bytes"])
    parts = [f"{name} {percent(size / whole)}" for name, size in cell["breakdown"].items()]
    text = start
    for number, part in enumerate(parts[:3]):
        longer = text + (", " if number else "") + part
        if len(longer) > WIDTH:
            break
        text = longer
    return text.rstrip()


def _advice(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yields what dominates and the cheapest lever; where nothing fits, each lever with what it leads to."""
    rows = [row for row in answer["rows"] if row["cells"]]
    last = rows[0]["cells"][-1]
    main = next(iter(last["breakdown"]), "")
    yield from _wrapped(
        f"The peak of {_name(rows[0])} at micro-batch {last['micro_batch']} is in the {last['phase']} phase, at "
        f"{plain(last['operator']) or 'no operator'}; most of it is {_WORDS.get(main, 'nothing')}."
    )
    if answer["wanted"] is not None:
        yield from _lever_table(answer)
        return
    if answer["card"]["usable_bytes"] is None:
        return
    short = next((cell for cell in rows[0]["cells"] if cell["verdict"] != "fits"), None)
    if short is None:
        yield "All of these sizes fit; nothing has to be given up."
        return
    ways = list(_ways(rows, short["micro_batch"]))
    lacking = "is tight" if short["verdict"] == "tight" else "does not fit"
    yield from _wrapped(f"{_name(rows[0])} at micro-batch {short['micro_batch']} {lacking}. Cheapest first, these fit:")
    for way in ways:
        yield from _wrapped(way, "  ")
    if not ways:
        yield "  none of these rows; ask for a smaller knobs.micro_batch_size"


def _ways(rows: Sequence[Mapping[str, Any]], micro_batch: int) -> Iterator[str]:
    """Yields what fits instead of the first row at a micro-batch size: fewer samples at a time, then other rows."""
    first = rows[0]
    if first["largest"]:
        needed = _gib(first["largest_cell"]["needed_bytes"])
        yield f"knobs.micro_batch_size={first['largest']}: {needed} GiB, the same batches in more steps"
    for row in rows[1:]:
        cell = next((cell for cell in row["cells"] if cell["micro_batch"] == micro_batch), None)
        if cell is not None and cell["verdict"] == "fits":
            changed = {n: v for n, v in row["knobs"].items() if v != first["knobs"][n]}
            typed = " ".join(f"knobs.{n}={plain(v)}" for n, v in changed.items())
            yield f"{typed}: {_gib(cell['needed_bytes'])} GiB"


def _lever_table(answer: Mapping[str, Any]) -> Iterator[str]:
    size = answer["wanted"]
    what = "Not one sample fits" if size == 1 else f"Micro-batch {size} fits in no row"
    if not answer["levers"]:
        yield from _wrapped(f"{what}, and no lever known here saves anything: a larger card, or a smaller model.")
        return
    yield f"{what}. Levers, the cheapest first:"
    for lever in answer["levers"]:
        needed = lever["needed_bytes"]
        amount = "?" if needed is None else f"{'about ' if lever['of_code'] else ''}{_gib(needed)}"
        yield from _wrapped(
            f"{lever['name']}: {amount} GiB, {lever['verdict'] or 'unknown'}; costs {lever['cost']}", "  "
        )
        if lever["knobs"]:
            yield from _wrapped(" ".join(f"knobs.{n}={plain(v)}" for n, v in lever["knobs"].items()), "    ")


def _notes(answer: Mapping[str, Any]) -> Iterator[str]:
    notes = list(answer["notes"])
    kinds = {row["confidence"] for row in answer["rows"]}
    notes += [_TRUST[kind] for kind in _TRUST if kind in kinds]
    notes += [note for row in answer["rows"] for note in row["notes"]]
    for note in dict.fromkeys(notes):
        yield from _wrapped(f"note: {note}")


_WORDS = {
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
    "workspaces unseen": "kernels of RNNs and convolutions take workspaces that cannot be seen: margin of 15 %",
    "fallback": "no compiler here, so kernels of the CPU were traced in the place of CUDA's: margin of 30 %",
}


def _name(row: Mapping[str, Any]) -> str:
    knobs = row["knobs"]
    words = [str(knobs["amp_dtype"]), "with checkpointing" if knobs["activation_checkpointing"] else ""]
    return " ".join(word for word in words if word)


def _gib(size: int) -> str:
    gib = size / GIB_BYTES
    return f"{gib:.2f}" if gib < 99.95 else f"{gib:.0f}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(plain(text), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
