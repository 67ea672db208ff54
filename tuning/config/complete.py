"""The configuration that is run, from the one that was asked for: with what the machine has, and what the workload is.

load -> `complete`, before anything is started -> `fit_to_workload`, once a process has loaded the workload
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainables.knob_columns import CALLS, Options
from trainables.knobs import LOOP, KnobTable, Scalar
from trainables.near_names import nearest
from tuning.config import yaml_files
from tuning.config.cards import Card, honoured, restrict
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.errors import ConfigError
from tuning.config.resolve import COMMAND_LINE, SCALARS, check_options, check_whole, drop_idle, parse_named, parse_space
from tuning.config.schema import StudyConfig, card_as_raw
from tuning.config.space import Range, Space, largest, shown, values_of

COMPILED_S, COMPILED_PROBES_S = 900.0, 120.0
"""A study of less time, or whose probes have less, compiles nothing of its own accord."""


@dataclass(frozen=True)
class Machine:
    """The machine that runs a study: cores of the processor, visible CUDA devices and their least compute capability.

    `capability` is None without a CUDA device, and if none says its own.
    """

    cores: int
    cuda_devices: int = 0
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Declared:
    """The declarations of a user's workload file: its knobs, the space that it searches, and its options.

    `before` is what the user trains with today, None if the file does not say; `epochs` how long, likewise. `has_loop`
    if it has a `train(run)` in place of the contract.
    """

    table: KnobTable
    default_space: Mapping[str, object]
    options: Options
    before: Mapping[str, Scalar] | None = None
    epochs: float | None = None
    has_loop: bool = False


def complete(config: StudyConfig, machine: Machine, declared: Declared | None = None) -> StudyConfig:
    """Returns the configuration as it runs on the machine; `declared` is None for a packaged workload.

    Values that the device does not support are left out, with a sentence in `dropped`. Raises ConfigError if such a
    value was typed, for an unknown option or a bad space of the workload's file, and for a range that cannot be probed.
    """
    config = _with_before(config) if declared is None else with_declared(config, declared)
    _refuse_ranges(config)
    card = config.card
    if card.device == "cpu":
        card = card.on("cpu", cores=max(1, machine.cores // config.devices_per_trial))
    else:  # a named card that is not here is emulated on the device that is
        cores = max(1, machine.cores // max(1, machine.cuda_devices))
        card = card.on("cuda" if machine.cuda_devices else "cpu", machine.capability, cores)
    return on_card(with_cuda_knobs(config) if card.device == "cuda" else config, card)


def with_declared(config: StudyConfig, declared: Declared) -> StudyConfig:
    """Returns the configuration of a user's workload, completed with what its file declares.

    The command line wins over the file. A knob that is not searched has the value of `before`, which gains are measured
    against; without a `before` these are the plain defaults. Raises ConfigError as `complete` does.
    """
    ref, options, table = config.workload.ref, dict(declared.options), declared.table
    check_plain(ref, options)
    defaults = {**{f"knobs.{n}": ref for n in declared.default_space}, **{f"workload.{n}": ref for n in options}}
    origins = {**defaults, **config.origins}
    before = {} if declared.before is None else parse_named("BEFORE", declared.before, {}, table)
    before |= config.named.get(BEFORE, {})
    knobs = {**before, **declared.default_space, **config.space.as_raw()}
    dropped = [*config.dropped, *drop_idle(knobs, origins, table)]
    space, plain_batch = parse_space(knobs, origins, table), LOOP.defaults["batch_size"]
    whole = {"micro_batch_size": int(largest(space.given("batch_size")))}  # a plain loop takes its batch in one pass
    space = space if "micro_batch_size" in knobs else replace(space, fixed={**space.fixed, **whole})
    if before:
        before.setdefault("micro_batch_size", before.get("batch_size", plain_batch))
    check_whole(space, config.search.trials)
    given = {**options, **config.workload.options}
    check_options(given, options, origins)
    workload = config.workload.model_copy(update={"options": given, "epochs": declared.epochs})
    reference = {BEFORE: before} if before else {PLAIN: table.whole({"micro_batch_size": plain_batch})}
    named = {**reference, **{name: values for name, values in config.named.items() if name != BEFORE}}
    update = {"workload": workload, "space": space, "named": named, "origins": origins, "dropped": dropped}
    return config.model_copy(update=update)


def _with_before(config: StudyConfig) -> StudyConfig:
    """Returns the configuration of a packaged workload; a knob that its space lacks has the value of `before`."""
    table, raw = config.space.table, {**config.named.get(BEFORE, {}), **config.space.as_raw()}
    dropped = [*config.dropped, *drop_idle(raw, config.origins, table)]
    return config.model_copy(update={"space": parse_space(raw, config.origins, table), "dropped": dropped})


def check_plain(ref: str, options: Options) -> None:
    """Raises ConfigError for an option of a workload's file that no command line could give."""
    for name, value in options.items():
        if value is not None and type(value) not in SCALARS:
            what = f"workload={ref}: the option {name}={shown(value)} is a {type(value).__name__}"
            remedy = f"give {name} as one text, and take it apart in the file"
            raise ConfigError(what, allowed="true or false, a number, text or None", remedy=remedy)


