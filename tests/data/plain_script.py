"""A plain PyTorch script: two interleaved half circles, a small net, SGD with momentum, a schedule and clipping."""

import math

import torch
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
    net.eval()
    points, labels = VAL.tensors
    with torch.no_grad():
        right = (net(points.to(next(net.parameters()).device)).argmax(1).cpu() == labels).float().mean().item()
    net.train()
    return right


def train():
    """Trains for three passes over the data."""
    loader = DataLoader(TRAIN, shuffle=True, batch_size=32)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for _ in range(3):
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(points), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(evaluate(net))


if __name__ == "__main__":
    train()
