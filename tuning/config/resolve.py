"""Between a tree of plain values and a `StudyConfig`: the checks on the way there, a record and YAML on the way back.

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

from trainables.knobs import Knobs, Scalar, table
from tuning.config import atomic, yaml_files
from tuning.config.cards import Card, honoured, restrict
from tuning.config.choices import available
from tuning.config.errors import ConfigError, PreflightError, TuningError
from tuning.config.schema import AFTER, BEFORE, PLAIN, CardSection, StudyConfig, WorkloadSection, card_as_raw, validated
from tuning.config.shareable import masked, masked_items
from tuning.config.space import Space, parse_parameter, shown

COMMAND_LINE = "command line"
COMPILED_S, COMPILED_PROBES_S = 900.0, 120.0
"""A study of less time, or whose probes have less, compiles nothing of its own accord."""

RENAMED = {"sampler": {"gp": "known"}, "pruner": {"rungs": "reference"}}
"""Settings of `search` that runs of earlier versions have recorded, and what has taken their place."""
LATER: Mapping[str, Any] = {"at_least": None, "goal": "speed"}
"""Settings of `pick` that those lack."""
CLAIMS = {"source", "claims", "claims_of"}
"""What those have beside the configurations in `named`: what a document claimed of them. Nothing reads it any more."""

TAKEN = ("best", "best_at_speed", "most_accurate", "config", "plain_defaults")
"""Files of a run, so no names of configurations."""

Tree = dict[str, Any]


def checked(
    tree: Tree, origins: dict[str, str], dropped: list[str], argv: tuple[str, ...], defaults: Tree
) -> StudyConfig:
    """Returns the configuration a tree describes, each section and knob checked by itself; raises ConfigError.

    `origins` says where each dotted key comes from, `defaults` is the tree without the command line.
    """
    remedies = dict(flat(defaults))
    if taken := [name for name in tree["named"] if name in TAKEN]:
        raise ConfigError(
            f"named.{taken[0]}: that is the name of something else in a run",
            allowed=f"any other than {', '.join(TAKEN)}",
            remedy=f"named.mine in place of named.{taken[0]}",
        )
    raw = {
        **{key: value for key, value in tree.items() if key != "knobs"},
        "card": validated(CardSection, tree["card"], "card", origins, remedies).card(),
        "space": parsed_space(tree["knobs"], origins),
        "named": {name: _named(f"named.{name}", values, origins) for name, values in tree["named"].items()},
        "origins": origins,
        "dropped": dropped,
        "overrides": argv,
    }
    return validated(StudyConfig, raw, "", origins, remedies)


def apply_card(config: StudyConfig, card: Card) -> StudyConfig:
    """Returns the configuration on `card`, without the knob values the card cannot honour, each listed in `dropped`.

    Raises ConfigError when such a value was asked for on the command line. A card whose device is "auto" refuses
    nothing but types it does not list: call this again with the card that was found. `after` is left out on a CPU, and
    has no more workers than there are cores.
    """
    asked = {n for n in table() if config.origins.get(f"knobs.{n}") == COMMAND_LINE}
    space, dropped = restrict(config.space, card, asked)
    named: dict[str, dict[str, Scalar]] = {}
    typed = {key.split(".")[1] for key, o in config.origins.items() if o == COMMAND_LINE and key.startswith("named.")}
    for name, values in config.named.items():
        own = dict(values)
        if name == AFTER and name not in typed:
            if card.device == "cpu":
                continue
            if card.cores and (workers := int(own.get("num_workers") or 0)) > card.cores:
                own["num_workers"] = card.cores
                said = f"{card.cores} core{'s' * (card.cores > 1)} here"
                dropped.append(f"named.{name}.num_workers={workers} goes to {card.cores}: {said}")
        named[name], sentences = honoured(card, own, f"named.{name}")
        dropped += sentences
    before, after = card_as_raw(config.card), card_as_raw(card)
    found = {f"card.{key}": "found on this machine" for key, value in after.items() if value != before[key]}
    update = {"card": card, "space": space, "named": named, "origins": {**config.origins, **found}}
    return config.model_copy(update={**update, "dropped": list(dict.fromkeys([*config.dropped, *dropped]))})


def on_cuda(config: StudyConfig) -> StudyConfig:
    """Returns the configuration with its workload's knobs for a CUDA device, as far as they were not given otherwise.

    In a short study nothing is compiled that was not asked for: that takes a minute or so, for each model and shape.
    """
    ref, limit_s = config.workload.ref, config.search.max_time_s
    origins = {f"knobs.{n}": f"search_spaces/workload/{ref}.yaml" for n in yaml_files.on_card(ref)} | config.origins
    own = {n: v for n, v in yaml_files.on_card(ref).items() if origins[f"knobs.{n}"] != COMMAND_LINE}
    dropped = list(config.dropped)
    probes_s = config.budget.probe.max_time_s
    if "compile" in own and (probes_s < COMPILED_PROBES_S or (limit_s is not None and limit_s < COMPILED_S)):
        del own["compile"]
        said = "it takes a minute or so for each model; budget=full has it, from search.max_time=15m on"
        dropped.append(f"knobs.compile is left out: {said}")
    raw = {**config.space.as_raw(), **own}
    dropped += drop_idle(raw, origins)
    update = {"space": parsed_space(raw, origins), "origins": origins, "dropped": dropped}
    return config.model_copy(update=update)


def _largest(sizes: object) -> int | None:
    """Returns the largest of the sizes that a space gives: one, a list, or a range; None where it gives none."""
    given = sizes.get("high", sizes.get("values")) if isinstance(sizes, Mapping) else sizes
    found = [size for size in (given if isinstance(given, list | tuple) else [given]) if type(size) is int]
    return max(found, default=None)


def with_workload_defaults(
    config: StudyConfig,
    default_space: Mapping[str, object],
    options: Mapping[str, Scalar | None],
    before: Mapping[str, Scalar] | None = None,
    epochs: float | None = None,
) -> StudyConfig:
    """Returns the configuration of a user's workload, completed with what its module declares.

    What was typed wins over `default_space`, over the defaults in `options`, and over `before`, the configuration that
    gains are measured against; where there is none, those are the plain defaults. What is not searched has the value of
    `before`. No trial whose length the time decides is longer than `epochs`. Raises ConfigError for an unknown option
    or one of another type, and for a bad space. A packaged workload has all this in its YAML: unchanged.
    """
    ref = config.workload.ref
    if ref in available("workload"):
        return config
    for name, value in options.items():
        if value is not None and type(value) not in _SCALARS:
            raise ConfigError(
                f"workload={ref}: the option {name}={shown(value)} is a {type(value).__name__}",
                allowed="true or false, a number, text or None",
                remedy=f"give {name} as one text, and take it apart in the file",
            )
    defaults = {**{f"knobs.{n}": ref for n in default_space}, **{f"workload.{n}": ref for n in options}}
    origins = {**defaults, **config.origins}
    typed_before = config.named.get(BEFORE, {})
    own = {**(_named("BEFORE", before, {}) if before is not None else {}), **typed_before}
    knobs = {**own, **default_space, **config.space.as_raw()}  # what is not searched stays as it is trained today
    plain_batch = Knobs().batch_size
    whole = _largest(knobs.get("batch_size", plain_batch))
    if whole is not None:  # a plain loop takes its batch in one pass
        knobs.setdefault("micro_batch_size", whole)
        if own:
            own.setdefault("micro_batch_size", own.get("batch_size", plain_batch))
    dropped = [*config.dropped, *drop_idle(knobs, origins)]
    space = parsed_space(knobs, origins)
    check_whole(space, config.search.trials)
    merged = checked_options({**options, **config.workload.options}, options, origins)
    workload = WorkloadSection(ref=ref, name=config.workload.name, options=merged, epochs=epochs)
    plain = Knobs().as_dict() | {"micro_batch_size": plain_batch}
    reference = {BEFORE: own} if own else {PLAIN: plain}
    named = {**reference, **{name: values for name, values in config.named.items() if name != BEFORE}}
    update = {"workload": workload, "space": space, "named": named, "origins": origins, "dropped": dropped}
    return apply_card(config.model_copy(update=update), config.card)


def measured_beside(config: StudyConfig) -> list[str]:
    """Returns the names of the configurations that a pick is measured beside.

    The plain defaults are among them, but where a file of the user's own says what is trained today.
    """
    is_own = BEFORE in config.named and config.workload.ref not in available("workload")
    return list(dict.fromkeys([*config.named, *([] if is_own else [PLAIN])]))


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


def from_resolved(mapping: Mapping[str, Any]) -> StudyConfig:
    """Returns the configuration that `resolved` made `mapping` of, now or in an earlier version; raises ConfigError
    where it no longer passes.
    """
    tree = copy.deepcopy(dict(mapping))
    if isinstance(search := tree.get("search"), dict):
        search |= {n: names.get(search[n], search[n]) for n, names in RENAMED.items() if n in search}
    if isinstance(pick := tree.get("pick"), dict):
        tree["pick"] = {**LATER, **pick}
    origins, dropped, argv = tree.pop("origins", {}), tree.pop("dropped", []), tree.pop("overrides", [])
    for key in ("card", "knobs", "named"):
        if not isinstance(tree.get(key), Mapping):
            raise ConfigError(
                f"{key}={tree.get(key)!r} in a recorded configuration is no mapping", remedy="start a new run"
            )
    if tree["named"].keys() >= CLAIMS:
        tree["named"] = {name: own for name, own in tree["named"].items() if name not in CLAIMS}
    return checked(tree, origins, dropped, tuple(argv), {})


def write_resolved(config: StudyConfig, path: Path) -> None:
    """Writes the configuration as YAML, behind each value where it comes from; an existing file is replaced whole."""
    tree = resolved(config)
    origins = tree.pop("origins")
    atomic.write_text(path, "\n".join(_yaml_lines(tree, "", origins)) + "\n")


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each setting; a knob's is one value, an empty group has none."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not is_knob(key):
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def leaves(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields the dotted key of each setting."""
    return (key for key, _ in flat(tree))