def _refuse_ranges(config: StudyConfig) -> None:
    """Raises ConfigError for a range of a knob whose values are probed one by one."""
    ranges = {n: p for n, p in config.space.subset({"both"}).parameters.items() if isinstance(p, Range)}
    for name, given in ranges.items():
        what = f"knobs.{name} is a range, and each of its values is probed"
        remedy = f"knobs.{name}={shown(list(given.spread()))}"
        raise ConfigError(what, allowed="a list of values for a knob that changes speed and learning", remedy=remedy)


def with_cuda_knobs(config: StudyConfig) -> StudyConfig:
    """Returns the configuration with its workload's knobs for a CUDA device, unless they were typed otherwise.

    In a short study nothing is compiled that was not asked for: that takes a minute or so, for each model and shape.
    """
    ref, limit_s, table = config.workload.ref, config.search.max_time_s, config.space.table
    on_card = yaml_files.on_card(ref)
    origins = {f"knobs.{n}": f"search_spaces/workload/{ref}.yaml" for n in on_card} | config.origins
    added = {n: v for n, v in on_card.items() if origins[f"knobs.{n}"] != COMMAND_LINE}
    dropped = list(config.dropped)
    probes_s = config.budget.probe.max_time_s
    if "compile" in added and (probes_s < COMPILED_PROBES_S or (limit_s is not None and limit_s < COMPILED_S)):
        del added["compile"]
        said = "it takes a minute or so for each model; budget=full has it, from search.max_time=15m on"
        dropped.append(f"knobs.compile is not searched: {said}")
    raw = {**config.space.as_raw(), **added}
    dropped += drop_idle(raw, origins, table)
    update = {"space": parse_space(raw, origins, table), "origins": origins, "dropped": dropped}
    return config.model_copy(update=update)


def on_card(config: StudyConfig, card: Card) -> StudyConfig:
    """Returns the configuration on `card`, without the knob values that it does not support, each listed in `dropped`.

    Raises ConfigError if such a value was typed.
    """
    typed = {key for key, origin in config.origins.items() if origin == COMMAND_LINE}
    asked = {n for n in config.space.table if f"knobs.{n}" in typed}
    space, dropped = restrict(config.space, card, asked)
    named: dict[str, dict[str, Scalar]] = {}
    for name, values in config.named.items():
        knobs = dict(values)
        if name == BEFORE:  # a plain loop takes its batch in one pass
            knobs.setdefault("micro_batch_size", knobs.get("batch_size", LOOP.defaults["batch_size"]))
        named[name], sentences = honoured(card, knobs, f"named.{name}", space.table)
        dropped += sentences
    before, after = card_as_raw(config.card), card_as_raw(card)
    detected = {f"card.{key}": "found on this machine" for key, value in after.items() if value != before[key]}
    update = {"card": card, "space": space, "named": named, "origins": {**config.origins, **detected}}
    return config.model_copy(update={**update, "dropped": list(dict.fromkeys([*config.dropped, *dropped]))})


# -- what is known once the workload is loaded ------------------------------------------------------------------------


