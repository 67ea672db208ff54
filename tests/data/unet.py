"""A user's segmentation in one file: a U-Net with batch norm, SGD, a cosine, clipping, and two knobs of its own."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainables import Knob

BEFORE = {
    **{"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "schedule": "cosine", "max_grad_norm": 1.0},
    **{"learning_rate": 0.1, "batch_size": 16, "micro_batch_size": 16, "channels": 16, "smoothing": 0.1},
}


def block(inner, outer):
    """Returns two convolutions with batch norm."""
    layers = []
    for size in (inner, outer):
        layers += [nn.Conv2d(size, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down and up again (Ronneberger et al., arXiv 1505.04597)."""

    def __init__(self, channels, smoothing):
        super().__init__()
        self.smoothing = smoothing
        self.down, self.bottom = block(1, channels), block(channels, 2 * channels)
        self.up, self.head = block(3 * channels, channels), nn.Conv2d(channels, 2, 1)

    def forward(self, images):
        """Returns logits, shape (batch, 2, side, side)."""
        fine = self.down(images)
        coarse = functional.interpolate(self.bottom(functional.max_pool2d(fine, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([fine, coarse], dim=1)))


class Discs:
    """Finds bright discs in noise."""

    objectives = {"miou": "max"}
    options = {"count": 96, "side": 16}
    knobs = {
        "channels": Knob(16, "both", values=(4, 8, 16), shapes_model=True, doc="Channels of the first level."),
        "smoothing": Knob(0.1, "learning", low=0.0, high=0.3, shapes_model=True, doc="Label smoothing."),
    }
    default_space = {
        "learning_rate": {"low": 0.02, "high": 0.4, "log": True},
        "momentum": {"low": 0.5, "high": 0.95},
        "smoothing": {"low": 0.0, "high": 0.2},
        "channels": [8, 16],
        "batch_size": [8, 16],
        "micro_batch_size": [8, 16],
        "channels_last": [False, True],
        **{"optimizer": "sgd", "nesterov": True, "schedule": "cosine", "max_grad_norm": 1.0},
    }

    def model(self, config):
        """Returns the net as wide as the knob says."""
        return UNet(config.knobs.channels, config.knobs.smoothing)

    def dataset(self, config, split):
        """Returns noisy images, shape (1, side, side), and the mask of their disc."""
        side, count = int(config.options.get("side", 16)), int(config.options.get("count", 96))
        count = count if split == "train" else count // 3
        random = torch.Generator().manual_seed(int(split == "val"))
        at = torch.arange(side, dtype=torch.float32)
        centre = torch.rand(count, 2, generator=random) * side
        radius = 2 + torch.rand(count, generator=random) * side / 4
        away = (at[None, :, None] - centre[:, :1, None]) ** 2 + (at[None, None, :] - centre[:, 1:, None]) ** 2
        mask = (away < radius[:, None, None] ** 2).long()
        images = mask[:, None].float() + 0.7 * torch.randn(count, 1, side, side, generator=random)
        return TensorDataset(images, mask)

    def loss(self, model, batch):
        """Returns the cross-entropy of all pixels."""
        images, mask = batch
        return functional.cross_entropy(model(images), mask, label_smoothing=model.smoothing)

    def evaluate(self, model, batches):
        """Returns the share of the disc and what was found of it that they have in common."""
        common, either = torch.zeros(()), torch.zeros(())
        for images, mask in batches:
            found = model(images).argmax(dim=1)
            common += (found & mask).sum()
            either += (found | mask).sum()
        return {"miou": (common / either.clamp(min=1)).item()}


WORKLOAD = Discs()
