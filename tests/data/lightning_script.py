"""A LightningModule with a LightningDataModule, as one trains it: two interleaved half circles."""

import math

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moons(count, seed):
    """Returns noisy points on two half circles, and which of the two."""
    random = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=random)
    label = torch.randint(0, 2, (count,), generator=random)
    x = torch.where(label == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(label == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.15 * torch.randn(count, 2, generator=random)
    return TensorDataset(points, label)


TRAIN, VAL = moons(1024, 1), moons(256, 2)


class Data(LightningDataModule):
    """Half circles, in a DataLoader of the arguments given."""

    def __init__(self, **loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return DataLoader(TRAIN, shuffle=True, **self.loader)

    def val_dataloader(self):
        return DataLoader(VAL, batch_size=256)


class Net(LightningModule):
    """A perceptron with a one-cycle schedule."""

    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, points):
        return self.net(points)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(self(points), labels)

    def validation_step(self, batch, batch_idx):
        points, labels = batch
        self.log("accuracy", (self(points).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train():
    """Trains for three passes over the data."""
    trainer = Trainer(max_epochs=3)
    trainer.fit(Net(0.01), Data(batch_size=32))


if __name__ == "__main__":
    train()
