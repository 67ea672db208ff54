"""Will the market be more volatile in the next hours than in the last? LSTM, Transformer or MLP on several timeframes.

Data: `workload.data=<file or folder>` of bars in .csv (trainables/data/bars.py); without it the hourly EURUSD bars of
2017 in the package gym-anytrading, and without that package the embedded daily stocks. Features and labels are those of
trainables/data/timeframes.py, which prevents leaks from the future.
Labels: `volatility` (default) can be learned, since it is mostly the daily cycle; on the hourly bars plain rules reach
75 to 78 %, see `baselines`. `direction` is whether the price will be higher: expect 50 to 54 %, here and elsewhere, and
suspect a leak if it is more.
Models (knobs.architecture): an LSTM (Hochreiter and Schmidhuber 1997) for each timeframe; a Transformer encoder
(Vaswani et al., arXiv 1706.03762; norms first as in 2002.04745) over the bars of all; or a perceptron on all bars.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainables.data import bar_baselines, timeframes
from trainables.data.bar_windows import BarWindows, parts
from trainables.data.timeframes import BAR_FEATURES, DAY_US, HOUR_US, Timeframe
from trainables.knob_columns import Domain, Knob, Options
from trainables.our_knobs import OURS
from trainables.workload import Config, Split, WorkloadError, options_of

try:
    from trainables.data import bars
except ImportError as error:
    raise WorkloadError(f"workload temporal needs: pip install 'cardtune[temporal]' ({error})") from None

STOCKS_FILE = Path(__file__).parents[1] / "data" / "samples" / "daily_stocks.csv.gz"
INTRADAY, DAILY = "1h:24 4h:18 1D:10", "1D:24 1W:18 1M:10"
HEAD_SIZE = 16


class WindowSample(NamedTuple):
    """The bars before a decision, (bars, feature), ordered by timeframe, then oldest first; and the label."""

    window: Tensor
    label: int


class WindowDataset(Dataset[WindowSample]):
    """Samples as views into one tensor, which is in RAM already."""

    def __init__(self, part: BarWindows) -> None:
        self._windows, self._labels = torch.from_numpy(part.windows), torch.from_numpy(part.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> WindowSample:
        return WindowSample(self._windows[index], int(self._labels[index]))

    def in_ram(self) -> WindowDataset:
        """Returns itself."""
        return self

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Returns the same batch as `Temporal.collate` for these samples, made by one copy."""
        index = torch.tensor(indices)
        return {"windows": self._windows.index_select(0, index), "labels": self._labels.index_select(0, index)}


