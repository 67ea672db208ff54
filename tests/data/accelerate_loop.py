"""The loop of accelerate_script.py, as a study can drive it."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainables.integrations.accelerate import study_accelerator


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


def train(run):
    """Trains for as long as it is let."""
    accelerator = study_accelerator(run)
    loader = DataLoader(TRAIN, shuffle=True, **run.loader())
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=run["learning_rate"])
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in run.epochs():
        for points, labels in run.batches(loader):
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        run.report(accuracy=evaluate(net))


SPACE = {
    "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    "batch_size": [16, 32, 64],
    "micro_batch_size": [8, 16, 64],
    "num_workers": [0, 1],
    "amp_dtype": ["fp32", "bf16"],
}
BEFORE = {"learning_rate": 0.01, "batch_size": 32, "micro_batch_size": 16}
OBJECTIVES = {"accuracy": "max"}
