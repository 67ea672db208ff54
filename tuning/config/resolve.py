"""Parses a tree of plain values as a `StudyConfig`, and writes one as a record or as YAML.

The tree has the keys of the command line (`search.trials`, `knobs.learning_rate`, ...), wherever its values came from.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainables.knobs import KnobTable, Options, Scalar
from tuning.config import atomic, yaml_files
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.errors import ConfigError, PreflightError, TuningError
from tuning.config.schema import CardSection, StudyConfig, card_as_raw, validated
from tuning.config.shareable import masked, masked_items
from tuning.config.space import Space, parse_parameter, shown
from tuning.config.yaml_files import Tree

COMMAND_LINE = "command line"
TAKEN = ("best", "best_at_speed", "most_accurate", "config", "plain_defaults")
"""Files of a run, so no names of configurations."""

GONE = {"gp": "known", "rungs": "reference"}
"""Samplers and pruners of earlier versions, with what came in their place."""


def parse_tree(
    tree: Tree,
    origins: dict[str, str],
    dropped: list[str],
    argv: tuple[str, ...],
    defaults: Mapping[str, object],
    table: KnobTable,
) -> StudyConfig:
    """Returns the configuration a tree describes, each section and knob checked by itself; raises ConfigError.

    `origins` has the source of each dotted key, `defaults` its value without the command line.
    """
    if taken := [name for name in tree["named"] if name in TAKEN]:
        what = f"named.{taken[0]}: that is the name of something else in a run"
        remedy = f"named.mine in place of named.{taken[0]}"
        raise ConfigError(what, allowed=f"any other than {', '.join(TAKEN)}", remedy=remedy)
    raw = {
        **{key: value for key, value in tree.items() if key != "knobs"},
        "card": validated(CardSection, tree["card"], "card", origins, defaults).card(),
        "space": parse_space(tree["knobs"], origins, table),
        "named": {n: parse_named(f"named.{n}", values, origins, table) for n, values in tree["named"].items()},
        "origins": origins,
        "dropped": dropped,
        "overrides": argv,
    }
    return validated(StudyConfig, raw, "", origins, defaults)


def measured_beside(config: StudyConfig) -> list[str]:
    """Returns the names of the configurations that a pick is compared with.

    The plain defaults are among them, unless there is a `before`.
    """
    return list(dict.fromkeys([*config.named, *([] if BEFORE in config.named else [PLAIN])]))


def resolved(config: StudyConfig) -> Tree:
    """Returns the configuration as plain scalars, lists and dicts, as a journal records it: without secrets."""
    left_out = {"card", "space", "named", "secrets"}
    tree: Tree = config.model_dump(exclude=left_out, by_alias=True)
    tree["overrides"] = masked_items(config.overrides)
    tree["workload"]["options"] = masked(config.workload.options)
    tree["card"] = card_as_raw(config.card)
    tree["knobs"] = config.space.as_raw()
    tree["named"] = copy.deepcopy(config.named)
    order = ("workload", "card", "budget", "search", "pick", "knobs", "named")
    return {**{key: tree[key] for key in order}, **tree}


def from_resolved(mapping: Mapping[str, object], table: KnobTable) -> StudyConfig:
    """Returns the configuration that `resolved` made `mapping` of; raises ConfigError if it no longer passes.

    A run of an earlier version goes on with what came in place of a setting that is gone.
    """
    tree: Tree = copy.deepcopy(dict(mapping))
    search, pick = (tree.get(part, {}) for part in ("search", "pick"))
    if isinstance(search, dict) and isinstance(pick, dict):
        if search.get("strategy") == "staged":  # the other, joint, has nothing in its place
            del search["strategy"]
        search |= {name: GONE[search[name]] for name in ("sampler", "pruner") if search.get(name) in GONE}
        tree["pick"] = {"at_least": None, "goal": "speed", **pick}
    if isinstance(named := tree.get("named"), dict):  # which had what a document claimed of them
        tree["named"] = {name: own for name, own in named.items() if name not in ("source", "claims", "claims_of")}
    origins, dropped, argv = tree.pop("origins", {}), tree.pop("dropped", []), tree.pop("overrides", [])
    for key in ("card", "knobs", "named"):
        if not isinstance(tree.get(key), Mapping):
            what = f"{key}={tree.get(key)!r} in a recorded configuration is no mapping"
            raise ConfigError(what, remedy="start a new run")
    return parse_tree(tree, origins, dropped, tuple(argv), {}, table)


def write_resolved(config: StudyConfig, path: Path) -> None:
    """Writes the configuration as YAML, after each value its source; an existing file is replaced whole."""
    tree = resolved(config)
    origins = tree.pop("origins")
    atomic.write_text(path, "\n".join(_yaml_lines(tree, "", origins)) + "\n")


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each setting; a knob's is one value, an empty group has none."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not is_knob(key):
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def nested(values: Mapping[str, object]) -> Tree:
    """Returns the tree of dotted keys and their values; groups in which any name may be are there, if empty."""
    tree: Tree = {"knobs": {}, "named": {}, "workload": {}}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def is_knob(key: str) -> bool:
    """Returns whether a dotted key is that of one knob's values."""
    return key.startswith("knobs.") and key.count(".") == 1


