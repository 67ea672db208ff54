"""Made flights, late or not by effects that act on each other, and a net of embeddings and layers that tells which."""

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

COUNTS = {"airline": 14, "origin": 60, "destination": 60, "weekday": 7, "aircraft": 24}
NUMBERS = ("hour", "distance", "wind", "rain", "load", "turn")
TRAIN_SIZE, VAL_SIZE = 40000, 6000


def flights(count, seed):
    """Returns kinds, (count, 5), numbers from -1 to 1, (count, 6), and whether a flight is late, (count,)."""
    world, random = np.random.default_rng(0), np.random.default_rng(seed)
    slow, exposed, peak = (world.normal(size=COUNTS["origin"]) for _ in range(3))
    slack, old, weekly = (world.normal(size=COUNTS[name]) for name in ("airline", "aircraft", "weekday"))
    kinds = np.stack([random.integers(0, most, count) for most in COUNTS.values()], axis=1)
    numbers = random.uniform(-1, 1, (count, len(NUMBERS)))
    airline, origin, destination, weekday, aircraft = kinds.T
    hour, distance, wind, rain, load, turn = numbers.T
    late = (
        2 * slow[origin] + slack[airline] * (1 - turn) + weekly[weekday] * np.cos(3 * hour) + peak[destination] * hour
    )
    late += 2 * exposed[destination] * np.maximum(wind, 0) + 3 * (rain > 0.3) * (load > 0) - 3 * turn * distance
    late += old[aircraft] * distance + 0.3 * random.logistic(size=count)
    return TensorDataset(torch.tensor(kinds), torch.tensor(numbers, dtype=torch.float32), torch.tensor(late > 0).long())


class Clerk(nn.Module):
    """A vector for each kind, beside the numbers; two layers with dropout; a layer on that."""

    def __init__(self, width, dropout):
        super().__init__()
        self.kinds = nn.ModuleList(nn.Embedding(most, 8) for most in COUNTS.values())
        sizes = [8 * len(COUNTS) + len(NUMBERS), width, width]
        layers = []
        for inner, outer in pairwise(sizes):
            layers += [nn.Linear(inner, outer), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, kinds, numbers):
        """Returns logits, (batch, 2)."""
        vectors = [embed(column) for embed, column in zip(self.kinds, kinds.T, strict=True)]
        return self.layers(torch.cat([*vectors, numbers], dim=1))


TRAIN, VAL = flights(TRAIN_SIZE, 1), flights(VAL_SIZE, 2)


def accuracy(net):
    """Returns the share of flights not trained on that are told right."""
    net.eval()
    kinds, numbers, late = VAL.tensors
    with torch.no_grad():
        right = (net(kinds, numbers).argmax(dim=1) == late).sum().item()
    net.train()
    return right / VAL_SIZE
