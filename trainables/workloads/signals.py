"""Classification of sequences of unequal length: convolutions, then a bidirectional LSTM, then a classifier.

Data: a folder of .npy files or an HDF5 file (data/npy_sequences.py), else spoken digits (data/spoken_digits.py),
written once as such a folder. Channels are normalised by the mean and deviation of the training split.
Model: two convolutions over time, and the states of an LSTM (Hochreiter and Schmidhuber 1997) after the last true step
and, read backwards, after the first. Its output depends neither on padding nor on the other samples of a batch.
Two phases, `phase_rounds` times. "encoder", a share `encoder_frac` of the samples, without labels: two views of a
sample, with noise, masked spans of time and masked channels (Park et al., SpecAugment, arXiv 1904.08779), are to be
nearer to each other than to other samples (InfoNCE: van den Oord et al., 1807.03748; views: Chen et al., SimCLR,
2002.05709). "classifier": cross-entropy on lightly disturbed samples; all weights continue to train.

Usually the other samples are the rest of the batch. A smaller micro-batch is then an easier task: halving it after an
out-of-memory error would change what is learned. Here they are `REFERENCES` training samples, the same for a whole
epoch, which every micro-batch computes again: the loss is a mean over samples, whatever the micro-batch. Eight such
epochs of the digits raise the accuracy of a linear classifier on the encoder's output from 91 to 95-97 %, and from 63
to 73-80 % if it is fitted to 100 labels. Negatives from the same batch did as well in a comparison; remembered codes
and other steps of the same sample did worse than no training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

from trainables import draws
from trainables.data import npy_sequences, spoken_digits
from trainables.data.npy_sequences import Recording
from trainables.knob_columns import Domain, Knob, Options
from trainables.our_knobs import OURS
from trainables.workload import SPLIT_SEED, Config, Split, options_of

TEMPERATURE = 0.2
NOISE, SPANS, SPAN_FRAC, CHANNEL_FRAC = 0.3, 2, 0.25, 0.2
"""A view at augmentation=1: standard deviation of the noise relative to the channel's, number of masked spans, longest
span as a share of the length, share of masked channels. The classifier's samples have `LIGHT` times as much."""
LIGHT = 0.3
REFERENCES, CHOICES = 32, 4
"""The samples that views are compared with, and the samples of similar length from which each is drawn per epoch."""


SignalBatch = dict[str, Any]


class SignalSample(NamedTuple):
    """Normalised values, (time, channel), the class, and the index in the split."""

    x: Tensor
    label: int
    place: int


class Samples(Dataset[SignalSample]):
    """Recordings, each read from its file on access, so that loader workers and the RAM cache can save time."""

    def __init__(self, recordings: Sequence[Recording], classes: Sequence[str], mean: Tensor, scale: Tensor) -> None:
        self.recordings, self.classes, self.mean, self.scale = recordings, classes, mean, scale
        self._number = {label: number for number, label in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> SignalSample:
        recording = self.recordings[index]
        x = (torch.from_numpy(npy_sequences.load(recording)) - self.mean) / self.scale
        return SignalSample(x, self._number[recording.label], index)

    def in_ram(self) -> SamplesInRam:
        """Returns all samples, each read once."""
        return SamplesInRam(self)


class SamplesInRam(Dataset[SignalSample]):
    """All samples end to end in one tensor, and a final step of zeros for padding.

    A batch is made by one copy; padding samples one by one and stacking them took four times as long.
    """

    def __init__(self, samples: Samples) -> None:
        self._steps = torch.tensor([recording.steps for recording in samples.recordings])
        ends = self._steps.cumsum(0)
        self._starts, self._zeros = ends - self._steps, int(ends[-1])
        self._values = torch.zeros(self._zeros + 1, len(samples.mean))
        self._labels = torch.zeros(len(samples), dtype=torch.long)
        for index in range(len(samples)):
            x, self._labels[index], _ = samples[index]
            self._values[self._starts[index] : ends[index]] = x

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> SignalSample:
        start = int(self._starts[index])
        return SignalSample(self._values[start : start + int(self._steps[index])], int(self._labels[index]), index)

    def batch(self, indices: Sequence[int]) -> SignalBatch:
        """Returns the same batch as `Signals.collate` for these samples."""
        index = torch.tensor(indices)
        steps = self._steps[index]
        places = torch.arange(int(steps.max()))
        mask = places < steps[:, None]
        rows = torch.where(mask, self._starts[index][:, None] + places, self._zeros)
        x = self._values.index_select(0, rows.flatten()).view(*rows.shape, -1)
        return {"x": x, "mask": mask, "lengths": HostLengths(steps), "index": index, "labels": self._labels[index]}


@dataclass(frozen=True)
class HostLengths:
    """True lengths, int64, (batch,). Being no tensor, it stays on the host, where packing reads it without a wait."""

    steps: Tensor


@dataclass(frozen=True)
class References:
    """The samples that views are compared with: values (references, choices, time, channel), indices, lengths."""

    x: Tensor
    index: Tensor
    steps: Tensor


class Convolution(nn.Module):
    """Convolution over three steps and ReLU; padding is set to zero again."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, width, kernel_size=3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns shape (batch, time, width) of (batch, time, channel)."""
        return F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2) * mask.unsqueeze(2)


