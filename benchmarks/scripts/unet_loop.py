"""The loop of unet_script.py, as a study can drive it."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

SETTINGS = {"learning_rate": 0.1, "momentum": 0.9, "smoothing": 0.1, "channels": 8, "batch_size": 16}
PASSES = 6


def discs(count, seed, side=32):
    """Returns noisy images, shape (1, side, side), and the mask of the disc in each."""
    random = torch.Generator().manual_seed(seed)
    at = torch.arange(side, dtype=torch.float32)
    centre = torch.rand(count, 2, generator=random) * side
    radius = 3 + torch.rand(count, generator=random) * side / 4
    away = (at[None, :, None] - centre[:, :1, None]) ** 2 + (at[None, None, :] - centre[:, 1:, None]) ** 2
    masks = (away < radius[:, None, None] ** 2).long()
    return TensorDataset(masks[:, None].float() + torch.randn(count, 1, side, side, generator=random), masks)


TRAIN, VAL = discs(512, 1), discs(128, 2)


def block(inner, outer):
    """Returns two convolutions with batch norm."""
    layers = []
    for size in (inner, outer):
        layers += [nn.Conv2d(size, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three levels down and up again (Ronneberger et al., arXiv 1505.04597)."""

    def __init__(self, channels):
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList([block(i, o) for i, o in zip([1, *widths], widths, strict=False)])
        self.up = nn.ModuleList([block(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True)])
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        """Returns logits, shape (batch, 2, side, side)."""
        levels = []
        for number, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if number else x)
            levels.append(x)
        for up, level in zip(self.up, levels[-2::-1], strict=True):
            x = up(torch.cat([functional.interpolate(x, scale_factor=2.0), level], dim=1))
        return self.head(x)


def evaluate(net):
    """Returns the share of discs and what was found of them that they have in common."""
    net.eval()
    device, common, either = next(net.parameters()).device, 0, 0
    with torch.no_grad():
        for images, masks in DataLoader(VAL, 64):
            found = net(images.to(device)).argmax(dim=1).cpu()
            common, either = common + (found & masks).sum(), either + (found | masks).sum()
    net.train()
    return (common / either).item()


def train(config):
    """Trains the net and tells its mean IoU after each pass."""
    loader = DataLoader(TRAIN, shuffle=True, **config.loader())
    net = UNet(config["channels"])
    optimizer = torch.optim.SGD(net.parameters(), config["learning_rate"], config["momentum"], nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    config.prepare(net, optimizer, schedule)
    for _ in config.epochs():
        for images, masks in config.batches(loader):
            loss = functional.cross_entropy(net(images), masks, label_smoothing=config["smoothing"])
            config.backward(loss, optimizer, max_norm=1.0)
        if config.evaluate_now:
            config.report(miou=evaluate(net))


SPACE = {
    "learning_rate": {"low": 0.01, "high": 0.4, "log": True},
    "momentum": {"low": 0.5, "high": 0.95},
    "smoothing": {"values": [0.0, 0.1, 0.2]},
    "channels": {"values": [4, 8, 16], "kind": "both"},
    "batch_size": [8, 16, 32],
    "micro_batch_size": [8, 16, 32],
}
OBJECTIVES = {"miou": "max"}
BEFORE = {**SETTINGS, "micro_batch_size": 16}
