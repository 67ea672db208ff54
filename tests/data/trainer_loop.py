"""A token classifier of random weights, fine-tuned by transformers' Trainer on data made here."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer

from trainables.integrations.transformers import StudyCallback, training_arguments


class Tokens(Dataset):
    """Sentences of 12 tokens; a token's label is whether it is in the upper half of the vocabulary."""

    def __init__(self, count, seed):
        random = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 100, (count, 12), generator=random)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids >= 50).long()}


TRAIN, VAL = Tokens(256, 1), Tokens(64, 2)
CONFIG = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)


def metrics(found):
    """Returns the share of tokens that are told right."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def train(run):
    """Fine-tunes for as long as it is let."""
    arguments = training_arguments(run, TRAIN, output_dir="trained", learning_rate=run["learning_rate"])
    model = BertForTokenClassification(CONFIG)
    trainer = Trainer(model, arguments, train_dataset=TRAIN, eval_dataset=VAL, compute_metrics=metrics)
    trainer.add_callback(StudyCallback(run))
    trainer.train()


SPACE = {
    "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
    "batch_size": [16, 32],
    "micro_batch_size": [8, 16],
    "amp_dtype": ["fp32", "bf16"],
}
OBJECTIVES = {"accuracy": "max"}