class BiLSTM(nn.Module):
    """The last states of a forward and a backward LSTM; packed and padded computation give the same numbers.

    Packed, padding is not computed. Padded, every step is one product of the whole batch, and the last true state is
    selected. Sequences are reversed within their true lengths, since padding would change the state.
    """

    def __init__(self, width: int, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.ahead, self.back = (nn.LSTM(width, width, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, lengths: HostLengths) -> Tensor:
        """Returns shape (batch, 2 * width) of (batch, time, width)."""
        steps, rows = mask.sum(dim=1), torch.arange(len(x), device=x.device)
        places = torch.arange(x.shape[1], device=x.device)
        reversed_x = x[rows[:, None], (steps[:, None] - 1 - places).clamp(min=0)]
        if not self.packed:
            return torch.cat([self.ahead(x)[0][rows, steps - 1], self.back(reversed_x)[0][rows, steps - 1]], dim=1)
        order = steps.argsort(descending=True, stable=True)  # torch's own sort in packing would wait for the device
        sizes = lengths.steps.sort(descending=True).values
        ends = [
            lstm(pack_padded_sequence(inputs[order], sizes, batch_first=True))[1][0][0]
            for lstm, inputs in ((self.ahead, x), (self.back, reversed_x))
        ]
        return torch.cat(ends, dim=1)[order.argsort()]


class SequenceNet(nn.Module):
    """An encoder of sequences, and a classifier on its output."""

    def __init__(self, channels: int, classes: int, width: int, packed: bool, dropout: float) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([Convolution(channels, width), Convolution(width, width)])
        self.lstm = BiLSTM(width, packed)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, x: Tensor, mask: Tensor, lengths: HostLengths, embed: bool = False) -> Tensor:
        """Returns logits, (batch, class), or with `embed` the encoder's output, (batch, 2 * width)."""
        for convolution in self.convolutions:
            x = convolution(x, mask)
        code = self.lstm(x, mask, lengths)
        return cast(Tensor, code if embed else self.head(code))


def disturbed(x: Tensor, mask: Tensor, keys: Tensor, strength: float, in_place: bool) -> Tensor:
    """Returns x, (batch, time, channel), with added noise; some spans of time and channels are set to 0, their mean."""
    if strength == 0.0:
        return x
    steps, places = mask.sum(dim=1, keepdim=True), torch.arange(x.shape[1], device=x.device)
    noise = draws.normal(keys, x.shape[1:], stream=0).mul_(NOISE * strength)
    width, start = draws.uniform(keys, (2, SPANS), stream=1).unbind(dim=1)
    width = (width * SPAN_FRAC * strength * steps).round()
    start = (start * (steps - width)).floor()
    hidden = ((places >= start[..., None]) & (places < (start + width)[..., None])).any(dim=1)
    kept = draws.uniform(keys, x.shape[2:], stream=2) >= CHANNEL_FRAC * strength
    keep = (mask & ~hidden).to(x.dtype)[:, :, None] * kept.to(x.dtype)[:, None]  # as numbers: a third of the time
    return x.add_(noise).mul_(keep) if in_place else (x + noise) * keep


def contrast(code: Tensor, index: Tensor, others: Tensor) -> Tensor:
    """Returns the mean InfoNCE of codes (2 * batch + references, width): first views, second views, references.

    `index`, (batch,), and `others`, (references,), are indices of samples: a sample is not compared with itself.
    """
    unit = F.normalize(code.float(), dim=1)
    first, second, references = unit.split([len(index), len(index), len(others)])
    near = (first * second).sum(dim=1, keepdim=True) / TEMPERATURE
    same = (index[:, None] == others).repeat(2, 1)
    far = (torch.cat([first, second]) @ references.T / TEMPERATURE).masked_fill(same, -torch.inf)
    near = near.repeat(2, 1)
    loss: Tensor = (torch.cat([near, far], dim=1).logsumexp(dim=1) - near[:, 0]).mean()
    return loss


class Signals:
    """Classification of sequences, judged by accuracy. The contract is in workload.py."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"accuracy": "max"}
    knobs: ClassVar[Mapping[str, Knob]] = OURS["signals"].own
    options: ClassVar[Options] = {
        "data": None,  # folder of .npy files, or an .h5 file; None is spoken digits
        "val_frac": None,  # share of the training files to validate on; None is the folder's own val or test split
        "max_train_samples": None,
        "max_val_samples": None,
    }
    domains: ClassVar[Mapping[str, Domain]] = {
        "val_frac": Domain(float, low=0.0, high=0.9, low_excluded=True),
        "max_train_samples": Domain(int, low=2),
        "max_val_samples": Domain(int, low=2),
    }

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], dict[Split, Samples]] = {}
        self._references: dict[tuple[Any, ...], References] = {}

    def dataset(self, config: Config, split: Split) -> Samples:
        """Returns the split, the same for every seed; files are listed once. Raises DataError."""
        options = options_of(self, config)
        key = tuple(options.values())
        if key not in self._read:
            root = Path(options["data"]) if options["data"] else spoken_digits.folder()
            parts = npy_sequences.read_splits(root, options["val_frac"], SPLIT_SEED)
            classes = sorted({recording.label for recording in parts[0]})
            limits = options["max_train_samples"], options["max_val_samples"]
            train, val = (npy_sequences.some(p, n, SPLIT_SEED) for p, n in zip(parts, limits, strict=True))
            mean, scale = (torch.from_numpy(each) for each in npy_sequences.statistics(train))
            self._read[key] = {"train": Samples(train, classes, mean, scale), "val": Samples(val, classes, mean, scale)}
        return self._read[key][split]

    @staticmethod
    def collate(samples: Sequence[SignalSample]) -> SignalBatch:
        """Returns x, (batch, longest, channel), zeros after its end, its mask, lengths, indices and labels."""
        steps = torch.tensor([len(sample.x) for sample in samples])
        return {
            "x": pad_sequence([sample.x for sample in samples], batch_first=True),
            "mask": torch.arange(int(steps.max())) < steps[:, None],
            "lengths": HostLengths(steps),
            "index": torch.tensor([sample.place for sample in samples]),
            "labels": torch.tensor([sample.label for sample in samples]),
        }

    @staticmethod
    def length(sample: SignalSample) -> int:
        """Returns the steps in time."""
        return len(sample.x)

    def phases(self, config: Config) -> dict[str, float]:
        """Returns the share of a round's samples that train the encoder alone, and the remaining share."""
        return {"encoder": config.knobs.encoder_frac, "classifier": 1.0 - config.knobs.encoder_frac}

    @staticmethod
    def phase_rounds(config: Config) -> int:
        """Returns how often both phases come, in turns."""
        return int(config.knobs.phase_rounds) if config.knobs.encoder_frac else 1

    def augment(self, batch: SignalBatch, keys: Tensor, config: Config, phase: str) -> SignalBatch:
        """Returns the disturbed batch; in the encoder's phase two views of each sample, and references, without labels.

        References depend on the epoch alone, so that all micro-batches of an epoch have the same.
        """
        knobs = config.knobs
        if phase != "encoder":
            strength = LIGHT * knobs.augmentation
            x = disturbed(batch["x"], batch["mask"], keys, strength, knobs.inplace_augmentation)
            return {**batch, "x": x}
        pool, first = self._pool(config, keys.device), (keys[:1], batch["index"][:1])
        rows = torch.arange(len(pool.steps), device=keys.device)
        epoch = draws.beside(*first, torch.full((1,), -1, device=keys.device))
        chosen = (draws.uniform(epoch, (len(rows),), stream=0)[0] * pool.x.shape[1]).long()
        others = pool.index[rows, chosen]
        steps = torch.cat([batch["lengths"].steps] * 2 + [pool.steps])
        longest = int(steps.max())
        parts = [batch["x"], batch["x"], pool.x[rows, chosen]]
        x = torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])
        within = torch.arange(pool.x.shape[2]) < pool.steps[:, None]
        masks = [batch["mask"], batch["mask"], within.to(keys.device, non_blocking=True)]
        mask = torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in masks])
        keys = torch.cat([keys, ~keys, draws.beside(*first, others)])  # another key makes another view
        x = disturbed(x, mask, keys, knobs.augmentation, knobs.inplace_augmentation)
        return {"x": x, "mask": mask, "lengths": HostLengths(steps), "index": batch["index"], "others": others}

    def _pool(self, config: Config, device: torch.device) -> References:
        """Returns the pool of references: training samples of all lengths, in groups of `CHOICES` of similar length.

        Samples are cut to the shortest of their group, so that the host knows the length of the device's choice.
        """
        key = (*options_of(self, config).values(), str(device))
        if key not in self._references:
            train = self.dataset(config, "train")
            by_length = sorted(range(len(train)), key=lambda index: train.recordings[index].steps)
            choices = min(CHOICES, len(train))
            count = min(REFERENCES, len(train) // choices)
            places = np.linspace(0, len(train) - 1, count * choices).round().astype(int)
            index = torch.tensor([by_length[place] for place in places])
            xs = [train[int(i)].x for i in index]
            steps = torch.tensor([len(x) for x in xs]).view(count, choices).amin(dim=1)
            cut = [x[: int(steps[number // choices])] for number, x in enumerate(xs)]
            x = pad_sequence(cut, batch_first=True).unflatten(0, (count, choices))
            self._references[key] = References(x.to(device), index.view(count, choices).to(device), steps)
        return self._references[key]

    def model(self, config: Config) -> SequenceNet:
        """Returns a new model for the channels and classes of the training split."""
        train, knobs = self.dataset(config, "train"), config.knobs
        return SequenceNet(
            len(train.mean), len(train.classes), knobs.hidden_size, knobs.sequence_packing, knobs.dropout
        )

    @staticmethod
    def blocks(model: SequenceNet) -> list[nn.Module]:
        """Returns the modules that activation checkpointing wraps."""
        return [*model.convolutions, model.lstm]

    def loss(self, model: nn.Module, batch: SignalBatch) -> Tensor:
        """Returns the mean cross-entropy, or for a batch of views, which has no labels, the mean InfoNCE."""
        inputs = batch["x"], batch["mask"], batch["lengths"]
        if "labels" in batch:
            return F.cross_entropy(model(*inputs), batch["labels"])
        return contrast(model(*inputs, embed=True), batch["index"], batch["others"])

    def evaluate(self, model: nn.Module, batches: Iterable[SignalBatch]) -> dict[str, float]:
        """Returns the accuracy, 0 to 1; waits for the device once, at the end."""
        hits = [model(b["x"], b["mask"], b["lengths"]).argmax(dim=1) == b["labels"] for b in batches]
        return {"accuracy": torch.cat(hits).double().mean().item()}

    def baselines(self, config: Config) -> dict[str, dict[str, float]]:
        """Returns the accuracies of two rules: always the largest class; the class with the nearest mean over time."""
        parts = self.dataset(config, "train"), self.dataset(config, "val")
        train, val = ([(d[i].x.mean(dim=0), d[i].label) for i in range(len(d))] for d in parts)
        (largest, _), *_ = Counter(label for _, label in train).most_common(1)
        seen = sorted({label for _, label in train})
        means = torch.stack([torch.stack([x for x, label in train if label == c]).mean(dim=0) for c in seen])
        nearest = torch.cdist(torch.stack([x for x, _ in val]), means).argmin(dim=1).tolist()
        right = {
            "majority class": sum(label == largest for _, label in val),
            "nearest class mean": sum(seen[n] == label for n, (_, label) in zip(nearest, val, strict=True)),
        }
        return {name: {"accuracy": count / len(val)} for name, count in right.items()}


WORKLOAD = Signals()
