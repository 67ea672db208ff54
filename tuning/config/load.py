"""From a command line to a checked `StudyConfig`; `tuning.resolve` takes it from there to YAML and back.

    text checks (overrides) -> files chosen and composed (Hydra) -> typed values placed -> types and knobs checked

Hydra composes files and reads the grammar of values. It never sees a key that was not checked, writes nothing, and
its messages do not reach the user. Neither torch, Ray nor Optuna is imported on the way.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainables.knobs import NAMES, Knobs, domain_of
from tuning.config import overrides, yaml_files
from tuning.config.errors import ConfigError
from tuning.config.overrides import Typed, WorkloadRef
from tuning.config.resolve import (
    COMMAND_LINE,
    Tree,
    apply_card,
    check_whole,
    checked,
    checked_options,
    drop_idle,
    from_resolved,
    is_knob,
    leaves,
    refuse_unread,
    resolved,
    with_workload_defaults,
    write_resolved,
)
from tuning.config.schema import (
    BudgetSection,
    ConfirmSection,
    PickSection,
    ProbeSection,
    RungsSection,
    SearchSection,
    StudyConfig,
    WorkloadSection,
)
from tuning.config.space import shown
from tuning.config.yaml_files import available

__all__ = [
    "COMMAND_LINE",
    "BudgetSection",
    "ConfirmSection",
    "PickSection",
    "ProbeSection",
    "RungsSection",
    "SearchSection",
    "StudyConfig",
    "WorkloadSection",
    "apply_card",
    "available",
    "from_resolved",
    "load",
    "resolved",
    "with_workload_defaults",
    "write_resolved",
]

_DEFAULT_GROUPS = {"workload": "nli", "card": "auto", "budget": "quick", "preset": "null"}  # as in config.yaml
_WHOLE = re.compile(r"[-+]?[0-9]+[eE]\+?[0-9]+")
_MAX_WHOLE = 2**53  # above, a float no longer says which whole number was meant
_OPTIONAL_TEXT = ("name", "resume", "search.max_time")


def load(argv: Sequence[str]) -> StudyConfig:
    """Returns the configuration that the command line asks for; raises ConfigError, having written nothing."""
    typed = overrides.parse(argv, available("workload"))
    workload = overrides.choose_workload(
        typed.groups.get("workload", _DEFAULT_GROUPS["workload"]), available("workload")
    )
    groups = _groups(typed, workload)
    files = list(yaml_files.of_groups(groups))  # before Hydra reads them, as it accepts more
    defaults = copy.deepcopy(_composed(tuple(groups.items())))
    own = defaults.pop("at_budget", {}).get(groups["budget"], {})  # what a budget means for this workload
    _overlay(defaults["budget"], own)
    files = [
        *((source, content) for source, content in files),
        (f"search_spaces/workload/{workload.ref}.yaml", {"budget": own}),
    ]
    tree = copy.deepcopy(defaults)
    for key, text in typed.values.items():
        _place(tree, key, text, free_options=not workload.packaged)
    origins = _origins(tree, files, typed)
    declared = defaults.get("workload", {}) if workload.packaged else None
    if workload.packaged:
        refuse_unread(tree["knobs"], defaults["knobs"], workload.ref, origins)
    options = checked_options(tree.get("workload", {}), declared, origins)
    tree["workload"] = {"ref": workload.ref, "name": workload.name, "options": options}
    if not workload.packaged:  # its own space, and with it what is idle, is known once its module is imported
        tree["named"].setdefault("before", Knobs().as_dict())
        config = checked(tree, origins, [], tuple(argv), defaults)
    else:
        dropped = drop_idle(tree["knobs"], origins)
        config = checked(tree, origins, dropped, tuple(argv), defaults)
        check_whole(config.space)
    return apply_card(config, config.card)


def _overlay(below: Tree, above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _overlay(below[key], value)
        else:
            below[key] = value


def _groups(typed: Typed, workload: WorkloadRef) -> dict[str, str]:
    groups = {**_DEFAULT_GROUPS, **typed.groups, "workload": workload.ref if workload.packaged else "null"}
    for group in ("card", "budget", "preset"):
        if group != "preset" or groups[group] != "null":
            overrides.choose(group, groups[group], available(group))
    return groups


@functools.lru_cache(maxsize=8)
def _composed(groups: tuple[tuple[str, str], ...]) -> Tree:
    """Returns the files' tree, not to be changed: composing takes 60 ms, and tests load hundreds of times."""
    chosen = ", ".join(f"{group}={value}" for group, value in groups)
    changes = [f"{group}={value}" if value != "null" else f"~{group}" for group, value in groups]
    try:
        with initialize_config_module("search_spaces", version_base="1.3"):
            config = compose("config", overrides=changes)
    except (HydraException, OmegaConfBaseException) as error:
        first = re.sub(r"https?://\S+", "", str(error)).splitlines()[0]
        raise ConfigError(f"search_spaces/ with {chosen}: {first}", remedy="edit the file named") from None
    tree: Any = OmegaConf.to_container(config)
    return {"knobs": {}, "named": {}, **{str(key): value for key, value in tree.items()}}


