"""A training by a loop of its own: which of four frequencies has a noisy wave? Waves are of unequal length.

Put yours in the place of it: what a study decides is asked of `run`, all else stays as it was in your script.
"""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

FREQUENCIES = (0.05, 0.1, 0.15, 0.2)


def waves(count, seed):
    """Returns a list of samples: a wave of 16 to 48 steps, and which of the frequencies it has."""
    random = torch.Generator().manual_seed(seed)
    samples = []
    for steps, label in zip(torch.randint(16, 49, (count,), generator=random), torch.arange(count) % 4, strict=True):
        angle = 2 * math.pi * (FREQUENCIES[label] * torch.arange(steps) + torch.rand(1, generator=random))
        samples.append((angle.sin() + 0.5 * torch.randn(len(angle), generator=random), int(label)))
    return samples


class Net(nn.Module):
    """A convolution and a layer on each step of a wave, their mean over its steps, and a layer on that."""

    def __init__(self, hidden):
        super().__init__()
        self.convolution = nn.Conv1d(1, hidden, kernel_size=9, padding=4)
        self.step, self.head = nn.Linear(hidden, hidden), nn.Linear(hidden, len(FREQUENCIES))

    def forward(self, x, steps):
        """Returns logits, (batch, 4), of waves, (batch, longest), and how long each is, (batch,)."""
        states = self.convolution(x[:, None]).relu().transpose(1, 2)
        inside = torch.arange(x.shape[1], device=x.device) < steps[:, None]
        return self.head((self.step(states).relu() * inside[:, :, None]).sum(dim=1) / steps[:, None])


def collate(samples):
    """Returns a batch of samples: waves padded to the longest, how long each is, and labels."""
    x = pad_sequence([wave for wave, _ in samples], batch_first=True)
    steps = torch.tensor([len(wave) for wave, _ in samples])
    return {"x": x, "steps": steps, "labels": torch.tensor([label for _, label in samples])}


def evaluate(net, loader):
    """Returns the share of waves that are told right."""
    net.eval()
    device, right = next(net.parameters()).device, 0
    with torch.no_grad():
        for batch in loader:
            logits = net(batch["x"].to(device), batch["steps"].to(device))
            right += (logits.argmax(dim=1).cpu() == batch["labels"]).sum().item()
    net.train()
    return right / len(loader.dataset)


TRAIN, VAL = waves(1024, seed=1), waves(256, seed=2)


def train(run):
    """Trains for as long as `run` says, and reports the accuracy whenever it is due."""
    loader = DataLoader(TRAIN, shuffle=True, collate_fn=collate, **run.loader())
    val_loader = DataLoader(VAL, batch_size=256, collate_fn=collate)
    net = Net(run["hidden"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=run["learning_rate"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    run.prepare(net, optimizer, schedule)
    for batch in run.batches(loader):
        with run.autocast():
            logits = net(batch["x"], batch["steps"])
            loss = nn.functional.cross_entropy(logits, batch["labels"])
        run.backward(loss, optimizer, max_norm=1.0)
        if run.evaluate_now:
            run.report(accuracy=evaluate(net, val_loader))


SPACE = {
    "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    "batch_size": [16, 32, 64],
    "micro_batch_size": [16, 32, 64],
    "hidden": {"values": [16, 32, 64], "kind": "both"},
    "num_workers": [0, 1],
}
OBJECTIVES = {"accuracy": "max"}
BASELINES = {"one class": {"accuracy": 1 / len(FREQUENCIES)}}
BEFORE = {"learning_rate": 0.003, "hidden": 32, "batch_size": 32, "micro_batch_size": 32}  # your current settings

if __name__ == "__main__":  # python my_loop.py trains on its own, with the values of BEFORE
    from trainables.own_loop import alone

    train(alone(samples=5 * len(TRAIN), pass_samples=len(TRAIN)))