class Lstms(nn.Module):
    """An LSTM for each timeframe; returns their last states, concatenated."""

    def __init__(self, lengths: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.lengths, self.out_features = list(lengths), hidden * len(lengths)
        self.blocks = nn.ModuleList(nn.LSTM(len(BAR_FEATURES), hidden, batch_first=True) for _ in lengths)

    def forward(self, windows: Tensor) -> Tensor:
        """Returns (batch, frames * hidden) of windows (batch, bars, feature)."""
        parts = zip(self.blocks, windows.split(self.lengths, dim=1), strict=True)
        return torch.cat([block(part)[0][:, -1] for block, part in parts], dim=1)


class Transformer(nn.Module):
    """A Transformer over the bars of all timeframes, each with its own embedding; returns their means, concatenated."""

    def __init__(self, lengths: Sequence[int], hidden: int, dropout: float) -> None:
        super().__init__()
        if hidden % HEAD_SIZE:
            raise WorkloadError(f"knobs.hidden_size={hidden}: a transformer needs a multiple of {HEAD_SIZE}")
        self.lengths, self.out_features = list(lengths), hidden * len(lengths)
        self.embed = nn.ModuleList(nn.Linear(len(BAR_FEATURES), hidden) for _ in lengths)
        # With the usual 0.02, training took twice as long to learn the daily cycle, which depends on positions.
        self.position = nn.Parameter(0.3 * torch.randn(sum(lengths), hidden))
        self.blocks = nn.ModuleList(BarBlock(hidden, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, windows: Tensor) -> Tensor:
        """Returns (batch, frames * hidden) of windows (batch, bars, feature)."""
        parts = zip(self.embed, windows.split(self.lengths, dim=1), strict=True)
        hidden = torch.cat([embed(part) for embed, part in parts], dim=1) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return torch.cat([part.mean(dim=1) for part in self.norm(hidden).split(self.lengths, dim=1)], dim=1)


class BarBlock(nn.Module):
    """Attention between all bars, then a perceptron for each bar, both residual."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.project, self.merge = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns (batch, bars, hidden) of the same shape."""
        batch, time, width = hidden.shape
        heads = self.project(self.norm_attention(hidden)).view(batch, time, 3, -1, HEAD_SIZE)
        heads = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, time, width)
        hidden = hidden + self.dropout(self.merge(mixed))
        return cast(Tensor, hidden + self.dropout(self.narrow(F.gelu(self.widen(self.norm_perceptron(hidden))))))


class Mlp(nn.Module):
    """Two layers on the concatenated bars."""

    def __init__(self, lengths: Sequence[int], hidden: int, dropout: float) -> None:
        super().__init__()
        self.out_features = hidden
        widths = [sum(lengths) * len(BAR_FEATURES), hidden, hidden]
        layers = (nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
        self.blocks, self.dropout = nn.ModuleList(layers), nn.Dropout(dropout)

    def forward(self, windows: Tensor) -> Tensor:
        """Returns (batch, hidden) of windows (batch, bars, feature)."""
        hidden = windows.flatten(1)
        for block in self.blocks:
            hidden = block(self.dropout(hidden))
        return hidden


class Temporal:
    """A choice between two futures, judged by accuracy; the contract is in workload.py."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"accuracy": "max"}
    knobs: ClassVar[Mapping[str, Knob]] = OURS["temporal"].own
    options: ClassVar[Options] = {
        "data": None,  # .csv file or a folder of them; None is gym-anytrading's EURUSD, or the embedded stocks
        "timeframes": None,  # such as "1h:24 4h:18 1D:10", frame and window; None goes by the data
        "label": "volatility",  # or direction
        "horizon": 12,  # bars of the shortest frame that the label looks ahead
        "val_frac": 0.3,  # of the decisions, the last
    }
    domains: ClassVar[Mapping[str, Domain]] = {
        "label": Domain(str, values=("volatility", "direction")),
        "horizon": Domain(int, low=2),
        "val_frac": Domain(float, low=0.0, high=0.9, low_excluded=True),
    }

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], tuple[tuple[Timeframe, ...], dict[Split, BarWindows]]] = {}

    def frames(self, config: Config) -> tuple[Timeframe, ...]:
        """Returns the timeframes, the shortest first."""
        return self._parts(config)[0]

    def part(self, config: Config, split: Split) -> BarWindows:
        """Returns a split, the same for every seed; read once. Raises DataError."""
        return self._parts(config)[1][split]

    def _parts(self, config: Config) -> tuple[tuple[Timeframe, ...], dict[Split, BarWindows]]:
        """Returns the timeframes and both splits; raises DataError, or WorkloadError for an option."""
        options = options_of(self, config)
        key = tuple(options.values())
        if key in self._read:
            return self._read[key]
        series, length_us = bars.read_closed(Path(options["data"] or _default_data()))
        wanted = options["timeframes"] or (INTRADAY if length_us <= HOUR_US else DAILY)
        try:
            frames = timeframes.parse(wanted)
        except ValueError as error:
            raise WorkloadError(f"workload.timeframes: {error}") from None
        if frames[0].length_us < length_us:
            why = f"its shortest, {frames[0].name}, is shorter than the data's bars of {length_us / HOUR_US:g} h"
            raise WorkloadError(f"workload.timeframes={wanted}: {why}")
        train, val = parts(series, frames, options["label"], options["horizon"], options["val_frac"])
        self._read[key] = frames, {"train": train, "val": val}
        return self._read[key]

    def dataset(self, config: Config, split: Split) -> WindowDataset:
        """Returns the split's windows and labels."""
        return WindowDataset(self.part(config, split))

    @staticmethod
    def collate(samples: Sequence[WindowSample]) -> dict[str, Tensor]:
        """Returns windows, (batch, bars, feature), and labels, (batch,)."""
        return {
            "windows": torch.stack([sample.window for sample in samples]),
            "labels": torch.tensor([sample.label for sample in samples]),
        }

    def model(self, config: Config) -> nn.Module:
        """Returns windows -> logits of the two classes, (batch, 2)."""
        knobs, lengths = config.knobs, [frame.window for frame in self.frames(config)]
        body: Lstms | Transformer | Mlp
        if knobs.architecture == "lstm":
            body = Lstms(lengths, knobs.hidden_size)
        elif knobs.architecture == "transformer":
            body = Transformer(lengths, knobs.hidden_size, knobs.dropout)
        else:
            body = Mlp(lengths, knobs.hidden_size, knobs.dropout)
        return nn.Sequential(body, nn.Dropout(knobs.dropout), nn.Linear(body.out_features, 2))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules that activation checkpointing recomputes: the layers, or the LSTMs."""
        return list(cast(Any, model)[0].blocks)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy."""
        return F.cross_entropy(model(batch["windows"]), batch["labels"])

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Returns the accuracy, 0 to 1; waits for the device once, at the end."""
        hits = [model(b["windows"]).argmax(dim=1) == b["labels"] for b in batches]
        return {"accuracy": torch.cat(hits).double().mean().item()}

    def baselines(self, config: Config) -> dict[str, dict[str, float]]:
        """Returns the accuracies of four rules: larger class, last known label, clock, logistic regression."""
        daily = self.frames(config)[0].length_us >= DAY_US
        accuracies = bar_baselines.rules(self.part(config, "train"), self.part(config, "val"), daily)
        return {name: {"accuracy": accuracy} for name, accuracy in accuracies.items()}


def _default_data() -> Path:
    try:
        package = importlib.metadata.distribution("gym-anytrading")
    except importlib.metadata.PackageNotFoundError:
        return STOCKS_FILE
    hourly = Path(str(package.locate_file("gym_anytrading/datasets/data/FOREX_EURUSD_1H_ASK.csv")))
    return hourly if hourly.is_file() else STOCKS_FILE


WORKLOAD = Temporal()
