"""The GRU of gru_script.py by the contract: the script stays as it is."""

import gru_script
from torch.nn import functional

from trainables import Knob


class Counts:
    """Tells which of two tokens stands in a sequence more often."""

    objectives = {"accuracy": "max"}
    knobs = {"hidden": Knob(64, "both", values=(32, 64, 128), shapes_model=True)}
    default_space = {
        "learning_rate": {"low": 1e-3, "high": 3e-2, "log": True},
        "hidden": [32, 64, 128],
        "batch_size": [16, 32, 64],
        "micro_batch_size": [8, 16, 32, 64],
        "length_bucketing": [False, True],
    }

    def model(self, config):
        """Returns the net as wide as the knob says."""
        return gru_script.Net(config.knobs.hidden)

    def dataset(self, config, split):
        """Returns sequences and their labels."""
        return gru_script.TRAIN if split == "train" else gru_script.VAL

    def collate(self, samples):
        """Returns a padded batch."""
        return gru_script.collate(samples)

    def length(self, sample):
        """Returns how many tokens a sequence has."""
        return len(sample[0])

    def loss(self, model, batch):
        """Returns the cross-entropy."""
        tokens, lengths, labels = batch
        return functional.cross_entropy(model(tokens, lengths), labels)

    def evaluate(self, model, batches):
        """Returns the share of sequences that are told right."""
        right = seen = 0
        for tokens, lengths, labels in batches:
            right += (model(tokens, lengths).argmax(dim=1) == labels).sum().item()
            seen += len(labels)
        return {"accuracy": right / seen}

    def baselines(self, config):
        """Returns what the answer "no" reaches."""
        return {"one class": {"accuracy": sum(1 - label for _, label in gru_script.VAL) / len(gru_script.VAL)}}


WORKLOAD = Counts()
BEFORE = {**gru_script.SETTINGS, "micro_batch_size": 32, "warmup_frac": 0.0, "schedule": "constant"}
