"""Reads YAML that somebody may have edited: plain data only, small, and every key once.

Hydra and PyYAML let the last of two equal keys win or expand aliases without a limit (four levels of nine aliases
are 72 KB and 2 s in OmegaConf), so a file passes here before either sees it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from importlib import resources
from typing import Any

import yaml

from tuning.config.errors import ConfigError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    """YAML's safe types, and 1e-4 read as the number it is to everybody but YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Refused(f"line {node.start_mark.line + 1}: a key must be one word")
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _Refused(f"line {line}: {key.value} was given in line {lines[key.value]} already")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def available(group: str) -> tuple[str, ...]:
    """Returns the files of `search_spaces/<group>/` without their ending, such as the cards for "card"."""
    folder = resources.files("search_spaces") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def of_groups(groups: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields source and content of each file that is composed, a later one winning over an earlier.

    A value of "null" chooses no file. What a card file holds is placed under `card`, as Hydra does.
    """
    for name in ["config.yaml", *(f"{group}/{value}.yaml" for group, value in groups.items() if value != "null")]:
        source = f"search_spaces/{name}"
        try:
            text = (resources.files("search_spaces") / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{source} is not UTF-8 text", remedy="save it as UTF-8") from None
        tree = read(text, source)
        yield source, {"card": tree} if name.startswith("card/") else tree


class _Refused(Exception):
    """Why a text is not read."""


def read(text: str, source: str) -> dict[str, Any]:
    """Returns the mapping that the YAML `text` holds; `source` names the file in errors.

    Raises ConfigError for a repeated key, an alias, an interpolation (`${...}`), a `_target_` key, more than 64 KiB,
    nesting deeper than 20, and anything that is not a mapping.
    """
    remedy = f"edit {source}"
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"{source} has {len(text.encode())} bytes", allowed=f"at most {MAX_BYTES}", remedy=remedy)
    try:
        _check_events(text)
        tree = yaml.load(text, _Loader)  # noqa: S506  (a subclass of SafeLoader)
        if not isinstance(tree, dict):
            raise _Refused(f"expected a mapping at the top, got {type(tree).__name__}")
        _refuse_code(tree)
    except _Refused as refused:
        raise ConfigError(f"{source}: {refused}", remedy=remedy) from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise ConfigError(f"{source}:{line} {error.problem}", remedy=remedy) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-45
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}", remedy=remedy) from None
    return tree


def _refuse_code(value: object) -> None:
    """Raises an error where `value` holds what Hydra would run or look up: `_target_` keys and `${...}`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _Refused(f"the key {key!r} is not text")
            if key == "_target_":
                raise _Refused(f"_target_ is refused, as it names code to run: {inner!r}")
            _refuse_code(inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_code(inner)
    elif isinstance(value, str) and "${" in value:
        raise _Refused(f"{value!r}: interpolation is refused, as it reads other keys or the environment")


def _check_events(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(f"line {_line(event)}: the alias *{event.anchor} is refused; write it out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _Refused(f"line {_line(event)}: nested deeper than {MAX_DEPTH}")


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0
