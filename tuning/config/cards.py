"""The memory and the arithmetic of a card, and the knob values that it therefore cannot honour."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainables.knob_columns import Scalar, refusal, word
from trainables.knobs import KnobTable
from tuning.config.errors import ConfigError
from tuning.config.space import Choice, Space

GIB_BYTES = 2**30

HERE = ("auto", "cpu")
"""Cards that are this machine itself: `card.memory_gib` may hold them to less memory, and nothing is emulated."""

CONTEXT_BYTES = 600 * 2**20
"""The memory of a CUDA device that a process takes in addition to its tensors: context, kernels, library handles."""

DeviceType = Literal["auto", "cpu", "cuda"]
AMP_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Card:
    """An accelerator, real or virtual: `memory_bytes` as the driver states them, None for no limit.

    `reserve_bytes` are not ours to allocate (CUDA context, display, ECC); `capability` is CUDA's, None if it does
    not apply or is not known; `device` is the type it runs on, "auto" until the study has looked; `cores` is its share
    of the processor's cores, None until then.
    """

    name: str
    memory_bytes: int | None = None
    reserve_bytes: int = 0
    capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = AMP_DTYPES
    device: DeviceType = "auto"
    cores: int | None = None

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

    def on(self, device: DeviceType, capability: tuple[int, int] | None = None, cores: int | None = None) -> Card:
        """Returns the card as emulated on `device`: its memory and types, with what `device` can do.

        This machine's own has the `capability` that was found.
        """
        capability = capability if self.name in HERE and capability is not None else self.capability
        card = self if device == "cuda" else self.unlisted()
        return replace(card, device=device, capability=capability, cores=cores)

    def unlisted(self) -> Card:
        """Returns the card that card=auto with a memory stands for without a GPU: one less a CUDA context.

        Any other card is returned as it is. Raises ConfigError if the context leaves nothing.
        """
        if self.name != "auto" or self.memory_bytes is None:
            return self
        reserve_bytes, gib = self.reserve_bytes or CONTEXT_BYTES, f"{self.memory_bytes / GIB_BYTES:g}"
        if reserve_bytes >= self.memory_bytes:
            least = f"{CONTEXT_BYTES / GIB_BYTES:.2f}"
            what = f"card=auto card.memory_gib={gib} leaves nothing beside a CUDA context, which takes {least}"
            remedy = f"card=cpu card.memory_gib={gib}, which holds this machine's own processor to it"
            raise ConfigError(what, allowed=f"more than {least}", remedy=remedy)
        return replace(self, name=f"unlisted-{gib}-gib", reserve_bytes=reserve_bytes)


def restrict(space: Space, card: Card, asked: Collection[str]) -> tuple[Space, list[str]]:
    """Returns the space without the values the card cannot honour, and one sentence for each value dropped.

    Raises ConfigError if the knob of such a value is in `asked`, the knobs that a person typed. Values of "auto" are
    left out without a sentence: nobody gave them.
    """
    auto = {name for name, given in space.parameters.items() if isinstance(given, Choice) and given.auto}
    space = space.settled(card.cores)
    parameters, fixed, dropped = dict(space.parameters), dict(space.fixed), list[str]()
    for name in [*space.parameters, *space.fixed]:
        given = space.fixed[name] if name in space.fixed else space.parameters[name]
        values = given.values if isinstance(given, Choice) else (given,)
        reasons = {v: reason for v in values if (reason := refusal(space.table[name], v, card)) is not None}
        if not reasons:
            continue
        for value, reason in reasons.items() if name not in auto else ():
            if name in asked:
                row, known = space.table[name], dict.fromkeys((*values, *space.table[name].domain.values))
                raise ConfigError(
                    f"knobs.{name}={word(value)} cannot be had with card={card.name}: {reason}",
                    allowed=", ".join(word(v) for v in known if refusal(row, v, card) is None),
                    remedy=f"leave out knobs.{name}, or name another card",
                )
            dropped.append(f"knobs.{name}={word(value)} is left out: {reason}")
        kept = [v for v in values if v not in reasons and isinstance(v, bool | int | float | str)]
        parameters.pop(name, None)
        fixed.pop(name, None)
        if len(kept) == 1:
            fixed[name] = kept[0]
        elif kept and isinstance(given, Choice):
            parameters[name] = replace(given, values=tuple(kept))
    return replace(space, parameters=parameters, fixed=fixed), dropped


def honoured(
    card: Card, values: Mapping[str, Scalar], label: str, table: KnobTable
) -> tuple[dict[str, Scalar], list[str]]:
    """Returns the knob values of a named configuration that the card can honour, and a sentence for each other.

    `label` is the configuration's key, such as "named.after"; what is left out keeps the knob's default.
    """
    reasons = {n: reason for n, v in values.items() if (reason := refusal(table[n], v, card)) is not None}
    sentences = [f"{label}.{n}={word(values[n])} is left out: {reason}" for n, reason in reasons.items()]
    return {n: v for n, v in values.items() if n not in reasons}, sentences