def _value(key: str, text: str) -> Any:
    """Returns what was typed as a scalar, list or mapping, by the grammar of Hydra's overrides."""
    if key in overrides.TEXT_KEYS:
        return None if text == "null" and key in _OPTIONAL_TEXT else text
    is_option = key.startswith("workload.")
    said = f"{key}={shown(text)}"
    if is_option and text[0] in "[{":
        raise ConfigError(f"{said}: an option of a workload is one value", remedy=f"{key}=<value>")
    number = next((token for token in re.split(r"[\s,:\[\]{}()]+", text) if _is_parted(token)), None)
    if number is not None and is_option:
        return text
    if number is not None:
        plain = shown(text.replace(number, number.replace("_", "")))
        raise ConfigError(f"{said}: {number} has _ among its digits", allowed="digits alone", remedy=f"{key}={plain}")
    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        if is_option:
            return text
        quoted = f"for text, add quotes: '{key}=\"...\"'"
        raise ConfigError(
            f"{said} cannot be read", allowed="a value, [a,b], {low: a, high: b}", remedy=quoted
        ) from None
    if override.is_sweep_override():
        if is_option:
            return text
        raise _several(key, text)
    value = override.value()
    if isinstance(value, float) and _WHOLE.fullmatch(text.strip()) and abs(value) < _MAX_WHOLE:
        return int(value)  # 1e3 samples are 1000
    _refuse_odd_keys(value, said)
    return value


def _is_parted(token: str) -> bool:
    """Returns whether Hydra takes the token for a number although there is an underscore in it, as 1_6 for 16."""
    if "_" not in token or token[0] == "_":
        return False
    try:
        return math.isfinite(float(token.replace("_", "")))
    except ValueError:
        return False


def _several(key: str, text: str) -> ConfigError:
    """Returns the error for a comma outside brackets: a decimal comma, or what Hydra would take for a sweep."""
    point = text.replace(",", ".") if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", text.strip()) else ""
    if not key.startswith("knobs."):
        what = f"{key}={shown(text)}: a comma parts several values, and {key} has one"
        return ConfigError(what, remedy=f"{key}={point if point.startswith('0.') else '<value>'}")
    choices = "<value>,<value>" if "(" in text else shown(text)
    name = key.removeprefix("knobs.")
    is_decimal = point and name in NAMES and domain_of(name).type is float
    remedy = f"{key}={point} with a decimal point, or {key}=[<value>,<value>] to search two values"
    what = f"{key}={shown(text)} is a sweep; one study searches all its choices"
    return ConfigError(what, remedy=remedy if is_decimal else f"{key}=[{choices}]")


def _refuse_odd_keys(value: object, said: str) -> None:
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    for key in value if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            raise ConfigError(f"{said}: the key {key!r} is not a name", remedy="such as {low: 8, high: 64}")
    for part in inner:
        _refuse_odd_keys(part, said)


def _place(tree: Tree, key: str, text: str, *, free_options: bool) -> None:
    """Puts a typed value into the tree, in place of all that was there; raises ConfigError where nothing reads it."""
    *parents, last = key.split(".")
    section = parents[0] if parents else ""
    said = f"{key}={shown(text)}"
    may_add = section == "knobs" or (section == "named" and len(parents) == 2)
    may_add = may_add or (free_options and parents == ["workload"])
    node = tree
    for depth, part in enumerate(parents, start=1):
        child = node.setdefault(part, {}) if may_add else node.get(part)
        if not isinstance(child, dict):
            above = ".".join(parents[:depth])
            if part not in node:
                raise overrides.unknown_key(key, text, _known(tree))
            raise ConfigError(
                f"{said}: {above} is one value, {shown(child)}, and has no {last}", remedy=f"{above}=<value>"
            )
        node = child
    if last not in node and not may_add:
        raise overrides.unknown_key(key, text, _known(tree))
    if isinstance(node.get(last), dict) and parents != ["knobs"]:
        inner = next(iter(node[last]), "<name>")
        raise ConfigError(f"{said}: {key} is a group of settings", remedy=f"{key}.{inner}=<value>")
    node[last] = _value(key, text)


def _known(tree: Tree) -> list[str]:
    return list(dict.fromkeys([*(f"knobs.{n}" for n in NAMES), *leaves(tree), *overrides.GROUPS]))


def _origins(tree: Tree, files: Sequence[tuple[str, Tree]], typed: Typed) -> dict[str, str]:
    """Returns, for each value of the tree, the file it is from, or that it was typed."""
    origins: dict[str, str] = {}
    for source, content in files:
        origins.update(dict.fromkeys(leaves(content), source))
    ours = {key: origins.get(key, "default") for key in leaves(tree)}
    for key in ours:
        # `knobs.x.low=1` changes a part of the one value that a knob is.
        if any(key == k or key.startswith(f"{k}.") or (is_knob(key) and k.startswith(f"{key}.")) for k in typed.values):
            ours[key] = COMMAND_LINE
    chosen = COMMAND_LINE if "workload" in typed.groups else "search_spaces/config.yaml"
    return {"workload.ref": chosen, "workload.name": chosen, **ours}
