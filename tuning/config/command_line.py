"""The command line: `key=value` texts, checked as text before any parser sees them, and the value each one holds.

Keys that choose a file (`workload=nli`) are told from keys that give a value (`knobs.num_workers=2`).
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.knobs import KnobTable
from tuning.config import yaml_files
from tuning.config.errors import ConfigError
from tuning.config.space import near_knob, shown

GROUPS = ("workload", "card", "budget")
"""Keys whose value names a file of `search_spaces/<key>/`."""

# Their values are text whatever they look like: a run may be called 2026, and a path may hold spaces and brackets.
TEXT_KEYS = ("name", "resume", "runs_dir", "devices", "target", "search.max_time", "search.hang_time")
_OPTIONAL_TEXT = ("name", "resume", "target", "search.max_time")

_SECTIONS = ("knobs", "named", "search", "pick", "budget")  # groups of settings, of which none is a value itself

COMMON_STEMS = ("loop", "main", "run", "train", "training", "workload")
"""Files with these names are called after their folder."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


@dataclass(frozen=True)
class Typed:
    """A command line: the files it chooses, by group, and the values it gives, by dotted key; all still text."""

    groups: dict[str, str]
    values: dict[str, str]


@dataclass(frozen=True)
class WorkloadRef:
    """Which workload: `ref` as `workload_files.load` takes it, `name` fit for a folder, `packaged` if ours."""

    ref: str
    name: str
    packaged: bool


def parse(argv: Sequence[str], workloads: Collection[str] = ()) -> Typed:
    """Returns the command line by key; raises ConfigError for the first item that no value could make right.

    `workloads` are the packaged ones: who types the name of one alone is told how to ask for it.
    """
    typed: dict[str, str] = {}
    for item in argv:
        key, text = _split(item, workloads)
        for other in typed:
            if key == other:
                what = f"{key} is given twice, as {other}={typed[other]} and {item}"
                raise ConfigError(what, remedy="keep one of them")
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                # `card=t4 card.memory_gib=12` chooses a file and then changes a value of it.
                if min(key, other, key=len) in GROUPS:
                    continue
                what = f"{item} and {other}={typed[other]} speak of the same value"
                raise ConfigError(what, remedy="keep one of them")
        typed[key] = text
    return Typed({k: v for k, v in typed.items() if k in GROUPS}, {k: v for k, v in typed.items() if k not in GROUPS})


def choose(group: str, value: str, available: Collection[str]) -> str:
    """Returns `value` when it is the name of a file of the group; raises ConfigError with the nearest and all names."""
    if value in available:
        return value
    names = ", ".join(sorted(available))
    near = difflib.get_close_matches(value.lower(), sorted(available), n=1)
    if group == "workload" and os.access(f"{value}.py", os.F_OK):
        near = [f"{value}.py"]
    usual = {"card": "auto", "budget": "quick", "workload": "nli"}.get(group, "")
    first = near[0] if near else usual if usual in available else min(available)
    allowed = f"{names}; or a dotted module, or the path of a .py file" if group == "workload" else names
    remedy = f"did you mean {group}={first}?" if near else f"{group}={first}"
    if group == "card":  # whoever has a card that is not listed knows its memory
        remedy += f"{'' if near else ','} or, without a GPU here, another card's memory: card=auto card.memory_gib=32"
    raise ConfigError(f"{group}={_short(value)}: there is no such {group}", allowed=allowed, remedy=remedy)


def choose_workload(value: str, available: Collection[str]) -> WorkloadRef:
    """Returns which workload `value` names: one of `available`, a dotted module, or the path of a .py file.

    Nothing is imported. Raises ConfigError for a file that is missing or not a regular file.
    """
    if value.endswith(".py"):
        path = _file(value, available)
        return WorkloadRef(path, _slug(_name(Path(path))), packaged=False)
    if _DOTTED.fullmatch(value) and value not in available:
        top = value.partition(".")[0]
        if not _can_be_found(top):
            what = f"workload={_short(value)}: there is no module {_short(top)}"
            raise ConfigError(what, remedy="run from the folder that holds it")
        return WorkloadRef(value, _slug(value.rpartition(".")[2]), packaged=False)
    return WorkloadRef(choose("workload", value, available), value, packaged=True)


def unknown_key(key: str, text: str, known: Collection[str], table: KnobTable) -> ConfigError:
    """Returns the error for a key that nothing reads, with the one that was probably meant."""
    section, _, last = key.rpartition(".")
    what = f"{_short(f'{key}={text}')}: there is no setting {_short(key)}"
    endings = [k for k in sorted(known, key=len) if k.rpartition(".")[2] == last]
    near = endings or difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)
    if not near and (remedy := near_knob(last, table)).startswith("did you mean"):
        return ConfigError(what, remedy=remedy)
    if near:
        return ConfigError(what, remedy=f"did you mean {near[0]}={_short(text)}?")
    siblings = sorted(k for k in known if k.rpartition(".")[0] == section) or [*GROUPS, "search.trials", "knobs.<name>"]
    return ConfigError(what, allowed=", ".join(siblings[:20]), remedy="use one of these, or see --help")


