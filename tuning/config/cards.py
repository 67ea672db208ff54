"""What a card can hold and compute, and which knob values it therefore cannot honour."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainables.knobs import Scalar, domain_of
from tuning.config.errors import ConfigError
from tuning.config.space import Choice, Space

GIB_BYTES = 2**30

HERE = ("auto", "cpu")
"""Cards that are this machine itself: `card.memory_gib` may hold them to less memory, and nothing is emulated."""

DeviceType = Literal["auto", "cpu", "cuda"]
AMP_DTYPES = ("fp32", "bf16", "fp16")
_CUDA_ONLY = {
    "device_prefetch": "a stream of its own is a thing of CUDA devices",
    "cudnn_benchmark": "cuDNN computes on CUDA devices only",
    "empty_cache": "only the allocator of a CUDA device keeps memory back",
}
_VOLTA = (7, 0)  # the first that Triton, hence torch.compile, has code for
_AMPERE = (8, 0)  # the first compute capability with bfloat16 and TensorFloat-32 arithmetic


@dataclass(frozen=True)
class Card:
    """One accelerator, real or virtual: `memory_bytes` as the driver states them, None for no limit.

    `reserve_bytes` are not ours to allocate (CUDA context, display, ECC); `capability` is CUDA's, None where it does
    not apply or is not known; `device` is where it runs, "auto" until the study has looked.
    """

    name: str
    memory_bytes: int | None = None
    reserve_bytes: int = 0
    capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = AMP_DTYPES
    device: DeviceType = "auto"

    @property
    def cap_bytes(self) -> int | None:
        """The bytes a configuration may use at its peak, None for no limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes

    def emulated_on(self, device_memory_bytes: int | None) -> bool:
        """Returns whether the card is a smaller one than the device, or has no device (None) at all.

        False for this machine's own, whatever `memory_bytes` hold it to.
        """
        if self.memory_bytes is None or self.name in HERE:
            return False
        return device_memory_bytes is None or device_memory_bytes * 0.9 > self.memory_bytes

    def on(self, device: DeviceType) -> Card:
        """Returns the card as emulated on `device`: its memory and types, with what `device` can do."""
        return replace(self, device=device)


def refuse(card: Card, knobs_values: Mapping[str, object]) -> str | None:
    """Returns why the card cannot honour one of the knob values, or None where it can honour all."""
    for name, value in knobs_values.items():
        reason = _reason(card, name, value)
        if reason is not None:
            return reason
    return None


def restrict(space: Space, card: Card, asked: Collection[str]) -> tuple[Space, list[str]]:
    """Returns the space without the values the card cannot honour, and one sentence for each value dropped.

    Raises ConfigError where such a value is of a knob in `asked`, the knobs that a person typed.
    """
    parameters, fixed, dropped = dict(space.parameters), dict(space.fixed), list[str]()
    for name in [*space.parameters, *space.fixed]:
        given = space.fixed[name] if name in space.fixed else space.parameters[name]
        values = given.values if isinstance(given, Choice) else (given,)
        reasons = {v: reason for v in values if (reason := _reason(card, name, v)) is not None}
        if not reasons:
            continue
        for value, reason in reasons.items():
            if name in asked:
                raise ConfigError(
                    f"knobs.{name}={_word(value)} cannot be had with card={card.name}: {reason}",
                    allowed=", ".join(_word(v) for v in _honoured(card, name, values)),
                    remedy=f"leave out knobs.{name}, or name another card",
                )
            dropped.append(f"knobs.{name}={_word(value)} is left out: {reason}")
        kept = [v for v in values if v not in reasons and isinstance(v, bool | int | float | str)]
        parameters.pop(name, None)
        fixed.pop(name, None)
        if len(kept) == 1:
            fixed[name] = kept[0]
        elif kept:
            parameters[name] = Choice(tuple(kept))
    return Space(parameters, fixed), dropped


def honoured(card: Card, values: Mapping[str, Scalar], label: str) -> tuple[dict[str, Scalar], list[str]]:
    """Returns the knob values of a named configuration that the card can honour, and a sentence for each other.

    `label` is the configuration's key, such as "named.after"; what is left out keeps the knob's default.
    """
    reasons = {n: reason for n, v in values.items() if (reason := _reason(card, n, v)) is not None}
    sentences = [f"{label}.{n}={_word(values[n])} is left out: {reason}" for n, reason in reasons.items()]
    return {n: v for n, v in values.items() if n not in reasons}, sentences


def _reason(card: Card, name: str, value: object) -> str | None:
    if name == "amp_dtype" and value not in card.dtypes:
        return f"{value} is not a type of card {card.name} ({', '.join(card.dtypes)})"
    if name == "amp_dtype" and value == "bf16" and card.device != "cpu" and _older(card):
        return f"bf16 needs compute capability 8.0, and {card.name} has {_capability(card)}"
    if name == "amp_dtype" and value == "fp16" and card.device == "cpu":
        # A pointer network's step took 20 s in fp16 and 0.9 s in fp32 on two cores: 3 against 70 samples a second.
        return "fp16 is hardly arithmetic of a CPU, where a step takes many times that of fp32"
    if name == "tf32" and value is True and card.device == "cpu":
        return "TensorFloat-32 is arithmetic of CUDA devices, and this runs on the cpu"
    if name == "tf32" and value is True and _older(card):
        return f"tf32 needs compute capability 8.0, and {card.name} has {_capability(card)}"
    if name == "pin_memory" and value is True and card.device == "cpu":
        return "page-locked memory speeds copies to a CUDA device, and this runs on the cpu"
    if name == "sdpa_backend" and value == "flash" and card.device != "cpu" and _older(card):
        return f"flash attention needs compute capability 8.0, and {card.name} has {_capability(card)}"
    if name == "compile" and value != "off" and card.capability is not None and card.capability < _VOLTA:
        return f"torch.compile needs compute capability 7.0, and {card.name} has {_capability(card)}"
    if name == "compile" and value == "reduce-overhead" and card.device == "cpu":
        return "it is CUDA graphs that reduce the overhead, and this runs on the cpu"
    if name in _CUDA_ONLY and value is True and card.device == "cpu":
        return f"{_CUDA_ONLY[name]}, and this runs on the cpu"
    if name == "optimizer" and value == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        return "it needs the package bitsandbytes, pip install 'cardtune[quant]'"
    if name == "non_blocking" and value is True and card.device == "cpu":
        return "there is no copy to a device to wait for, as this runs on the cpu"
    return None


def _honoured(card: Card, name: str, values: tuple[object, ...]) -> list[object]:
    known: tuple[object, ...] = domain_of(name).values
    return [v for v in dict.fromkeys((*values, *known)) if _reason(card, name, v) is None]


def _older(card: Card) -> bool:
    return card.capability is not None and card.capability < _AMPERE


def _capability(card: Card) -> str:
    return "an unknown one" if card.capability is None else ".".join(map(str, card.capability))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
