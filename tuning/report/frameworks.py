"""A configuration in the words of a framework: keyword arguments by what takes them, and what there is no word for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainables.host_memory import AT_START
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from trainables.plan import evenly
from tuning.config.best_file import REMEDY, Best
from tuning.config.environment import ON_A_CPU
from tuning.config.errors import ConfigError
from tuning.report.summary import Place

_SIZES = ("batch_size", "micro_batch_size")
_OF_WORKERS = ("prefetch_factor", "persistent_workers")
_Arguments = dict[str, Any]
_Words = dict[str, _Arguments]
"""Arguments by the class that takes them."""


@dataclass(frozen=True)
class Exported:
    """Settings in a framework's words: keyword arguments by the class that takes them.

    `unsaid` are the knobs that it has no word for, and variables of the environment, each with its value and how to
    set it; and hooks of the workload's own.
    """

    settings: Mapping[str, _Arguments]
    unsaid: Mapping[str, str]

    def to_json(self) -> str:
        """Returns the settings as JSON: the arguments of the class, or of several each under its name."""
        (first, *others) = self.settings.values()
        return json.dumps(self.settings if others else first, indent=2)

    def to_python(self, head: str) -> str:
        """Returns them as Python: a dictionary for each class, and as comments the `head` and what is unsaid."""
        lines = [f"# {head}"]
        for name, arguments in self.settings.items():
            lines.append(f"{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()} = {{")
            lines += [f"    {key!r}: {value!r}," for key, value in arguments.items()]
            lines.append("}")
        return "\n".join([*lines, *(f"# set by hand: {line}" for line in self.unsaid.values())])


class _Told:
    """The knobs of a configuration, and which of them a framework has been told.

    `ours` are those that mean what our table says: a workload's own may share a name with one of them. `undone` are
    those that the framework changes by itself, each with how to set it back; `defaults` what it has in place of hooks.
    """

    def __init__(self, best: Best, on_cpu: bool, table: KnobTable) -> None:
        self.best, self.on_cpu, self.knobs, self.told = best, on_cpu, dict(best.knobs), set[str]()
        self.undone: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self.has_groups = "parameter_groups" in table.hooks
        theirs = {name: row for name, row in table.own.items() if row != EVERY.get(name)}
        self.ours = {name: value for name, value in self.knobs.items() if name not in theirs}
        rows = {**EVERY, **theirs}
        for name, value in self.knobs.items():
            if name not in rows:
                continue
            try:
                rows[name].domain.check(value)
            except ValueError as error:
                raise ConfigError(f"{best.path}: knobs.{name}: {error}", remedy=REMEDY) from None

    def __contains__(self, name: str) -> bool:
        return name in self.ours

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a knob of ours, its default where the file has none, and takes it as told."""
        if name in self:
            self.told.add(name)
        return self._value(name)

    def asks(self, name: str, value: object) -> bool:
        """Returns whether the knob has this value, which a framework is then told."""
        return bool(self._value(name) == value and self[name] == value)

    def cut(self) -> tuple[int, int]:
        """Returns the micro-batches of a batch, and the samples of one, on each of the devices that train together."""
        together = self.best.measured.devices_per_trial
        batch_size, micro_batch_size = (math.ceil(self[name] / together) for name in _SIZES)
        return evenly(batch_size, micro_batch_size)

    def words(self, **words: str) -> _Arguments:
        """Returns the values of those knobs that there are, by the framework's word for each."""
        return {word: self[name] for name, word in words.items() if name in self}

    def loader(self, prefix: str = "") -> _Arguments:
        """Returns what a DataLoader, or one that has such arguments behind a prefix, is told of its processes."""
        if not prefix:
            self.undone["order of the data"] = "shuffle=True in your training DataLoader, whose default is False"
        names = ("num_workers", "pin_memory", *(_OF_WORKERS if self.ours.get("num_workers") else ()))
        return self.words(**{name: f"{prefix}{name}" for name in names})

    def unsaid(self) -> dict[str, str]:
        """Returns the knobs that were not told, where they ask for something, each with what to set instead."""
        by_hand = {name: row.by_hand for name, row in EVERY.items() if name in self}
        found = {
            name: f"{name}={value!r}: {by_hand.get(name) or 'your own code sets it'}"
            for name, value in self.knobs.items()
            if name not in self.told and self._asks(name, value)
        }
        return found | self._of_their_code() | self.undone

    def _of_their_code(self) -> dict[str, str]:
        """Returns what of the workload's own its rate was found beside, where it was not told: hooks, and clipping."""
        own = [name for name in ("optimizer", "schedule", "max_grad_norm") if name not in self]
        own += ["parameter_groups"] if self.has_groups and "optimizer" in self else []  # else nobody asks for them
        own = [name for name in own if name not in self.told]
        if not own or "learning_rate" not in self:
            return {}
        others = ", ".join(self.defaults[name] for name in own if name in self.defaults)
        default = f"; by default there is {others}" if others else ""
        said = f"{', '.join(own)} of the workload's own code: the learning rate was found with them{default}"
        return {"of the workload's own": said}

    def _value(self, name: str) -> Any:
        return self.ours.get(name, EVERY[name].default)

    def _asks(self, name: str, value: object) -> bool:
        row = EVERY.get(name) if name in self else None
        if row is None:
            return True
        if row.requires and not row.requires.met(self._value(row.requires.knob)):
            return False
        is_a_choice = row.kind != "system" and bool(value) and not isinstance(value, bool)
        return value != row.default or is_a_choice