def parse_space(raw: Mapping[str, object], origins: Mapping[str, str], table: KnobTable) -> Space:
    """Returns the space, each knob checked by itself; errors name the file a bad one is in."""
    for name, value in raw.items():
        with _located(f"knobs.{name}", origins):
            parse_parameter(name, value, table)
    return Space.parse(raw, table)


def drop_idle(knobs: Tree, origins: Mapping[str, str], table: KnobTable) -> list[str]:
    """Takes out of `knobs` what a file searches and what is typed leaves without effect; returns a sentence for each.

    So `knobs.num_workers=0` is enough: nobody has to take back the prefetch depths of the workload's file.
    """
    space = parse_space(knobs, origins, table)
    idle = [n for n in space.without_effect() if origins.get(f"knobs.{n}") != COMMAND_LINE]
    return [f"knobs.{n}={shown(knobs.pop(n))} is left out: {space.unmet(n)}" for n in idle]


def check_whole(space: Space, trials: int | str) -> None:
    """Raises ConfigError for a space with a knob that has no effect, or with nothing that `trials` could search."""
    for name in space.without_effect():
        what = f"knobs.{name}={shown(space.as_raw()[name])} has no effect: {space.unmet(name)}"
        raise ConfigError(what, remedy=f"add {space.table.requiring[name].example}, or leave out knobs.{name}")
    if not space.parameters and trials != 0:
        raise ConfigError(
            f"knobs: all {len(space.fixed)} have one value each, so there is nothing to search",
            remedy="give one of them choices, such as knobs.batch_size=[16,32,64]; with search.trials=0 it is measured "
            "as it is, and best.yaml has it",
        )


