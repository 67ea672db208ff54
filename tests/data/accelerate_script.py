"""A loop of Accelerate's, as one trains it: squares and discs."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def pictures(count, seed):
    """Returns noisy pictures of a square or a disc somewhere, and which of the two."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (count, 1, 1, 1), generator=random)
    middle = 8 + 16 * torch.rand(count, 2, 1, 1, 1, generator=random)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    dy, dx = (y - middle[:, 0]).abs(), (x - middle[:, 1]).abs()
    shape = torch.where(label == 0, torch.maximum(dx, dy) < 5.3, dx**2 + dy**2 < 6**2)  # as large as each other
    return TensorDataset(shape + 0.2 * torch.randn(count, 1, 32, 32, generator=random), label.flatten())


TRAIN, VAL = pictures(1024, 1), pictures(256, 2)


def network():
    """Returns two convolutions and a linear layer."""
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 2))


def evaluate(net):
    """Returns the share of validation pictures that are told right."""
    images, labels = VAL.tensors
    device = next(net.parameters()).device
    with torch.no_grad():
        return (net(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def train():
    """Trains for three passes over the data."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(TRAIN, shuffle=True, batch_size=16)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(3):
        for images, labels in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(images), labels))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(evaluate(net))


if __name__ == "__main__":
    train()
