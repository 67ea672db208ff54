"""From a command line to a checked `StudyConfig`; `tuning.config.resolve` takes it from there to YAML and back.

    text checks (command_line) -> files chosen and merged -> typed values placed -> types and knobs checked

Neither torch, Ray nor Optuna is imported on the way, and nothing is written.
"""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainables.knobs import KnobTable, table, use
from trainables.our_knobs import OURS
from tuning.config import command_line, yaml_files
from tuning.config.choices import available
from tuning.config.command_line import Typed, WorkloadRef
from tuning.config.errors import ConfigError
from tuning.config.resolve import (
    COMMAND_LINE,
    Tree,
    apply_card,
    check_whole,
    checked,
    checked_options,
    drop_idle,
    is_knob,
    leaves,
)
from tuning.config.schema import StudyConfig
from tuning.config.shareable import is_secret
from tuning.config.space import shown

MINUTE_S = 60
"""Below this a number without a unit is said to be seconds."""
BESIDE_RESUME = ("resume", "runs_dir", "dashboard", "force", "cluster", "insecure_cluster", "devices")
"""What may be typed when a run goes on, as it is of the session and not of the run."""
EXTENDABLE = {"search.max_time": ("max_time_s", "max_time_s"), "search.trials": ("trials", "most_trials")}
"""What a run may be given more of when it goes on: its field, and what that comes to, None without a limit."""
PICK = {"pick.tolerance": "tolerance", "pick.at_least": "at_least", "pick.goal": "goal"}
"""Settings of which a resumed run may be given another value: it then chooses its best configuration again."""


def load(argv: Sequence[str], own_table: Callable[[str], KnobTable] = lambda ref: KnobTable()) -> StudyConfig:
    """Returns the configuration that the command line asks for; raises ConfigError, having written nothing.

    From here on the knobs of its workload are in use. Those of a user's workload are asked of `own_table`, only
    where one is typed, as its file has to be imported.
    """
    typed = command_line.parse(argv, available("workload"))
    secrets = _secrets_of_a_run(typed)
    _check_beside_resume(typed)
    groups, workload = _groups(typed)
    ours = OURS.get(workload.ref, KnobTable({}))
    use(ours if workload.packaged else _own_table(workload.ref, typed, own_table))
    own_data = typed.values.get("workload.data", "null") != "null"
    defaults, files = copy.deepcopy(_merged(tuple(groups.items()), own_data))
    tree = copy.deepcopy(defaults)
    for key, text in typed.values.items():
        _place(tree, key, text, free_options=not workload.packaged)
    origins = _origins(tree, files, typed)
    lacking = list(_meant(typed))
    options = checked_options(tree["workload"], defaults["workload"] if workload.packaged else None, origins)
    tree |= {"workload": {"ref": workload.ref, "name": workload.name, "options": options}, "secrets": secrets}
    if not workload.packaged:  # its own space, and with it what is idle, is known once its module is imported
        config = checked(tree, origins, lacking, tuple(argv), defaults)
    else:
        dropped = [*lacking, *drop_idle(tree["knobs"], origins)]
        config = checked(tree, origins, dropped, tuple(argv), defaults)
        check_whole(config.space, config.search.trials)
    return apply_card(config, config.card)


def _meant(typed: Typed) -> Iterator[str]:
    """Yields a sentence for a time limit of a few seconds without a unit: minutes may be meant."""
    text = typed.values.get("search.max_time", "")
    if text.isdecimal() and int(text) < MINUTE_S:
        yield f"search.max_time={text} is {text} seconds; {text} minutes are search.max_time={text}m"


def _own_table(ref: str, typed: Typed, table_of: Callable[[str], KnobTable]) -> KnobTable:
    """Returns the table of a user's workload: without its own knobs, unless one of them may be typed."""
    parts = [key.split(".") for key in typed.values]
    names = {p[1] if p[0] == "knobs" else p[2] for p in parts if len(p) > {"knobs": 1, "named": 2}.get(p[0], 9)}
    if names <= set(KnobTable()):
        return KnobTable()
    return table_of(ref)


