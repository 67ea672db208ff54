"""A loop of Accelerate's, as one trains it: two interleaved half circles."""

import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moons(count, seed):
    """Returns noisy points on two half circles, and which of the two."""
    random = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=random)
    label = torch.randint(0, 2, (count,), generator=random)
    x = torch.where(label == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(label == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.15 * torch.randn(count, 2, generator=random)
    return TensorDataset(points, label)


TRAIN, VAL = moons(1024, 1), moons(256, 2)


def evaluate(net):
    """Returns the share of validation points that are told right."""
    points, labels = VAL.tensors
    device = next(net.parameters()).device
    with torch.no_grad():
        return (net(points.to(device)).argmax(1).cpu() == labels).float().mean().item()


def train():
    """Trains for three passes over the data."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(TRAIN, shuffle=True, batch_size=16)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(3):
        for points, labels in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(evaluate(net))


if __name__ == "__main__":
    train()