def is_knob(key: str) -> bool:
    """Returns whether a dotted key is that of one knob's values."""
    return key.startswith("knobs.") and key.count(".") == 1


def parsed_space(raw: Mapping[str, object], origins: Mapping[str, str]) -> Space:
    """Returns the space, each knob checked by itself; errors name the file a bad one is in."""
    for name, value in raw.items():
        with _located(f"knobs.{name}", origins):
            parse_parameter(name, value)
    return Space.parse(raw)


def drop_idle(knobs: Tree, origins: Mapping[str, str]) -> list[str]:
    """Takes out of `knobs` what a file searches and what is typed leaves without effect; returns a sentence for each.

    So `knobs.num_workers=0` is enough: nobody has to take back the prefetch depths of the workload's file.
    """
    idle = [n for n in parsed_space(knobs, origins).without_effect() if origins.get(f"knobs.{n}") != COMMAND_LINE]
    space = parsed_space(knobs, origins)
    return [f"knobs.{n}={shown(knobs.pop(n))} is left out: {space.unmet(n)}" for n in idle]


def check_whole(space: Space, trials: int | str) -> None:
    """Raises ConfigError for a space with a knob that has no effect, or with nothing that `trials` could search."""
    Space.of(space.as_raw())
    if not space.parameters and trials != 0:
        raise ConfigError(
            f"knobs: all {len(space.fixed)} have one value each, so there is nothing to search",
            remedy="give one of them choices, such as knobs.batch_size=[16,32,64]; with search.trials=0 it is measured "
            "as it is, and best.yaml has it",
        )


