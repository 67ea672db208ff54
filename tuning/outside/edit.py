"""Writes settings into the calls that make a loader or an optimiser in the user's code, as a diff."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

POSITIONS = {"batch_size": 1, "shuffle": 2, "num_workers": 5, "pin_memory": 7}
"""The place of a DataLoader's parameters where they are given without their names."""


@dataclass(frozen=True)
class Edit:
    """Arguments that a call of that name at a line of a file is to have."""

    file: str
    line: int
    call: str
    arguments: Mapping[str, object]


def patch(edits: list[Edit]) -> str:
    """Returns a unified diff that makes the edits, paths as from the working folder; "" if no call can be found."""
    texts: dict[str, str] = {}
    for edit in edits:
        try:
            before = texts.get(edit.file) or Path(edit.file).read_text("utf-8")
            texts[edit.file] = changed(before, edit)
        except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
            continue
    parts = list[str]()
    for file, after in texts.items():
        name = os.path.relpath(file)
        before = Path(file).read_text("utf-8")
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
        parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(parts)


def changed(text: str, edit: Edit) -> str:
    """Returns the source with a call given arguments, by keyword; all other text stays as it is.

    An edit adds no line, so that the numbers of later edits hold. Raises LookupError if no such call is there, or if it
    takes its arguments from a dictionary, which may have the same.
    """
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    at = [n for n in calls if n.lineno <= edit.line <= (n.end_lineno or n.lineno)]
    named = [n for n in at if str(getattr(n.func, "attr", getattr(n.func, "id", ""))).endswith(edit.call)]
    call = named[0] if len(named) == 1 else None
    if call is None or any(word.arg is None for word in call.keywords):
        raise LookupError(f"{edit.call} at line {edit.line}")
    arguments = edit.arguments
    lines = text.splitlines(keepends=True)
    starts = [0]
    for one in lines:
        starts.append(starts[-1] + len(one.encode()))
    raw = text.encode()

    def place(row: int | None, column: int | None) -> int:
        return starts[(row or 1) - 1] + (column or 0)

    known = {word.arg: word.value for word in call.keywords if word.arg}
    known |= {name: call.args[at] for name, at in POSITIONS.items() if at < len(call.args)}
    edits = [
        (place(v.lineno, v.col_offset), place(v.end_lineno, v.end_col_offset), repr(arguments[n]).encode())
        for n, v in known.items()
        if n in arguments
    ]
    added = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in known)
    if added:
        end = place(call.end_lineno, call.end_col_offset) - 1  # of the closing bracket
        inside = [place(v.end_lineno, v.end_col_offset) for v in (*call.args, *(w.value for w in call.keywords))]
        at_end = max(inside, default=end)
        rest = raw[at_end:end]
        comma = b"" if not inside or b"," in rest.split(b"#")[0] else b", "
        where = at_end + (rest.index(b",") + 1 if inside and not comma and b"," in rest else 0)
        space = b" " if inside and not comma else b""
        edits.append((where, where, comma + space + added.encode() + (b"," if inside and not comma else b"")))
    for start, end, new in sorted(edits, reverse=True):
        raw = raw[:start] + new + raw[end:]
    return raw.decode()
