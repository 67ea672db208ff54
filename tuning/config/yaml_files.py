"""Reads YAML that somebody may have edited: plain data only, small, and every key once.

Words and numbers are those of YAML 1.2: `off`, `yes`, `010`, `1:30` and `2026-01-01` are text, 1e-4 is a number, and
1e3 is the whole number 1000.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from importlib import resources
from typing import Any

import yaml

from tuning.config.choices import available
from tuning.config.errors import ConfigError

MAX_BYTES = 64 * 1024
Tree = dict[str, Any]
"""Plain values by their keys, as YAML has them."""

_PLAIN_WORDS = (  # tag, pattern, first characters; the first that fits says what a word is
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)(?:[eE]\+?[0-9]{1,2})?", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """YAML's safe types, without aliases and tags, and with text as keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (none of YAML 1.1's)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # of the stubs
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(f"line {line}: the alias *{event.anchor} is refused; write it out")
        if tag := getattr(event, "tag", None):
            raise _Refused(f"line {line}: the tag {tag} is refused")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _Refused(f"line {node.start_mark.line + 1}: a key must be one word of text")
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _Refused(f"line {line}: {key.value} was given in line {lines[key.value]} already")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    mantissa, _, exponent = str(node.value).lower().partition("e")
    return int(f"{mantissa}{'0' * int(exponent or 0)}")


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that either version of YAML would take for something else."""


for _tag, _pattern, _first in _PLAIN_WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def of_groups(groups: Mapping[str, str]) -> Iterator[tuple[str, Tree]]:
    """Yields source and content of each packaged file that is merged, a later one winning over an earlier.

    A value of "null" chooses no file. The content of a card file is placed under `card`.
    """
    for name in ["config.yaml", *(f"{group}/{value}.yaml" for group, value in groups.items() if value != "null")]:
        source = f"search_spaces/{name}"
        try:
            text = (resources.files("search_spaces") / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{source} is not UTF-8 text", remedy="save it as UTF-8") from None
        tree = read(text, source)
        yield source, {"card": tree} if name.startswith("card/") else tree


def on_card(workload: str) -> Tree:
    """Returns the knobs that a packaged workload has for a CUDA device; {} of a user's workload."""
    if workload not in available("workload"):
        return {}
    source = f"workload/{workload}.yaml"
    text = (resources.files("search_spaces") / source).read_text(encoding="utf-8")
    return dict(read(text, f"search_spaces/{source}").get("on_card", {}))


class _Refused(ValueError):
    """Why a text is not read."""


def read(text: str, source: str) -> Tree:
    """Returns the mapping that the YAML `text` holds; `source` names the file in errors.

    Raises ConfigError for a repeated key, one that is no text, an alias, a tag, more than 64 KiB, nesting too deep to
    be read, and anything that is not a mapping.
    """
    remedy = f"edit {source}"
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"{source} has {len(text.encode())} bytes", allowed=f"at most {MAX_BYTES}", remedy=remedy)
    try:
        tree = value(text)
        if not isinstance(tree, dict):
            raise _Refused(f"expected a mapping at the top, got {type(tree).__name__}")
    except ValueError as refused:
        raise ConfigError(f"{source}: {refused}", remedy=remedy) from None
    return tree


def value(text: str) -> Any:
    """Returns the scalar, list or mapping that `text` holds; raises ValueError that says what is wrong with it."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a subclass of SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _Refused(f"{line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise _Refused(str(error).splitlines()[0]) from None
    except RecursionError:
        raise _Refused("nested too deep") from None


def dump(tree: object, *, width: int = 110, flow: bool = False) -> str:
    """Returns YAML that `read` and other readers take for the same plain data; `flow` puts it on one line."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow)


def line(tree: object) -> str:
    """Returns the YAML of `dump` on one line, as one would type it."""
    return dump(tree, width=10**6, flow=True).removesuffix("\n").removesuffix("\n...")


def word(text: str) -> Any:
    """Returns null, true, false or a number if the text is one of these, else the text as it is."""
    return value(text) if any(re.fullmatch(pattern, text) for _, pattern, _ in _PLAIN_WORDS) else text
