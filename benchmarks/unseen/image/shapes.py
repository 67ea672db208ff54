"""Drawn pictures of seven shapes, anywhere, turned, in any colours and noise, and a net of convolutions for them."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SIDE, CLASSES, TRAIN_SIZE, VAL_SIZE = 20, 7, 6144, 2000


def outline(shape, x, y):
    """Returns where a shape about the origin is, for points of any arrays; it is some 1 wide each way from there."""
    radius, angle = np.hypot(x, y), np.arctan2(y, x)
    polygon = [radius * np.cos((angle % (2 * np.pi / n)) - np.pi / n) for n in (3, 4)]
    return (
        radius < 0.9,
        (radius < 1) & (radius > 0.6),
        polygon[0] < 0.55,
        polygon[1] < 0.75,
        (np.minimum(abs(x), abs(y)) < 0.28) & (radius < 1),
        radius < 0.7 + 0.35 * np.cos(5 * angle),
        (radius < 1) & (np.hypot(x - 0.5, y) > 0.8),
    )[shape]


def pictures(count, seed):
    """Returns images, (count, 3, SIDE, SIDE), and the shape in each."""
    random = np.random.default_rng(seed)
    images, labels = np.empty((count, 3, SIDE, SIDE), np.float32), np.arange(count) % CLASSES
    down, right = np.mgrid[0:SIDE, 0:SIDE]
    for image, label in zip(images, labels, strict=True):
        size, turn = random.uniform(4, 7), random.uniform(0, 2 * np.pi)
        middle = random.uniform(size, SIDE - size, 2)
        x, y = (right - middle[0]) / size, (down - middle[1]) / size
        inside = outline(label, x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))
        ground, ink = random.uniform(-1, 1, (3, 1, 1)), random.choice([-1, 1]) * random.uniform(0.4, 1.5, (3, 1, 1))
        image[:] = ground + ink * inside + random.normal(0, 0.15, image.shape)
        top, left = random.integers(0, SIDE - 6, 2)
        image[:, top : top + 6, left : left + 3] = random.uniform(-1, 1)  # something before it
    return torch.from_numpy(images), torch.from_numpy(labels)


class Pictures(Dataset):
    """Pictures and their shapes, to train on mirrored at random and moved by up to two points."""

    def __init__(self, count, seed):
        self.images, self.labels = pictures(count, seed)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        image = self.images[number]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image.roll(torch.randint(-2, 3, (2,)).tolist(), (1, 2)), self.labels[number]


class Eye(nn.Module):
    """Three convolutions with batch norm, each on half of the points of the last; the largest over points; a layer."""

    def __init__(self, width):
        super().__init__()
        layers = []
        for inner, outer in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(4 * width, CLASSES)

    def forward(self, images):
        """Returns logits, (batch, CLASSES)."""
        return self.head(self.layers(images).amax(dim=(2, 3)))


TRAIN, VAL = Pictures(TRAIN_SIZE, 1), pictures(VAL_SIZE, 2)


def accuracy(net):
    """Returns the share of pictures not trained on that are named right."""
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(images).argmax(dim=1) for images in VAL[0].split(250)])
    net.train()
    return (found == VAL[1]).sum().item() / VAL_SIZE