def fit_to_workload(
    config: StudyConfig, train_samples: int, asked: Sequence[str] | None, seen: Mapping[str, int], *, averages: bool
) -> StudyConfig:
    """Returns the configuration as the loaded workload can run it, by what its process described.

    `asked` are the knobs that a custom loop asks for, None for any other workload; `averages` says whether its
    gradients may be averaged over processes. It trains with the sizes of batches that were `seen`, unless it asks for
    them. Batches larger than the training data are left out, with a sentence in `dropped`. Raises ConfigError for a
    knob that was given a value or a search and that the custom loop never asks for, and if no batch is left.
    """
    if asked is not None:
        config = _fit_custom_loop(config, set(asked), seen, averages=averages)
    return _fit_batches(config, train_samples)


def _fit_custom_loop(config: StudyConfig, asked: set[str], seen: Mapping[str, int], *, averages: bool) -> StudyConfig:
    if config.devices_per_trial > 1 and not averages:
        what = f"devices_per_trial={config.devices_per_trial}: train(run) steps by lines of its own"
        remedy = "step by run.backward(loss, optimizer), which averages gradients over processes, or leave it out"
        raise ConfigError(f"{what}, so each process would train a model of its own", remedy=remedy)
    space, table = config.space, config.space.table
    pins = {name: size for name, size in seen.items() if name not in asked}
    if "batch_size" in asked:
        pins.pop("micro_batch_size", None)  # it is the batch, as the file's space has it
    usual = {**table.defaults, **pins}
    whole = space.fixed.get("batch_size", table.defaults["batch_size"])
    for name, given in space.as_raw().items():
        is_whole = name == "micro_batch_size" and ("batch_size" in asked or given == whole)
        if name not in asked and name in table.own and name not in space.parameters:  # of BEFORE alone
            near = table.also_called.get(name) or nearest(name, sorted(asked))
            what = f"{name}={shown(given)} of BEFORE: train(run) never asks for run[{name!r}]"
            remedy = f"did you mean {near}? Else leave it out" if near else "leave it out"
            raise ConfigError(what, allowed=", ".join(sorted(asked)), remedy=remedy)
        if name not in asked and not is_whole and (name in space.parameters or given != usual[name]):
            call = CALLS[table[name].asked_by]
            what = f"knobs.{name}={shown(given)}: train(run) never asks for {name}, so it would do nothing"
            remedy = f'use {f"{call} or " if call else ""}run["{name}"], or leave it out of SPACE'
            raise ConfigError(what, allowed=", ".join(sorted(asked)), remedy=remedy)
    named = {name: {**values, **pins} for name, values in config.named.items()}
    for values in named.values() if "batch_size" in asked else ():
        if "micro_batch_size" not in asked or "micro_batch_size" not in values:  # a plain loop takes it in one pass
            values["micro_batch_size"] = values.get("batch_size", usual["batch_size"])
    return config.model_copy(update={"space": Space(space.parameters, {**space.fixed, **pins}, table), "named": named})


def _fit_batches(config: StudyConfig, train: int) -> StudyConfig:
    """Returns the configuration without the batches that are larger than `train`, the number of training samples."""
    space, given = config.space, config.space.given("batch_size")
    if largest(given) <= train:
        return config
    fitting = [v for v in values_of(given) if float(v) <= train] if not isinstance(given, Range) else [given.low]
    asked = shown(space.as_raw().get("batch_size", given))
    if not fitting or float(fitting[0]) > train:
        what = f"knobs.batch_size={asked}: there are {train} training samples"
        remedy = f"knobs.batch_size={2 ** max(0, (train // 2).bit_length() - 1)}, or more data"
        raise ConfigError(what, allowed=f"1 to {train}", remedy=remedy)
    raw = {"low": given.low, "high": train, "log": given.log} if isinstance(given, Range) else fitting
    left = Space.parse({**space.as_raw(), "batch_size": raw}, space.table)
    check_whole(left, config.search.trials)
    said = f"knobs.batch_size={asked} goes to {shown(raw)}: there are {train} training samples"
    return config.model_copy(update={"space": left, "dropped": [*config.dropped, said]})
