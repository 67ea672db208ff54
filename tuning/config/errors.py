"""The errors a user may see, and the exit code of each.

    TuningError            1   it ran, and there is no usable trial
    +-- UserCodeError      1   the code of a workload failed, or returned what the loop cannot use
    +-- ConfigError        2   the command line, a configuration file, or the data it names; nothing was run or written
    +-- PreflightError     3   this machine cannot run it: card, memory, disk, ports, packages
    +-- StoppedEarly       4   stopped before its end, and can be resumed

130 and 143 are SIGINT and SIGTERM, 141 is a pipe that nobody reads any more, as shells have it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_LINES = 8


_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a group of settings",
    "model_type": "a group of settings",
    "too_short": "{min_length} values or more",
    "too_long": "{max_length} values or fewer",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


class TuningError(Exception):
    """An error that people can act on: what is wrong, the value, what is allowed, what to do.

    `what` names the file or key first, and the value if there is one; `allowed` and `remedy` are one line each.
    """

    exit_code: ClassVar[int] = 1
    elsewhere = False
    """Whether another machine may run it: what failed is a package, a file or a driver."""

    def __init__(self, what: str, *, allowed: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.allowed, self.remedy = what, allowed, remedy

    def __str__(self) -> str:
        """Returns at most eight lines, the remedy last, without control characters."""
        lines = [f"error: {self.what}"]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        text = "\n".join(lines)
        clean = "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)
        kept = clean.splitlines()
        return "\n".join(kept if len(kept) <= MAX_LINES else [*kept[: MAX_LINES - 1], kept[-1]])


class ConfigError(TuningError):
    """The command line, a configuration file, or the data that one of them names is wrong."""

    exit_code = 2


class PreflightError(TuningError):
    """This machine cannot run it."""

    exit_code = 3
    elsewhere = True


class UserCodeError(TuningError):
    """The code of a workload failed; `traceback` is theirs, without our frames, for -v."""

    def __init__(
        self, what: str, *, allowed: str = "", remedy: str = "", traceback: str = "", elsewhere: bool = False
    ) -> None:
        super().__init__(what, allowed=allowed, remedy=remedy)
        self.traceback, self.elsewhere = traceback, elsewhere


class StoppedEarly(TuningError):
    """The run ended before its time and can be resumed."""

    exit_code = 4


class NoUsableTrial(TuningError):
    """Every trial failed, was refused, or diverged."""


def allowed_by(fault: ErrorDetails) -> str:
    """Returns what is allowed instead of a fault that pydantic found, in words; `fault` is one of its `errors()`."""
    limits = {name: f"{x:g}" if isinstance(x, float) else x for name, x in fault.get("ctx", {}).items()}
    if fault["type"] == "literal_error":
        return str(limits["expected"]).replace("'", "")
    if fault["type"] in _ALLOWED:
        return _ALLOWED[fault["type"]].format(**limits)
    return str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")


def require_platform() -> None:
    """Raises PreflightError on native Windows and on macOS, which lack the limits that workers are held by."""
    others = {
        "win32": ("native Windows", "wsl --install, then install it there"),
        "darwin": ("macOS", "a Linux machine, or a container"),
    }
    if sys.platform in others:
        name, remedy = others[sys.platform]
        what = f"cardtune runs on Linux, and this is {name}"
        raise PreflightError(what, allowed="Linux, or WSL2 on Windows", remedy=remedy)


def reader_has_gone() -> int:
    """Returns the exit code for a pipe whose reader has gone, as `head` does; the last flush then succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
