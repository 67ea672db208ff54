"""A user's own workload, in one file: tell two interleaved half circles apart."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainables import Knob


class Moons:
    """Binary classification of noisy points on two half circles."""

    objectives = {"accuracy": "max"}
    options = {"hidden": 32, "noise": 0.15}
    knobs = {"dropout": Knob(0.1, "learning", low=0.0, high=0.9, shapes_model=True)}
    default_space = {
        "learning_rate": {"low": 1e-3, "high": 3e-2, "log": True},
        "batch_size": [16, 64],
        "micro_batch_size": [8, 16, 64],
        "num_workers": [0, 1],
        "amp_dtype": ["fp32", "bf16"],
    }

    def model(self, config):
        """Returns a small perceptron."""
        hidden = config.options.get("hidden", 32)
        return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Dropout(config.knobs.dropout), nn.Linear(hidden, 2))

    def dataset(self, config, split):
        """Returns points, shape (2,), and their class."""
        count = 1024 if split == "train" else 256
        random = torch.Generator().manual_seed(count)
        angle = torch.rand(count, generator=random) * math.pi
        label = torch.randint(0, 2, (count,), generator=random)
        upper = torch.stack([angle.cos(), angle.sin()], dim=1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
        points = torch.where(label[:, None] == 0, upper, lower)
        noise = config.options.get("noise", 0.15) * torch.randn(count, 2, generator=random)
        return TensorDataset(points + noise, label)

    def loss(self, model, batch):
        """Returns the cross-entropy."""
        points, label = batch
        return nn.functional.cross_entropy(model(points), label)

    def evaluate(self, model, batches):
        """Returns the share of points told right."""
        right, seen = torch.zeros(()), 0
        for points, label in batches:
            right += (model(points).argmax(dim=1) == label).sum()
            seen += len(label)
        return {"accuracy": right.item() / seen}


WORKLOAD = Moons()
BEFORE = {"learning_rate": 0.01, "batch_size": 32}  # how it is trained today: what gains are measured against
