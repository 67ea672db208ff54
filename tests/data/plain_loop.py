"""The loop of plain_script.py, as a study can drive it."""

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


def train(run):
    """Trains for as long as it is let: a probe takes seconds, a training of a study its share of the time."""
    loader = DataLoader(TRAIN, shuffle=True, **run.loader())
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=run["learning_rate"], momentum=run["momentum"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    run.prepare(net, optimizer, schedule)
    for points, labels in run.batches(loader):
        loss = nn.functional.cross_entropy(net(points), labels)
        run.backward(loss, optimizer, max_norm=1.0)
        if run.evaluate_now:
            run.report(accuracy=evaluate(net))


SPACE = {
    "learning_rate": {"low": 0.01, "high": 1.0, "log": True},
    "momentum": [0.0, 0.9],
    "batch_size": [16, 32, 64],
    "micro_batch_size": [8, 16, 64],
    "num_workers": [0, 1],
}
BEFORE = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 32, "micro_batch_size": 32}
OBJECTIVES = {"accuracy": "max"}

if __name__ == "__main__":
    from trainables.own_loop import alone

    train(alone(samples=3 * len(TRAIN)))
