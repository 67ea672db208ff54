"""The state of bitsandbytes' AdamW of 8 bits, in bytes: nothing here computes, and it need not be installed."""

from __future__ import annotations

from typing import Any

import torch

from trainables import optim
from trainables.optim import BLOCK_NUMBERS, LEAST_NUMBERS, MAP_NUMBERS


class AdamW8bit(torch.optim.Optimizer):
    """Holds the state that bitsandbytes.optim.AdamW8bit would hold after its first step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes the state of parameters that have a gradient and none yet; the update itself is in place."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if parameter in self.state:
                continue
            if parameter.numel() < LEAST_NUMBERS:
                new = {f"state{i}": torch.zeros_like(parameter, dtype=torch.float32) for i in (1, 2)}
            else:
                blocks = -(-parameter.numel() // BLOCK_NUMBERS)
                if not self._maps:
                    self._maps = [torch.zeros(MAP_NUMBERS, device=parameter.device) for _ in range(2)]
                new = {f"state{i}": torch.zeros_like(parameter, dtype=torch.uint8) for i in (1, 2)}
                new |= {f"absmax{i}": torch.zeros(blocks, device=parameter.device) for i in (1, 2)}
                new |= {f"qmap{i + 1}": each for i, each in enumerate(self._maps)}
            self.state[parameter] = new


def stand_in() -> None:
    """Has the knob `optimizer` take this optimiser for the rest of the process; peft still finds the real package."""
    optim.adamw_8bit = lambda: AdamW8bit
