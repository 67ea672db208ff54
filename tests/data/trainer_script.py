"""A token classifier of random weights, as one fine-tunes it by transformers' Trainer on data made here."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments


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


def train():
    """Fine-tunes for three passes over the data."""
    arguments = TrainingArguments(output_dir="trained", per_device_train_batch_size=16, learning_rate=3e-3)
    model = BertForTokenClassification(CONFIG)
    trainer = Trainer(model, arguments, train_dataset=TRAIN, eval_dataset=VAL, compute_metrics=metrics)
    trainer.train()


if __name__ == "__main__":
    train()
