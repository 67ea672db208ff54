"""A workload for `oom_search`: which of two symbols is more frequent, by a small encoder that trains in 0.1 s.

Lengths go from 8 to 64 with few long ones, so that what a micro-batch needs depends on which samples it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainables.knob_columns import Knob
from trainables.our_knobs import ROWS
from trainables.workload import Config, Split

SYMBOLS, LONGEST = 16, 64


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Random symbols, 1 to 15; the label is whether 1 is more frequent than 2."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shares = torch.rand(count, generator=random) ** 2
        lengths = (8 + shares * (LONGEST - 8)).round().int().tolist()
        self._symbols = [torch.randint(1, SYMBOLS, (n,), generator=random) for n in lengths]

    def __len__(self) -> int:
        return len(self._symbols)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        symbols = self._symbols[index]
        return symbols, ((symbols == 1).sum() > (symbols == 2).sum()).long()


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Returns shape (batch, time, width) from the same."""
        width = states.shape[-1]
        mixed = self.mix(functional.layer_norm(states, (width,), self.norms[0]))
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        states = states + self.dropout(self.out(seen))
        normed = functional.layer_norm(states, (width,), self.norms[1])
        out: Tensor = states + self.dropout(self.narrow(functional.gelu(self.wide(normed))))
        return out


class Encoder(nn.Module):
    """Embedding, two blocks, a mean over time, a linear layer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width, padding_idx=0)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(2)])
        self.head = nn.Linear(width, 2)

    def forward(self, symbols: Tensor) -> Tensor:
        """Returns logits, shape (batch, 2), from symbols, shape (batch, time)."""
        states = self.embedding(symbols)
        for block in self.blocks:
            states = block(states)
        kept = (symbols > 0).unsqueeze(-1).float()
        logits: Tensor = self.head((states * kept).sum(1) / kept.sum(1))
        return logits


class Majority:
    """The workload."""

    objectives: ClassVar[Mapping[str, Any]] = {"loss": "min"}
    knobs: ClassVar[Mapping[str, Knob]] = {name: ROWS[name] for name in ("hidden_size", "dropout")}
    default_space: ClassVar[Mapping[str, Any]] = {"learning_rate": [0.001, 0.01], "hidden_size": [32, 64]}
    options: ClassVar[Mapping[str, Any]] = {"count": 128}

    def model(self, config: Config) -> nn.Module:
        """Returns an encoder of the width `hidden_size`."""
        return Encoder(config.knobs.hidden_size, config.knobs.dropout)

    def dataset(self, config: Config, split: Split) -> Sequences:
        """Returns `count` sequences to train on, 64 to validate."""
        return Sequences(int(config.options.get("count", 128)) if split == "train" else 64, seed=int(split == "val"))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Returns symbols padded with 0, shape (batch, longest), and labels, shape (batch,)."""
        symbols = nn.utils.rnn.pad_sequence([s for s, _ in samples], batch_first=True)
        return {"symbols": symbols, "label": torch.stack([label for _, label in samples])}

    def length(self, sample: tuple[Tensor, Tensor]) -> int:
        """Returns how many symbols a sample has."""
        return len(sample[0])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy."""
        return functional.cross_entropy(model(batch["symbols"]), batch["label"])

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Returns the mean cross-entropy."""
        total, count = 0.0, 0
        for batch in batches:
            size = len(batch["label"])
            total += float(self.loss(model, batch)) * size
            count += size
        return {"loss": total / count}


WORKLOAD = Majority()