def _transformers(told: _Told) -> _Words:
    groups = "one rate for all, and weight decay but of biases and norms"
    told.defaults = {"optimizer": "AdamW", "schedule": "a linear schedule", "parameter_groups": groups}
    told.defaults["max_grad_norm"] = "a norm of at most 1.0"
    count, micro = told.cut()
    found: _Arguments = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": count}
    found |= told.loader("dataloader_")
    if "amp_dtype" in told:
        found |= {"bf16": told["amp_dtype"] == "bf16", "fp16": told["amp_dtype"] == "fp16"}
    if told.asks("tf32", True):
        found["tf32"] = True
    elif "tf32" in told and not told.on_cpu and not told.asks("compile", "off"):
        found["tf32"] = False  # with torch_compile it would be set
    if told.asks("activation_checkpointing", True):
        found["gradient_checkpointing"] = True
    if not told.asks("compile", "off"):
        found |= {"torch_compile": True, "torch_compile_mode": told["compile"]}
    if told.asks("non_blocking", True):
        found["accelerator_config"] = {"non_blocking": True}
    if "optimizer" in told:
        found["optim"] = {"adamw": "adamw_torch", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}[told["optimizer"]]
        if told["optimizer"] == "adamw" and told["fused_optimizer"]:
            found["optim"] = "adamw_torch_fused"
        if told["optimizer"] == "sgd":
            found["optim_args"] = f"momentum={told['momentum']!r},nesterov={_nesterov(told)}"
    found |= told.words(learning_rate="learning_rate", weight_decay="weight_decay", max_grad_norm="max_grad_norm")
    if "optimizer" in told and "weight_decay" in told and not told.has_groups and not told.asks("weight_decay", 0.0):
        own = "a Trainer leaves biases and norms without; to decay them, too, give it your own optimizers=(...)"
        told.undone["weight_decay"] = f"weight_decay={told['weight_decay']!r} of all parameters: {own}"
    warmup_frac = float(told.ours.get("warmup_frac", 0.0))
    if warmup_frac < 1:  # as a number of steps it would be one
        found |= told.words(warmup_frac="warmup_steps")
    if "schedule" in told:
        plain = told["schedule"] == "constant" and warmup_frac
        found["lr_scheduler_type"] = "constant_with_warmup" if plain else told["schedule"]
    if told.on_cpu:
        found["use_cpu"] = True  # without, bf16 is refused there
    return {"TrainingArguments": found}


