"""A workload that runs out of memory where it is told to: in forward, backward, optimiser, evaluation or a loader.

The knob `augmentation` says where (`WHERE`), since it reaches the loader's processes and the loss without a new model.
A cap of 3.5 MiB holds everything but that. Options: `leak` keeps so many bytes of every micro-batch for ever, `times`
makes all that is greedy so many times larger, for the card of a CUDA device, whose libraries take some MiB themselves.
"""

from typing import ClassVar

import numpy
import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainables import Knob

WHERE = {"nowhere": 1.0, "forward": 0.1, "backward": 0.2, "optimizer": 0.3, "evaluation": 0.4, "loader": 0.5}
WHERE = {**WHERE, "loader_hidden": 0.6, "hidden": 0.7}
CAP_BYTES = 7 * 2**19
BALLAST = 2**18  # float32: 1 MiB
GREED = 2**20  # float32: 4 MiB


def hidden_bytes():
    """Returns more than the machine has free: unseen by a counter of tensors, never touched, so free where granted."""
    return psutil.virtual_memory().available + 2**30


class Hungry(torch.autograd.Function):
    """The identity, which asks for more than there is when gradients come back."""

    @staticmethod
    def forward(ctx, values, greed):
        """Returns the values."""
        ctx.greed = greed
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        """Returns the gradient, and makes what does not fit on the way."""
        return gradient + torch.ones(ctx.greed, device=gradient.device)[0] * 0, None


class Net(nn.Module):
    """A line through points, and a ballast that takes part where the optimiser is to run out of memory."""

    def __init__(self, times=1):
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.ballast = nn.Parameter(torch.zeros(BALLAST * times))
        self.greed = GREED * times
        self.where = 1.0

    def forward(self, values):
        """Returns shape (batch,) from (batch, 8)."""
        return self.line(values).squeeze(1)


class Greedy:
    """Regression of a sum."""

    objectives: ClassVar = {"error": "min"}
    knobs: ClassVar = {"augmentation": Knob(1.0, "learning", low=0.0, high=2.0)}
    options: ClassVar = {"leak": 0, "times": 1}
    default_space: ClassVar = {"learning_rate": [0.01, 0.1]}
    kept: ClassVar = []

    def model(self, config):
        """Returns the net."""
        self.leak = int(config.options.get("leak", 0))
        return Net(int(config.options.get("times", 1)))

    def dataset(self, config, split):
        """Returns 64 points with their sum, 16 to validate."""
        values = torch.randn(64 if split == "train" else 16, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(values, values.sum(1))

    def augment(self, batch, keys, config, phase):
        """Returns the batch and where to fail; fails here where it is the loader's turn."""
        where = config.knobs.augmentation
        if where == WHERE["loader"]:
            torch.empty(2**60, dtype=torch.uint8)
        if where == WHERE["loader_hidden"]:
            torch.empty(hidden_bytes(), dtype=torch.uint8)
        return [*batch, torch.tensor(where)]

    def loss(self, model, batch):
        """Returns the mean squared error."""
        values, target, where = batch
        model.where = round(where.item(), 3)
        if model.where == WHERE["forward"]:
            values = values + torch.ones(model.greed, device=values.device)[0] * 0
        if model.where == WHERE["hidden"]:
            numpy.empty(hidden_bytes(), dtype=numpy.uint8)
        if self.leak:
            Greedy.kept.append(torch.ones(self.leak, dtype=torch.uint8))
        predicted = model(values)
        if model.where == WHERE["backward"]:
            predicted = Hungry.apply(predicted, model.greed)
        loss = (predicted - target).square().mean()
        return loss + model.ballast.sum() * 0 if model.where == WHERE["optimizer"] else loss

    def evaluate(self, model, batches):
        """Returns the mean squared error of the validation split."""
        if model.where == WHERE["evaluation"]:
            torch.ones(model.greed, device=model.ballast.device)
        errors = [(model(values) - target).square().mean() for values, target in batches]
        return {"error": torch.stack(errors).mean().item()}


WORKLOAD = Greedy()