def check_options(given: Options, defaults: Options | None, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for an unknown option of a workload, and for one that has not the type of its default.

    None as a default takes any scalar. `defaults` is None until a user's workload is imported: then any name is taken.
    """
    for name, value in given.items():
        key = f"workload.{name}"
        origin = origins.get(key, COMMAND_LINE)
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        if defaults is not None and name not in defaults:
            near = difflib.get_close_matches(name, list(defaults), n=1)
            remedy = f"did you mean workload.{near[0]}?" if near else f"leave out {key}"
            what = f"{key}={shown(value)}: the workload has no option {name}{where}"
            raise ConfigError(what, allowed=", ".join(sorted(defaults)) or "no options", remedy=remedy)
        default = None if defaults is None else defaults[name]
        wanted = SCALARS if default is None else (int, float) if type(default) is float else (type(default),)
        if type(value) not in wanted and (value is not None or default is not None):
            words = " or ".join(_TYPE_WORDS[t] for t in wanted if t is not int or float not in wanted)
            example = "<value>" if default is None else shown(default)
            raise ConfigError(f"{key}={shown(value)} is not allowed{where}", allowed=words, remedy=f"{key}={example}")


def workload_said(text: str) -> str:
    """Returns the words of the WorkloadError or DataError that ended another process, "" if neither did.

    `text` ends with the other process's traceback.
    """
    starts = [m.end() for m in re.finditer(r"^(?:[\w.]+\.)?(?:WorkloadError|DataError): ", text, re.MULTILINE)]
    return text[starts[-1] :].strip() if starts else ""


def option_fault(message: str, options: Options) -> TuningError:
    """Returns the error for what a workload says of its data and options, with the option it speaks of named first.

    If a package is missing, it is a PreflightError with the command that installs it, else a ConfigError. The message
    may bring a remedy, after "; try: ".
    """
    text = " ".join(message.split())
    if install := re.search(r"pip install '[^']+'", text):
        return PreflightError(text[:400], remedy=install[0])
    text, _, remedy = text.partition("; try: ")
    what, _, allowed = text.partition("; allowed: ")
    if not allowed and ": expected " in text:
        what, _, allowed = text.partition(": expected ")
        what += " is not allowed"
    named = re.findall(r"\bworkload\.(\w+)|\b(\w+)=", text)
    texts = [n for n, v in options.items() if isinstance(v, str) and len(v) > 1 and v in text]
    key = next((n for n in (*(a or b for a, b in named), *texts) if n in options), "")
    if key and f"workload.{key}" not in what:
        what = f"workload.{key}={shown(options[key])}: {what}"
    remedy = remedy or (f"another workload.{key}, or leave it out" if key else "mend what it names")
    return ConfigError(what[:400], allowed=allowed[:200], remedy=remedy)


_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SCALARS = (bool, int, float, str)


def parse_named(key: str, values: object, origins: Mapping[str, str], table: KnobTable) -> dict[str, Scalar]:
    """Returns a named configuration, every value one that its knob may take; raises ConfigError for another."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={shown(values)} is not a configuration", remedy=f"{key}.<knob>=<value>")
    config: dict[str, Scalar] = {}
    for name, value in values.items():
        with _located(f"{key}.{name}", origins, instead=("knobs.", f"{key}.")):
            parsed = parse_parameter(name, value, table)
            if not isinstance(parsed, bool | int | float | str) or isinstance(value, list):
                what = f"{key}.{name}={shown(value)}: a named configuration has one value for each knob"
                raise ConfigError(what, remedy=f"{key}.{name}=<value>")
            config[name] = parsed
    return config


@contextmanager
def _located(key: str, origins: Mapping[str, str], instead: tuple[str, str] = ("", "")) -> Iterator[None]:
    """Adds the source of `key` to an error raised inside; `instead` is a text in its words and the one in its place."""
    try:
        yield
    except ConfigError as error:
        origin = origins.get(key, COMMAND_LINE)
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        what = error.what.replace(*instead) + where
        raise ConfigError(what, allowed=error.allowed, remedy=error.remedy.replace(*instead)) from None


def _yaml_lines(tree: Mapping[str, object], prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not is_knob(key):
            yield f"{indent}{yaml_files.line(name)}:"
            yield from _yaml_lines(value, f"{key}.", origins)
        elif isinstance(value, list) and value and not prefix:  # `dropped` and `overrides`: a sentence or item a line
            yield f"{yaml_files.line(name)}:"
            yield from (f"- {yaml_files.line(item)}" for item in value)
        else:
            origin = origins.get(key.replace("workload.options.", "workload."))
            yield f"{indent}{yaml_files.line(name)}: {yaml_files.line(value)}" + (f"  # {origin}" if origin else "")