def _lightning(told: _Told) -> _Words:
    count, micro = told.cut()
    found: _Arguments = {"accumulate_grad_batches": count, **({"accelerator": "cpu"} if told.on_cpu else {})}
    if "amp_dtype" in told:
        found["precision"] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[told["amp_dtype"]]
    if told.asks("cudnn_benchmark", True):
        found["benchmark"] = True
    if not told.asks("max_grad_norm", 0.0):
        found["gradient_clip_val"] = told["max_grad_norm"]
    return {"Trainer": found, "DataLoader": {"batch_size": micro, **told.loader()}}


def _accelerate(told: _Told) -> _Words:
    count, micro = told.cut()
    found: _Words = {"Accelerator": {"gradient_accumulation_steps": count}}
    if told.on_cpu:
        found["Accelerator"]["cpu"] = True
    if "amp_dtype" in told:
        found["Accelerator"]["mixed_precision"] = "no" if told["amp_dtype"] == "fp32" else told["amp_dtype"]
    found["DataLoader"] = {"batch_size": micro, **told.loader()}
    if told.asks("non_blocking", True):
        found["DataLoaderConfiguration"] = {"non_blocking": True}
    if not told.asks("compile", "off"):
        found["TorchDynamoPlugin"] = {"backend": "inductor", "mode": told["compile"]}
        if "tf32" in told and not told["tf32"] and told["amp_dtype"] == "fp32" and not told.on_cpu:
            again = "torch.backends.cuda.matmul.allow_tf32 = False after Accelerator(), which turns it on to compile"
            told.undone["tf32"] = f"tf32=False: {again}"
    return found


def _deepspeed(told: _Told) -> _Words:
    count, micro = told.cut()
    found: _Arguments = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": count}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(told["amp_dtype"])
    if dtype:
        found["torch_autocast"] = {"enabled": True, "dtype": dtype}
    if not told.asks("max_grad_norm", 0.0):
        found["gradient_clipping"] = told["max_grad_norm"]
    if told.ours.get("optimizer") in ("adamw", "sgd") and "learning_rate" in told:
        own = told.words(learning_rate="lr", weight_decay="weight_decay")
        if told["optimizer"] == "adamw":
            found["optimizer"] = {"type": "AdamW", "params": {**own, "torch_adam": True}}
        else:
            nesterov = {"nesterov": True} if _nesterov(told) else {}
            found["optimizer"] = {"type": "SGD", "params": {**own, "momentum": told["momentum"], **nesterov}}
    return {"config": found}


def _nesterov(told: _Told) -> bool:
    return bool(told["nesterov"]) and told["momentum"] > 0  # torch refuses it without


def _json(told: _Told) -> _Words:
    told.told |= {*told.knobs, "optimizer", "schedule", "parameter_groups", "max_grad_norm"}
    best = told.best
    workload = {"ref": best.ref, "options": dict(best.options)}
    train = {"samples": best.samples, "seed": best.seed}
    measured = {"measured": best.measured.model_dump(), "provenance": best.provenance.model_dump()}
    return {"best": {"workload": workload, "knobs": told.knobs, "train": train, **measured}}


FRAMEWORKS: Mapping[str, Callable[[_Told], _Words]] = {
    "transformers": _transformers,
    "lightning": _lightning,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "json": _json,
}
"""Exports by the framework's name; every knob that one leaves out is listed, whatever is added to the table."""


def exported(best: Best, framework: str, place: Place | None = None, table: KnobTable = EVERY) -> Exported:
    """Returns a configuration in the words of a framework, one of `FRAMEWORKS`.

    `place` is where it was measured, `table` the knobs of its workload, whose own are in no framework's words. A batch
    is cut into equal micro-batches, as `run.loader()` cuts it. Raises ConfigError for a value that its knob may not
    take.
    """
    on_cpu = place is not None and place.type == "cpu" and not place.virtual  # a virtual card's is for that card
    told = _Told(best, on_cpu, table)
    settings, unsaid = FRAMEWORKS[framework](told), told.unsaid()
    if on_cpu:
        unsaid |= {name: f"{name}={value}: in the environment, as it was measured" for name, value in ON_A_CPU.items()}
        often = "in the environment, where steps take their memory from the system anew (many page faults)"
        unsaid |= {name: f"{name}={value}: {often}" for name, value in AT_START.items()}
    return Exported(settings, unsaid)
