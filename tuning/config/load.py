"""From a command line to a `StudyConfig` as it was asked for; `tuning.config.complete` makes the one that is run.

    text checks (command_line) -> layers: packaged files, then what was typed -> types and knobs checked (resolve)

A layer maps dotted keys to values; a later layer wins, and each key keeps the source of its value. Neither torch, Ray
nor Optuna is imported on the way, and nothing is written.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainables.knobs import LOOP, KnobTable
from trainables.our_knobs import OURS
from tuning.config import command_line, yaml_files
from tuning.config.choices import available
from tuning.config.command_line import Typed, WorkloadRef
from tuning.config.errors import ConfigError
from tuning.config.resolve import (
    COMMAND_LINE,
    check_options,
    check_whole,
    drop_idle,
    flat,
    is_knob,
    nested,
    parse_tree,
)
from tuning.config.schema import StudyConfig
from tuning.config.shareable import is_secret
from tuning.config.space import shown
from tuning.config.yaml_files import Tree

MINUTE_S = 60
"""Below this a number without a unit is said to be seconds."""
BESIDE_RESUME = ("resume", "runs_dir", "dashboard", "force", "cluster", "insecure_cluster", "devices")
"""Settings that may be typed with `resume`: they are of the session, and not of the run."""
EXTENDABLE = {"search.max_time": ("max_time_s", "max_time_s"), "search.trials": ("trials", "most_trials")}
"""Settings that a resumed run may have more of: the field, and the property with its effect, None without a limit."""
PICK = {"pick.tolerance": "tolerance", "pick.at_least": "at_least", "pick.goal": "goal"}
"""Settings of which a resumed run may be given another value: it then chooses its best configuration again."""


def load(argv: Sequence[str], own_table: Callable[[str], KnobTable] = lambda ref: LOOP) -> StudyConfig:
    """Returns the configuration that the command line asks for; raises ConfigError, having written nothing.

    The knobs of a user's workload are asked of `own_table`, only if one is typed, as its file has to be imported.
    """
    typed = command_line.parse(argv, available("workload"))
    secrets = _secrets_of_a_run(typed)
    _check_beside_resume(typed)
    groups, workload = _groups(typed)
    table = OURS[workload.ref] if workload.packaged else _own_table(workload.ref, typed, own_table)
    own_data = typed.values.get("workload.data", "null") != "null"
    defaults, sources = _files(tuple(groups.items()), own_data)
    chosen = COMMAND_LINE if "workload" in typed.groups else "search_spaces/config.yaml"
    values, origins = dict(defaults), {"workload.ref": chosen, "workload.name": chosen, **sources}
    for key, text in typed.values.items():
        origins[_place(values, key, text, table, free_options=not workload.packaged)] = COMMAND_LINE
    tree, lacking = nested(values), list(_meant(typed))
    check_options(tree["workload"], nested(defaults)["workload"] if workload.packaged else None, origins)
    tree["workload"] = {"ref": workload.ref, "name": workload.name, "options": tree["workload"]}
    tree["secrets"] = secrets
    # The space of a user's workload, and with it what is idle, is known once its module is imported.
    dropped = [*lacking, *(drop_idle(tree["knobs"], origins, table) if workload.packaged else ())]
    config = parse_tree(tree, origins, dropped, tuple(argv), defaults, table)
    if workload.packaged:
        check_whole(config.space, config.search.trials)
    return config


def _meant(typed: Typed) -> Iterator[str]:
    """Yields a sentence for a time limit of a few seconds without a unit: minutes may be meant."""
    text = typed.values.get("search.max_time", "")
    if text.isdecimal() and int(text) < MINUTE_S:
        yield f"search.max_time={text} is {text} seconds; {text} minutes are search.max_time={text}m"


def _own_table(ref: str, typed: Typed, table_of: Callable[[str], KnobTable]) -> KnobTable:
    """Returns the table of a user's workload: without its own knobs, unless one of them may be typed."""
    parts = [key.split(".") for key in typed.values]
    names = {p[1] if p[0] == "knobs" else p[2] for p in parts if len(p) > {"knobs": 1, "named": 2}.get(p[0], 9)}
    return LOOP if names <= set(LOOP) else table_of(ref)