def checked_options(given: Mapping[str, Any], defaults: Mapping[str, Any] | None, origins: Mapping[str, str]) -> Tree:
    """Returns the workload's options, each of the type of its default; None as a default takes any scalar.

    `defaults` is None while a user's workload is not imported: then any name is taken.
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
        wanted = _SCALARS if default is None else (int, float) if type(default) is float else (type(default),)
        if type(value) not in wanted and (value is not None or default is not None):
            words = " or ".join(_TYPE_WORDS[t] for t in wanted if t is not int or float not in wanted)
            example = "<value>" if default is None else shown(default)
            raise ConfigError(f"{key}={shown(value)} is not allowed{where}", allowed=words, remedy=f"{key}={example}")
    return dict(given)


def workload_said(text: str) -> str:
    """Returns the words of the WorkloadError or DataError that ended another process, "" where none of them did.

    `text` ends with the other process's traceback.
    """
    starts = [m.end() for m in re.finditer(r"^(?:[\w.]+\.)?(?:WorkloadError|DataError): ", text, re.MULTILINE)]
    return text[starts[-1] :].strip() if starts else ""


def option_fault(message: str, options: Mapping[str, Any]) -> TuningError:
    """Returns the error for what a workload says of its data and options, with the option it speaks of named first.

    Where a package is missing it is a PreflightError with the command that installs it, else a ConfigError. Its remedy
    is what the message says behind "; try: ", if it does.
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
_SCALARS = (bool, int, float, str)


def _named(key: str, values: object, origins: Mapping[str, str]) -> dict[str, Scalar]:
    """Returns a named configuration, every value one that its knob may take."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={shown(values)} is not a configuration", remedy=f"{key}.<knob>=<value>")
    config: dict[str, Scalar] = {}
    for name, value in values.items():
        with _located(f"{key}.{name}", origins, instead=("knobs.", f"{key}.")):
            parsed = parse_parameter(name, value)
            if not isinstance(parsed, bool | int | float | str) or isinstance(value, list):
                raise ConfigError(
                    f"{key}.{name}={shown(value)}: a named configuration has one value for each knob",
                    remedy=f"{key}.{name}=<value>",
                )
            config[name] = parsed
    return config


@contextmanager
def _located(key: str, origins: Mapping[str, str], instead: tuple[str, str] = ("", "")) -> Iterator[None]:
    """Adds to an error raised inside where `key` comes from, with a key put `instead` of another in what it says."""
    try:
        yield
    except ConfigError as error:
        origin = origins.get(key, COMMAND_LINE)
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        raise ConfigError(
            error.what.replace(*instead) + where, allowed=error.allowed, remedy=error.remedy.replace(*instead)
        ) from None


def _yaml_lines(tree: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
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