def _split(item: str, workloads: Collection[str]) -> tuple[str, str]:
    """Returns key and value of one item of the command line, both as typed."""
    if not item.strip():
        raise ConfigError("an argument is empty", allowed="key=value", remedy="leave it out; an unset variable?")
    said = _short(item)
    _check_characters(item)
    if item.startswith("-"):
        raise ConfigError(f"{said} is not a setting", allowed="key=value", remedy="see --help for the flags")
    key, equals, text = item.partition("=")
    bare = key.lstrip("+~").partition("@")[0]
    if not equals:
        is_workload = item in workloads or item.endswith(".py")
        remedy = f"workload={said}" if is_workload else f"{_short(bare)}{'.<name>' * (bare in _SECTIONS)}=<value>"
        raise ConfigError(f"{said} has no value", allowed="key=value", remedy=remedy)
    if not _KEY.fullmatch(key):
        example = f"{_short(bare)}={_short(text)}" if _KEY.fullmatch(bare) else "such as search.trials=40"
        raise ConfigError(f"{said}: {_short(key)} is not a key", allowed="names joined by dots", remedy=example)
    is_option = key.startswith("workload.")  # whose quotes say that 1.10 is text
    value = text.strip() if is_option else unquoted(text.strip()) if is_text(key) else text
    if not value.strip():
        raise ConfigError(f"{said} has no value", remedy=f"{key}=<value>, or leave it out")
    return key, value if is_text(key) else text


def is_text(key: str) -> bool:
    """Returns whether the key's value is text however it is written; a workload's options may be, and are not lists."""
    return key in TEXT_KEYS or key in GROUPS or key.startswith("workload.")


def value_of(key: str, text: str, table: KnobTable) -> Any:
    """Returns what was typed for a key: a scalar, list or mapping of YAML; an option of a workload is one scalar, text
    if it is in quotes.

    Raises ConfigError for what cannot be read, and for several values without brackets.
    """
    said = f"{key}={shown(text)}"
    if key in TEXT_KEYS:
        return None if text == "null" and key in _OPTIONAL_TEXT else text
    if key.startswith("workload."):
        if (quoted := unquoted(text)) != text:
            return quoted
        if text[0] in "[{":
            raise ConfigError(f"{said}: an option of a workload is one value", remedy=f"{key}=<value>")
        return yaml_files.word(text)
    try:  # {low:8,high:64} is meant as {low: 8, high: 64}
        value = yaml_files.value(re.sub(r"(?<=\w):(?=[^\s:])", ": ", text) if "{" in text else text)
    except ValueError as error:
        remedy = f"such as [8,64] or {{low: 8, high: 64}}; for text, add quotes: '{key}=\"...\"'"
        raise ConfigError(f"{said}: {error}", allowed="a value, a list, a range", remedy=remedy) from None
    if isinstance(value, str) and "," in value and text.strip()[0] not in "'\"":
        raise _several(key, text, table)
    return value


def _several(key: str, text: str, table: KnobTable) -> ConfigError:
    """Returns the error for a comma outside brackets: a decimal comma, or several values."""
    point = text.replace(",", ".") if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", text.strip()) else ""
    what = f"{key}={shown(text)}: a comma parts several values"
    if not key.startswith("knobs."):
        return ConfigError(
            f"{what}, and {key} has one", remedy=f"{key}={point if point.startswith('0.') else '<value>'}"
        )
    choices = "<value>,<value>" if "(" in text else shown(text)
    name = key.removeprefix("knobs.")
    is_decimal = point and name in table and table[name].domain.type is float
    remedy = f"{key}={point} with a decimal point, or {key}=[<value>,<value>] to search two values"
    return ConfigError(f"{what}; one run searches a list", remedy=remedy if is_decimal else f"{key}=[{choices}]")


def _check_characters(item: str) -> None:
    key, _, _ = item.partition("=")
    for position, character in enumerate(item, start=1):
        foreign = not character.isascii() and (position <= len(key) or not is_text(key))
        if foreign or not character.isprintable():
            name = unicodedata.name(character, "a control character")
            raise ConfigError(
                f"{_short(item)}: character {position} is U+{ord(character):04X} ({name})",
                allowed="letters, digits and signs of the keyboard; other letters in names and paths only",
                remedy="type it again by hand",
            )


def _file(value: str, available: Collection[str]) -> str:
    stem = Path(value).stem
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        what = f"workload={_short(value)}: there is no user of that name"
        raise ConfigError(what, remedy="give the path of your workload's .py file") from None
    remedy = f"did you mean workload={stem}?" if stem in available else "give the path of your workload's .py file"
    try:
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"workload={_short(value)}: the file {problem}", remedy=remedy)
    except OSError as error:
        raise ConfigError(f"workload={_short(value)}: {error.strerror}", remedy=remedy) from None
    return str(path.resolve())


def _name(path: Path) -> str:
    """Returns what a file is called: the folder's name if many files are called alike."""
    return path.parent.name if path.stem in COMMON_STEMS and path.parent.name else path.stem


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # __main__ and its like have no spec
        return False


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:64] or "workload"


def unquoted(text: str) -> str:
    """Returns the text without the quotes around it, if there are any."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