def _groups(typed: Typed) -> tuple[dict[str, str], WorkloadRef]:
    """Returns the file of each group, "null" for none, in the order in which they win, and the workload."""
    ((_, base),) = yaml_files.of_groups({})
    groups = {**{group: name or "null" for group, name in base["defaults"].items()}, **typed.groups}
    workload = command_line.choose_workload(groups["workload"], available("workload"))
    for group in ("card", "budget"):
        command_line.choose(group, groups[group], available(group))
    return {**groups, "workload": workload.ref if workload.packaged else "null"}, workload


@functools.lru_cache(maxsize=8)
def _files(groups: tuple[tuple[str, str], ...], own_data: bool) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Returns what the packaged files say and which file says it, by dotted key; neither is to be changed.

    The epochs of a budget that a workload names hold for the data that come with it: an epoch of `own_data` may take an
    hour.
    """
    files = list(yaml_files.of_groups(dict(groups)))
    for source, content in list(files):
        content.pop("defaults", None)
        content.pop("on_card", None)  # for when the device is known (`complete`)
        at_budget = content.pop("at_budget", {}).get(dict(groups)["budget"])
        if at_budget and not own_data:
            files.append((source, {"budget": at_budget}))
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for source, content in files:
        layer = dict(flat(content))
        values |= layer
        sources |= dict.fromkeys(layer, source)
    return values, sources


def _secrets_of_a_run(typed: Typed) -> dict[str, str]:
    """Takes the secrets out of a command line that resumes a run: which workload's they are is in its records."""
    keys = [k for k in typed.values if k.startswith("workload.") and is_secret(k)] if "resume" in typed.values else []
    return {key.removeprefix("workload."): command_line.unquoted(typed.values.pop(key)) for key in keys}


def _check_beside_resume(typed: Typed) -> None:
    """Raises ConfigError for a setting that a resumed run cannot have, before it is read as one of another workload."""
    run_id = typed.values.get("resume", "null")
    again = (*BESIDE_RESUME, *EXTENDABLE, *PICK)
    others = [f"{key}={text}" for key, text in {**typed.groups, **typed.values}.items() if key not in again]
    if run_id != "null" and others:
        key, _, text = others[0].partition("=")
        if key not in typed.groups and difflib.get_close_matches(key, again, n=1, cutoff=0.85):
            raise command_line.unknown_key(key, text, again, LOOP)
        raise ConfigError(
            f"{others[0]} beside resume={run_id}: a run goes on with the configuration it began with",
            allowed="resume=ID, dashboard=true, cluster=ADDRESS, devices=N, force=true, runs_dir=PATH, "
            f"{', '.join(PICK)}, and more of {' or '.join(EXTENDABLE)}",
            remedy="leave it out, or start a new run",
        )


def _place(values: Tree, key: str, text: str, table: KnobTable, *, free_options: bool) -> str:
    """Puts a typed value into the flat `values`, and returns the key of what it changed: a part changes its knob.

    Raises ConfigError for a key that nothing reads, and for one that is a group or a part of a single value.
    """
    section, *names = key.split(".")
    said = f"{key}={shown(text)}"
    knob = f"knobs.{names[0]}" if section == "knobs" and len(names) == 2 else ""
    above = next((k for k in values if key.startswith(f"{k}.")), "")
    if above and not (above == knob and isinstance(values[knob], Mapping)):
        what = f"{said}: {above} is one value, {shown(values[above])}, and has no {names[-1]}"
        raise ConfigError(what, remedy=f"{above}=<value>")
    if inner := next((k for k in values if k.startswith(f"{key}.")), ""):
        raise ConfigError(f"{said}: {key} is a group of settings", remedy=f"{inner}=<value>")
    if section == "named" and len(names) == 1:
        raise ConfigError(f"{said}: {key} is a group of settings", remedy=f"{key}.learning_rate=<value>")
    is_new = is_knob(key) or knob or (section == "named" and len(names) == 2)
    if key not in values and not is_new and not (free_options and section == "workload" and len(names) == 1):
        known = dict.fromkeys([*(f"knobs.{n}" for n in table), *values, *command_line.GROUPS])
        raise command_line.unknown_key(key, text, list(known), table)
    value = command_line.value_of(key, text, table)
    values[knob or key] = {**values.get(knob, {}), names[-1]: value} if knob else value
    return knob or key
