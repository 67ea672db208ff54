"""The optimisers: both are AdamW, and each keeps the moments it says."""

from __future__ import annotations

import pytest
import torch

from trainables import optim
from trainables.knobs import Knobs


def descend(**knobs: object) -> tuple[torch.optim.Optimizer, list[float]]:
    """Returns an optimiser after 60 steps towards 1, and the distance left after each."""
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    found = optim.adamw([{"params": [weight]}], Knobs.of({"weight_decay": 0.0, **knobs}))
    optim.set_rate(found, 0.03)
    left = []
    for _ in range(60):
        loss = (weight - 1.0).square().mean()
        loss.backward()
        found.step()
        found.zero_grad()
        left.append(float(loss.detach()))
    return found, left


def test_eight_bit_moments_take_a_quarter_of_the_bytes_and_descend_as_far() -> None:
    pytest.importorskip("bitsandbytes")
    (full, plain), (small, packed) = descend(), descend(optimizer="adamw8bit")
    (state,), (full_state,) = small.state.values(), full.state.values()
    moments = [s for s in state.values() if isinstance(s, torch.Tensor) and s.numel() > 4096]
    assert {s.dtype for s in moments} == {torch.uint8}
    assert sum(s.numel() for s in moments) == 2 * 64 * 128  # bytes; 32-bit moments would be four times that
    assert {s.dtype for s in full_state.values()} == {torch.float32}
    assert packed[-1] == pytest.approx(plain[-1], abs=0.01)


def test_fused_and_unfused_take_the_same_steps() -> None:
    assert descend(fused_optimizer=True)[1] == pytest.approx(descend()[1], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_bytes_of_the_state_are_those_of_the_optimiser(name: str) -> None:
    """A floor of memory above what is needed refuses what fits: AdamW of 8 bits was charged for moments of 32."""
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(torch.nn.Linear(100, 90), torch.nn.Linear(90, 10))
    model[1].bias.requires_grad_(False)
    own = optim.adamw([{"params": [p for p in model.parameters() if p.requires_grad]}], Knobs.of({"optimizer": name}))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    own.step()
    tensors = {id(s): s for state in own.state.values() for s in state.values() if isinstance(s, torch.Tensor)}
    assert optim.state_bytes(model, name) == sum(s.nbytes for s in tensors.values() if s.dim() > 0)
