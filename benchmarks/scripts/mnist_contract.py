"""Digits by a small convolutional network: the training of mnist_script.py by the contract.

After mnist/main.py of pytorch/examples (BSD-3-Clause). Network and digits are imported from the script, which stays as
it is.
"""

import torch
import torch.nn.functional as F
from mnist_script import Net, digits

from trainables import Knob


class Digits:
    """What is learned, with the optimiser and the schedule of the script."""

    objectives = {"accuracy": "max"}
    default_space = {
        "learning_rate": {"low": 0.1, "high": 3.0, "log": True},
        "dropout": [0.25, 0.5],
        "batch_size": [32, 64, 128, 256],
        "micro_batch_size": [32, 64, 128, 256],
        "num_workers": [0, 1],
        "ram_cache": [False, True],
        "channels_last": [False, True],
    }
    knobs = {"dropout": Knob(0.5, "learning", low=0.0, high=0.9, shapes_model=True, doc="Before the last layer.")}

    def model(self, config):
        """Returns a new network."""
        net = Net()
        net.dropout2.p = config.knobs.dropout
        return net

    def dataset(self, config, split):
        """Returns the digits of a split."""
        return digits()[split == "val"]

    def loss(self, model, batch):
        """Returns the mean loss of a batch."""
        data, target = batch
        return F.nll_loss(model(data), target)

    def evaluate(self, model, batches):
        """Returns the share of digits that are told right."""
        correct, seen = 0, 0
        for data, target in batches:
            correct += (model(data).argmax(dim=1) == target).sum().item()
            seen += len(target)
        return {"accuracy": correct / seen}

    def optimizer(self, model, config):
        """Returns the script's Adadelta."""
        own = config.knobs
        return torch.optim.Adadelta(model.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay)

    def schedule(self, progress, config):
        """Returns 0.7 to the power of the passes that are over, of the script's 14."""
        return 0.7 ** int(14 * progress)

    def baselines(self, config):
        """Returns what one digit for all reaches."""
        return {"one digit": {"accuracy": digits()[1].tensors[1].bincount().max().item() / 360}}


WORKLOAD = Digits()
BEFORE = {  # as it is trained today
    "learning_rate": 1.0,
    "dropout": 0.5,
    "batch_size": 64,
    "micro_batch_size": 64,
    "weight_decay": 0.0,
}
