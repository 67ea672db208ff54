"""The U-Net of unet_script.py by the contract: the script stays as it is."""

import torch
from torch.nn import functional
from unet_script import SETTINGS, TRAIN, VAL, UNet

from trainables import Knob


class Discs:
    """Finds discs in noise."""

    objectives = {"miou": "max"}
    knobs = {
        "channels": Knob(8, "both", values=(4, 8, 16), shapes_model=True),
        "smoothing": Knob(0.1, "learning", low=0.0, high=0.3, shapes_model=True),
    }
    default_space = {
        "learning_rate": {"low": 0.01, "high": 0.4, "log": True},
        "momentum": {"low": 0.5, "high": 0.95},
        "smoothing": {"low": 0.0, "high": 0.2},
        "channels": [4, 8, 16],
        "batch_size": [8, 16, 32],
        "micro_batch_size": [8, 16, 32],
    }

    def model(self, config):
        """Returns the net as wide as the knob says."""
        net = UNet(config.knobs.channels)
        net.smoothing = config.knobs.smoothing
        return net

    def dataset(self, config, split):
        """Returns images and masks."""
        return TRAIN if split == "train" else VAL

    def loss(self, model, batch):
        """Returns the cross-entropy of all pixels."""
        images, masks = batch
        return functional.cross_entropy(model(images), masks, label_smoothing=model.smoothing)

    def evaluate(self, model, batches):
        """Returns the share of discs and what was found of them that they have in common."""
        common, either = torch.zeros(()), torch.zeros(())
        for images, masks in batches:
            found = model(images).argmax(dim=1)
            common, either = common + (found & masks).sum().cpu(), either + (found | masks).sum().cpu()
        return {"miou": (common / either.clamp(min=1)).item()}


WORKLOAD = Discs()
BEFORE = {
    **SETTINGS,
    **{"micro_batch_size": 16, "optimizer": "sgd", "nesterov": True, "schedule": "cosine", "warmup_frac": 0.0},
    **{"max_grad_norm": 1.0, "weight_decay": 0.0},
}
