"""Small models of every kind whose memory behaves in a way of its own, as workloads of the loop; for memory_check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainables.workload import Config, Split

CLASSES, VOCABULARY, TIME = 10, 2000, 64
SAMPLES = 64
Sample = tuple[Tensor, Tensor]


class Chain(nn.Module):
    """Blocks one after the other, which activation checkpointing finds, and a head."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module, stem: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem or nn.Identity(), nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, (batch, ..., class)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


class Residual(nn.Module):
    """Two convolutions with batch normalisation beside a shortcut (He et al., arXiv 1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Identity() if stride == 1 and channels_in == channels else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, channels, height / stride, width / stride)."""
        return F.relu(self.main(x) + self.shortcut(x))


class Separable(nn.Module):
    """A convolution within channels and one between them, residual (Liu et al., "ConvNeXt", arXiv 2201.03545)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.within = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.GroupNorm(1, channels)
        self.wide, self.narrow = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the shape of x."""
        return x + cast(Tensor, self.narrow(F.gelu(self.wide(self.norm(self.within(x))))))


class UNet(nn.Module):
    """Down three times and up again, each level beside its like (Ronneberger et al., arXiv 1505.04597)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(_pair(a + b, b) for a, b in ((sizes[2], sizes[1]), (sizes[1], sizes[0])))
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, (batch, height, width, class)."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for block, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), beside], dim=1))
        return cast(Tensor, self.out(x)).permute(0, 2, 3, 1)


class Recurrent(nn.Module):
    """An embedding, an LSTM or a GRU of two layers, and a head over the vocabulary."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], hidden: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, hidden), nn.Linear(hidden, VOCABULARY)
        self.blocks = nn.ModuleList(kind(hidden, hidden, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, (batch, time, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return cast(Tensor, self.out(x))


class Attending(nn.Module):
    """A causal language model on torch's own layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(_layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, (batch, time, vocabulary)."""
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return cast(Tensor, self.out(x))


class Pointing(nn.Module):
    """A decoder that points at its inputs, step by step (Vinyals et al., arXiv 1506.03134)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(2, width), nn.LSTMCell(width, width)
        self.blocks = nn.ModuleList(_layer(width) for _ in range(2))
        self.key, self.query, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        """Returns scores, (batch, step, node)."""
        x = self.embed(points)
        for block in self.blocks:
            x = block(x)
        hidden = cell = x.mean(dim=1)
        keys, scores = self.key(x), []
        for step in range(points.shape[1]):
            hidden, cell = self.cell(x[:, step], (hidden, cell))
            scores.append(self.score(torch.tanh(keys + self.query(hidden)[:, None])).squeeze(-1))
        return torch.stack(scores, dim=1)


class Language(nn.Module):
    """A language model of transformers, which returns its logits, (batch, time, vocabulary)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, (batch, time, vocabulary)."""
        return cast(Tensor, self.model(input_ids=tokens).logits)


def _decoder(kind: Any, layers: int, heads: int, kv_heads: int, **own: int) -> Any:
    """Returns the configuration of a decoder of 192 features, as transformers has it."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": layers}
    return kind(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False, **own)


def _dora() -> nn.Module:
    """A small Llama with DoRA adapters (Liu et al., arXiv 2402.09353), all else of it frozen."""
    config = _decoder(transformers.LlamaConfig, layers=4, heads=6, kv_heads=2, intermediate_size=512)
    settings = peft.LoraConfig(r=8, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    return Language(peft.get_peft_model(cast(Any, transformers.LlamaForCausalLM(config)), settings))


def _gemma() -> nn.Module:
    """A small Gemma 3, all of it trained, with windows shorter than its rows in five of six layers."""
    own = {"intermediate_size": 768, "head_dim": 48, "sliding_window": TIME // 4}
    config = _decoder(transformers.Gemma3TextConfig, layers=6, heads=4, kv_heads=1, **own)
    return Language(transformers.Gemma3ForCausalLM(config))


def _pair(channels_in: int, channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.GroupNorm(4, channels),
        nn.SiLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.SiLU(),
    )


def _layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)


def _perceptron(width: int, depth: int) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth))
    return Chain(blocks, nn.Linear(width, CLASSES), nn.Linear(64, width))


def _resnet() -> nn.Module:
    sizes = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    return Chain((Residual(*size) for size in sizes), head, nn.Conv2d(3, 32, 3, padding=1))


def _depthwise() -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, CLASSES))
    return Chain((Separable(48) for _ in range(3)), head, nn.Conv2d(3, 48, 2, stride=2))


def _bag() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU())]
    return Chain(blocks, nn.Linear(64, CLASSES), nn.EmbeddingBag(200_000, 64))


def _encoder() -> nn.Module:
    head = nn.Linear(128, CLASSES)
    return Chain((_layer(128) for _ in range(4)), head, nn.Embedding(VOCABULARY, 128))


def _numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def _tokens(count: int, time: int = TIME) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, count, (time,))


@dataclass(frozen=True)
class Kind:
    """A workload of one kind: how its model is built, and what a sample and its labels are."""

    build: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    y: Callable[[], Tensor]

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"loss": "min"}
    default_space: ClassVar[Mapping[str, Any]] = {}

    def model(self, config: Config) -> nn.Module:
        """Returns a new model."""
        return self.build()

    def dataset(self, config: Config, split: Split) -> Dataset[Sample]:
        """Returns samples of random numbers."""
        return cast(Dataset[Sample], [(self.x(), self.y()) for _ in range(SAMPLES)])

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Returns the mean cross-entropy."""
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Returns nothing of use: nobody asks."""
        return {"loss": 0.0}


_CLASS = _tokens(CLASSES, 1)
KINDS: Mapping[str, Kind] = {
    "small MLP": Kind(lambda: _perceptron(256, 2), _numbers(64), _CLASS),
    "deep MLP": Kind(lambda: _perceptron(512, 12), _numbers(64), _CLASS),
    "residual CNN": Kind(_resnet, _numbers(3, 32, 32), _CLASS),
    "depthwise CNN": Kind(_depthwise, _numbers(3, 32, 32), _CLASS),
    "U-Net": Kind(lambda: UNet(16), _numbers(3, 32, 32), _tokens(CLASSES, 32 * 32)),
    "LSTM": Kind(lambda: Recurrent(nn.LSTM, 192), _tokens(VOCABULARY), _tokens(VOCABULARY)),
    "GRU": Kind(lambda: Recurrent(nn.GRU, 192), _tokens(VOCABULARY, 24), _tokens(VOCABULARY, 24)),
    "encoder": Kind(_encoder, _tokens(VOCABULARY), _tokens(CLASSES)),
    "decoder LM": Kind(lambda: Attending(128, 4), _tokens(VOCABULARY), _tokens(VOCABULARY)),
    "pointer decoder": Kind(lambda: Pointing(128), _numbers(20, 2), _tokens(20, 20)),
    "DoRA LM": Kind(_dora, _tokens(VOCABULARY), _tokens(VOCABULARY)),
    "Gemma 3 LM": Kind(_gemma, _tokens(VOCABULARY), _tokens(VOCABULARY)),
    "embedding-heavy": Kind(_bag, _tokens(200_000), _CLASS),
}
CONVOLUTIONAL = ("residual CNN", "depthwise CNN", "U-Net")
