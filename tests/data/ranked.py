"""Two half circles, told apart by several processes; one of them fails where a knob says so."""

import os
import signal

import torch
from torch import distributed
from torch.nn import functional as F

from tests.data.mine import Moons
from trainables import Knob

CALLS = 6
"""A process fails at its sixth loss, in the middle of a batch."""
HOW = ("raise", "oom", "kill")


class Ranked(Moons):
    """The rank `rank` fails as `how` of `HOW` has it; -1: none does."""

    options = {"hidden": 32, "noise": 0.15}
    knobs = {
        "dropout": Knob(0.0, "learning", low=0.0, high=0.9, shapes_model=True),
        "rank": Knob(-1.0, "learning", low=-1.0, high=8.0, shapes_model=True),
        "how": Knob(0.0, "learning", low=0.0, high=2.0, shapes_model=True),
    }

    def model(self, config):
        """Returns a small perceptron, which knows what is to happen to it."""
        made = super().model(config)
        made.fails, made.how, made.calls = int(config.knobs.rank), HOW[int(config.knobs.how)], 0
        return made

    def loss(self, model, batch):
        """Returns the cross-entropy, unless it fails."""
        points, label = batch
        model.calls += 1
        here = distributed.get_rank() if distributed.is_initialized() else -1
        if here == model.fails and here >= 0 and model.calls == CALLS:
            if model.how == "oom":
                torch.zeros(64 * 2**20, dtype=torch.uint8)
            elif model.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("so it goes")
        return F.cross_entropy(model(points), label)


WORKLOAD = Ranked()
