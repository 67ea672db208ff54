"""A training by the contract: which of four frequencies has a noisy wave? Waves are of unequal length.

Put your data, model, loss and quality in the place of these. The loop that trains them is cardtune's.
"""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainables import Knob

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


class Waves:
    """The contract: four methods and two attributes, and what else this training needs."""

    objectives = {"accuracy": "max"}
    default_space = {
        "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
        "batch_size": [16, 32, 64],
        "micro_batch_size": [16, 32, 64],
        "hidden": [16, 32, 64],
        "num_workers": [0, 1],
        "length_bucketing": [False, True],
        "ram_cache": [False, True],
    }
    options = {"count": 1024}  # workload.count=N on the command line
    knobs = {"hidden": Knob(32, "both", values=(16, 32, 64, 128), shapes_model=True)}  # a knob of its own: a width

    def model(self, config):
        """Returns a new model."""
        return Net(config.knobs.hidden)

    def dataset(self, config, split):
        """Returns the samples of a split, the same at every call."""
        count = config.options["count"]
        return waves(count, seed=1) if split == "train" else waves(count // 4, seed=2)

    def collate(self, samples):
        """Returns a batch of samples: waves padded to the longest, how long each is, and labels."""
        x = pad_sequence([wave for wave, _ in samples], batch_first=True)
        steps = torch.tensor([len(wave) for wave, _ in samples])
        return {"x": x, "steps": steps, "labels": torch.tensor([label for _, label in samples])}

    def length(self, sample):
        """Returns how long a sample is, so that those of like length may share a micro-batch."""
        return len(sample[0])

    def loss(self, model, batch):
        """Returns the mean loss of a batch."""
        return nn.functional.cross_entropy(model(batch["x"], batch["steps"]), batch["labels"])

    def evaluate(self, model, batches):
        """Returns the share of waves that are told right."""
        right, seen = 0, 0
        for batch in batches:
            right += (model(batch["x"], batch["steps"]).argmax(dim=1) == batch["labels"]).sum().item()
            seen += len(batch["labels"])
        return {"accuracy": right / seen}

    def baselines(self, config):
        """Returns what is reached without learning anything: one class for all."""
        return {"one class": {"accuracy": 1 / len(FREQUENCIES)}}


WORKLOAD = Waves()
BEFORE = {  # your current settings; what is not searched stays so
    "learning_rate": 0.003,
    "batch_size": 32,
    "micro_batch_size": 32,
    "schedule": "cosine",
    "warmup_frac": 0.0,
    "max_grad_norm": 1.0,
}
