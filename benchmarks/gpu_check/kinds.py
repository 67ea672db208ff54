"""The kinds of model whose memory is checked, as one workload: `options` say which, how many samples, which size.

Those of `benchmarks.memory_models`, and a decoder of Gemma-3's build with DoRA adapters and random weights, at the size
of the 1B model and small. A workload of its own, since a prediction is made in another process, which loads it by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.memory_models import KINDS, Kind
from trainables.workload import Config, Split

REF = __name__
GEMMA, SMALL_GEMMA = "Gemma-3 1B DoRA", "small Gemma DoRA"
GEMMA_SAMPLES = 128
"""Of its data set everywhere, so that a prediction of one part serves the others."""


@dataclass(frozen=True)
class Size:
    """Of a Gemma-3 decoder; the last number is the length of a sample in tokens."""

    width: int
    inner: int
    layers: int
    vocabulary: int
    head_dim: int
    time: int


SIZES: Mapping[str, Size] = {
    GEMMA: Size(1152, 6912, 26, 262_144, 256, 512),  # google/gemma-3-1b-pt's config.json
    SMALL_GEMMA: Size(96, 256, 2, 1000, 32, 24),
}


class Gemma(nn.Module):
    """A Gemma-3 decoder (arXiv 2503.19786) of four query heads and one of keys, with DoRA, all else of it frozen."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        config = transformers.Gemma3TextConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=size.head_dim,
            use_cache=False,
        )
        settings = peft.LoraConfig(r=16, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(cast(Any, transformers.Gemma3ForCausalLM(config)), settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, (batch, time, vocabulary)."""
        return cast(Tensor, self.model(input_ids=tokens).logits)


def kind_of(config: Config) -> Kind:
    """Returns the kind that the option names; raises KeyError for another."""
    name = str(config.options.get("kind", Kinds.options["kind"]))
    return _gemma(SIZES[name]) if name in SIZES else KINDS[name]


def _gemma(size: Size) -> Kind:
    def tokens() -> Tensor:
        return torch.randint(0, size.vocabulary, (size.time,))

    def build() -> nn.Module:
        return Gemma(size)

    return Kind(build, tokens, tokens)


class Kinds:
    """The workload."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"loss": "min"}
    default_space: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {"kind": "small MLP", "samples": 64}

    def model(self, config: Config) -> nn.Module:
        """Returns a new model."""
        return kind_of(config).build()

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns `samples` samples of random numbers."""
        kind = kind_of(config)
        count = int(config.options.get("samples", self.options["samples"]))
        return cast(Dataset[Any], [(kind.x(), kind.y()) for _ in range(count)])

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Returns the mean cross-entropy."""
        return KINDS["small MLP"].loss(model, batch)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Returns nothing of use: nobody asks."""
        return {"loss": 0.0}


WORKLOAD = Kinds()