def _groups(typed: Typed) -> tuple[dict[str, str], WorkloadRef]:
    """Returns the file of each group, "null" for none, in the order in which they win, and the workload."""
    ((_, base),) = yaml_files.of_groups({})
    groups = {**{group: name or "null" for group, name in base["defaults"].items()}, **typed.groups}
    workload = command_line.choose_workload(groups["workload"], available("workload"))
    for group in ("card", "budget"):
        command_line.choose(group, groups[group], available(group))
    return {**groups, "workload": workload.ref if workload.packaged else "null"}, workload


@functools.lru_cache(maxsize=8)
def _merged(groups: tuple[tuple[str, str], ...], own_data: bool) -> tuple[Tree, list[tuple[str, Tree]]]:
    """Returns the files' tree and each file's own, not to be changed: tests load hundreds of times.

    What a budget means for a workload holds for the data that come with it: an epoch of `own_data` may take an hour.
    """
    files = list(yaml_files.of_groups(dict(groups)))
    files[0][1].pop("defaults")
    for source, content in list(files):
        content.pop("on_card", None)  # for when the device is known (`resolve.on_cuda`)
        own = content.pop("at_budget", {}).get(dict(groups)["budget"], {})
        files.append((source, {"budget": own} if own and not own_data else {}))
    tree: Tree = {"knobs": {}, "named": {}, "workload": {}}
    for _, content in files:
        _overlay(tree, copy.deepcopy(content))
    return tree, files


def _overlay(below: Tree, above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _overlay(below[key], value)
        else:
            below[key] = value


def _secrets_of_a_run(typed: Typed) -> dict[str, str]:
    """Takes the secrets out of a command line that resumes a run: which workload's they are is in its records."""
    keys = [k for k in typed.values if k.startswith("workload.") and is_secret(k)] if "resume" in typed.values else []
    return {key.removeprefix("workload."): command_line.unquoted(typed.values.pop(key)) for key in keys}


def _check_beside_resume(typed: Typed) -> None:
    """Raises ConfigError for what a run that goes on cannot be given, before it is read as of another workload."""
    run_id = typed.values.get("resume", "null")
    again = (*BESIDE_RESUME, *EXTENDABLE, *PICK)
    others = [f"{key}={text}" for key, text in {**typed.groups, **typed.values}.items() if key not in again]
    if run_id != "null" and others:
        key, _, text = others[0].partition("=")
        if key not in typed.groups and difflib.get_close_matches(key, again, n=1, cutoff=0.85):
            raise command_line.unknown_key(key, text, again)
        raise ConfigError(
            f"{others[0]} beside resume={run_id}: a run goes on with the configuration it began with",
            allowed="resume=ID, dashboard=true, cluster=ADDRESS, devices=N, force=true, runs_dir=PATH, "
            f"{', '.join(PICK)}, and more of {' or '.join(EXTENDABLE)}",
            remedy="leave it out, or start a new run",
        )


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
                raise command_line.unknown_key(key, text, _known(tree))
            raise ConfigError(
                f"{said}: {above} is one value, {shown(child)}, and has no {last}", remedy=f"{above}=<value>"
            )
        node = child
    if last not in node and not may_add:
        raise command_line.unknown_key(key, text, _known(tree))
    if isinstance(node.get(last), dict) and parents != ["knobs"]:
        inner = next(iter(node[last]), "<name>")
        raise ConfigError(f"{said}: {key} is a group of settings", remedy=f"{key}.{inner}=<value>")
    node[last] = command_line.value_of(key, text)


def _known(tree: Tree) -> list[str]:
    return list(dict.fromkeys([*(f"knobs.{n}" for n in table()), *leaves(tree), *command_line.GROUPS]))


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
