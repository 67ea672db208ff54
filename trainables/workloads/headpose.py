"""How is the head turned? A convolutional network that gives yaw, pitch and roll in degrees.

Data: `workload.data=<folder>` of 300W-LP or BIWI, read by trainables/data/face_sets.py; without it, heads drawn from a
CC0 mesh, written once into the layout of 300W-LP (trainables/data/rendered_heads.py).
Model and loss are HopeNet's (Ruiz et al., arXiv 1710.00925): each angle is a distribution over bins of 3 degrees, whose
expectation is the answer; cross-entropy and squared error are trained together. The network is small, like the default
data; HopeNet's is `network=resnet50`. Published on AFLW2000-3D after training on 300W-LP: HopeNet 6.2, 6DRepNet 4.0
degrees of mean absolute error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainables import draws
from trainables.knob_columns import Domain, Knob, Options
from trainables.our_knobs import OURS
from trainables.resnet import NORMS, RESIDUAL_BLOCKS, ResNet, load_weights
from trainables.workload import SPLIT_SEED, Config, Split, WorkloadError, options_of

try:
    from trainables.data import face_sets, npy_sequences, rendered_heads
    from trainables.data.faces import Face, pixels
except ImportError as error:
    raise WorkloadError(f"workload headpose needs: pip install 'cardtune[headpose]' ({error})") from None

BIN_DEG, BINS = 3.0, 66
"""From -99 to 99 degrees."""
SQUARED_ERROR = 0.02
"""Weight of the expectation's squared error, in square degrees, relative to the bins' cross-entropy."""
RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))
"""Gain that gives a ReLU of standard normal numbers variance 1."""
JITTER = (0.4, 0.4, 0.4, 0.05)
"""Largest change, at augmentation=1, of brightness, contrast and saturation from 1, and of hue in full turns."""

IMAGES_AT_ONCE = 8
"""Images recoloured together on a CPU: at 64 x 64 pixels, 0.4 MB in float32."""


class FaceSample(NamedTuple):
    """A face, uint8, (3, size, size), and its yaw, pitch and roll in degrees, float32, (3,)."""

    image: Tensor
    angles_deg: Tensor


class Faces(Dataset[FaceSample]):
    """Faces, each read, cropped and scaled on access."""

    def __init__(self, faces: Sequence[Face], size: int) -> None:
        self._faces, self._size = faces, size

    def __len__(self) -> int:
        return len(self._faces)

    def __getitem__(self, index: int) -> FaceSample:
        face = self._faces[index]
        image = torch.from_numpy(pixels(face, self._size)).permute(2, 0, 1).contiguous()
        return FaceSample(image, torch.tensor(face.angles_deg))

    def in_ram(self) -> FacesInRam:
        """Returns all faces, read once."""
        return FacesInRam(self)


class FacesInRam(Dataset[FaceSample]):
    """All faces in one tensor, all angles in another, so that a batch is made by one copy."""

    def __init__(self, faces: Faces) -> None:
        first, count = faces[0], len(faces)
        self._images, self._angles_deg = (torch.empty(count, *t.shape, dtype=t.dtype) for t in first)
        for index in range(count):
            self._images[index], self._angles_deg[index] = faces[index]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> FaceSample:
        return FaceSample(self._images[index], self._angles_deg[index])

    def batch(self, indices: Sequence[int]) -> FaceSample:
        """Returns the same batch as `HeadPose.collate` for these faces."""
        index = torch.tensor(indices)
        return FaceSample(self._images.index_select(0, index), self._angles_deg.index_select(0, index))


class HalvingBlock(nn.Module):
    """Halves height and width by a convolution whose weights are standardised for each output channel.

    Scaled weight standardisation with a gain for each channel (Brock et al., arXiv 2101.08692) replaces a norm of the
    activations. With batch norm, learning would depend on the micro-batch, and a checkpointed block would count its
    statistics twice. Error after 6 epochs, seed 0: 4.4 degrees; with group norm 6.1, layer norm 6.1, none 6.2, batch
    norm in one piece 5.1.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1)
        self.gain = nn.Parameter(torch.full((channels, 1, 1, 1), RELU_GAIN))

    def forward(self, features: Tensor) -> Tensor:
        """Returns features (batch, channels, height / 2, width / 2)."""
        weight, bias = self.convolution.weight, self.convolution.bias
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        scale = self.gain * torch.rsqrt(variance * weight[0].numel() + 1e-4)
        return F.relu(F.conv2d(features, (weight - mean) * scale, bias, stride=2, padding=1))


class PoseNet(nn.Module):
    """Blocks of up to `width` channels down to a grid of 3 x 3 or 4 x 4, and a linear map to three angles' bins."""

    def __init__(self, width: int, size: int, dropout: float) -> None:
        super().__init__()
        depth = math.ceil(math.log2(size / 4))
        shares = (1, 3 / 4, 3 / 8, 3 / 16)  # of the width, from the last block back; larger images repeat the last one
        channels = [max(8, 8 * round(width * shares[min(i, 3)] / 8)) for i in reversed(range(depth))]
        self.blocks = nn.ModuleList(HalvingBlock(a, b) for a, b in pairwise([3, *channels]))
        cells = math.ceil(size / 2**depth) ** 2
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(cells * channels[-1], 3 * BINS))

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (batch, 3, bins) of images, uint8, (batch, 3, size, size)."""
        features = images.float() / 127.5 - 1.0  # on the device: a quarter of the bytes to transfer
        for block in self.blocks:
            features = block(features)
        return cast(Tensor, self.head(features).float().view(-1, 3, BINS))


class HeadPose:
    """Yaw, pitch and roll, judged by the mean absolute error in degrees; the contract is in workload.py."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"mae": "min"}
    knobs: ClassVar[Mapping[str, Knob]] = OURS["headpose"].own
    options: ClassVar[Options] = {
        "data": None,  # folder of 300W-LP or BIWI; None is drawn heads
        "val_data": None,  # folder of another set to validate on; None holds out a part of `data`
        "val_frac": 0.13,  # of the photographs, or of the persons
        "image_size": 64,  # pixels
        "heads": 2300,  # drawn if there is no `data`
        "network": "small",  # or resnet18, resnet50; knob hidden_size: 128 is their usual width
        "norm": "group",  # of a ResNet; frozen is batch norm by the statistics of `weights`
        "weights": None,  # .pth or .safetensors with torchvision's names, for a ResNet to begin from
        "max_train_samples": None,
        "max_val_samples": None,
    }
    domains: ClassVar[Mapping[str, Domain]] = {
        "image_size": Domain(int, low=16),
        "heads": Domain(int, low=2),
        "network": Domain(str, values=("small", *RESIDUAL_BLOCKS)),
        "norm": Domain(str, values=tuple(NORMS)),
        "max_train_samples": Domain(int, low=1),
        "max_val_samples": Domain(int, low=1),
        "val_frac": Domain(float, low=0.0, high=0.9, low_excluded=True),
    }

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], dict[Split, list[Face]]] = {}

    def faces(self, config: Config) -> dict[Split, list[Face]]:
        """Returns both splits, the same for every seed; read once, and drawn first if necessary. Raises DataError."""
        options = options_of(self, config)
        key = tuple(value for name, value in options.items() if name != "image_size")
        if key not in self._read:
            train = face_sets.read(Path(options["data"] or rendered_heads.folder(options["heads"])))
            if options["val_data"] is None:
                train, val = face_sets.split(train, options["val_frac"], SPLIT_SEED)
            else:
                val = face_sets.read(Path(options["val_data"]))
            self._read[key] = {
                "train": npy_sequences.some(train, options["max_train_samples"], SPLIT_SEED),
                "val": npy_sequences.some(val, options["max_val_samples"], SPLIT_SEED),
            }
        return self._read[key]

    def dataset(self, config: Config, split: Split) -> Faces:
        """Returns the split; each face is read on access."""
        return Faces(self.faces(config)[split], options_of(self, config)["image_size"])

    @staticmethod
    def collate(samples: Sequence[FaceSample]) -> FaceSample:
        """Returns images, uint8, (batch, 3, size, size), and angles, (batch, 3); new tensors."""
        return FaceSample(torch.stack([s.image for s in samples]), torch.stack([s.angles_deg for s in samples]))

    @staticmethod
    def augment(batch: FaceSample, keys: Tensor, config: Config, phase: str) -> FaceSample:
        """Returns the batch with every second face mirrored and all colours changed; strength 0 changes nothing.

        Mirroring a head changes the sign of yaw and roll, not of pitch.
        """
        strength, (images, angles) = config.knobs.augmentation, batch
        if strength == 0.0:
            return batch
        mirrored = draws.uniform(keys, (1,), stream=0) < 0.5
        flipped = images.flip(-1)
        # The bits that differ, masked by image: torch.where on two images took nine times as long on a CPU.
        flipped.bitwise_xor_(images).bitwise_and_(mirrored[:, :, None, None].to(torch.uint8).neg_())
        signs = torch.where(mirrored, -1.0, 1.0)
        if not config.knobs.inplace_augmentation:
            images, angles = flipped.bitwise_xor_(images), angles.clone()
        else:
            images.bitwise_xor_(flipped)
        angles[:, ::2].mul_(signs)
        amounts = strength * (2.0 * draws.uniform(keys, (4,), stream=1) - 1.0)
        return FaceSample(
            _recolour(images, [a * most for a, most in zip(amounts.unbind(1), JITTER, strict=True)]), angles
        )

    def model(self, config: Config) -> PoseNet | ResNet:
        """Returns a network as wide as the knob hidden_size says; raises WorkloadError for weights that do not fit."""
        options, width, dropout = options_of(self, config), config.knobs.hidden_size, config.knobs.dropout
        network, norm, weights = (options[name] for name in ("network", "norm", "weights"))
        if (norm == "frozen" and weights is None) or (network == "small" and weights is not None):
            what = f"workload.network={network} workload.norm={norm} workload.weights={weights}: frozen needs weights"
            raise WorkloadError(f"{what}, and these a ResNet; try: workload.network=resnet50 workload.weights=FILE")
        if network == "small":
            return PoseNet(width, options["image_size"], dropout)
        model = ResNet(network, (3, BINS), max(8, 8 * round(width / 16)), norm, dropout)
        if weights is not None:
            load_weights(model, weights)
        return model

    def loss(self, model: nn.Module, batch: FaceSample) -> Tensor:
        """Returns the mean over batch and angles of the bins' cross-entropy and of the expectation's squared error."""
        logits = model(batch.image)
        bins = (batch.angles_deg / BIN_DEG + BINS / 2).long().clamp_(0, BINS - 1)
        right = F.cross_entropy(logits.flatten(0, 1), bins.flatten())
        return right + SQUARED_ERROR * F.mse_loss(expected_deg(logits), batch.angles_deg)

    def evaluate(self, model: nn.Module, batches: Iterable[FaceSample]) -> dict[str, float]:
        """Returns mean absolute errors in degrees, of all angles and of each; waits for the device at the end alone."""
        pairs = [(expected_deg(model(images)), angles) for images, angles in batches]
        guess, right = (torch.cat(part).double() for part in zip(*pairs, strict=True))
        yaw, pitch, roll = (guess - right).abs().mean(dim=0).tolist()
        return {"mae": (yaw + pitch + roll) / 3, "mae_yaw": yaw, "mae_pitch": pitch, "mae_roll": roll}

    def baselines(self, config: Config) -> dict[str, dict[str, float]]:
        """Returns the error of always answering the mean pose of the training faces."""
        faces = self.faces(config)
        train, val = (torch.tensor([f.angles_deg for f in faces[s]], dtype=torch.float64) for s in ("train", "val"))
        return {"mean pose": {"mae": (val - train.mean(dim=0)).abs().mean().item()}}


def expected_deg(logits: Tensor) -> Tensor:
    """Returns the expected angles in degrees (batch, 3) of logits (batch, 3, bins)."""
    middles = (torch.arange(BINS, device=logits.device) + 0.5 - BINS / 2) * BIN_DEG
    return (logits.softmax(dim=-1) * middles).sum(dim=-1)


def _recolour(images: Tensor, change: Sequence[Tensor]) -> Tensor:
    """Changes the colours of images, uint8, (batch, 3, height, width), in place, and returns them.

    `change` has four tensors (batch,): of brightness, contrast, saturation, and hue in turns. All four are linear in a
    colour, so one matrix an image applies them at once. Hue rotates and saturation scales the colour plane (IQ of YIQ);
    contrast scales the distance from the image's mean brightness.
    """
    brightness, contrast, saturation = (1.0 + each[:, None, None] for each in change[:3])
    turn = 2.0 * math.pi * change[3][:, None, None]
    grey, colour, quarter = _parts_of_colour(images.device)
    mix = brightness * contrast * (grey + saturation * (turn.cos() * colour + turn.sin() * quarter))
    shift = brightness[:, 0] * (1.0 - contrast[:, 0])
    # On a CPU a few images at a time: intermediate tensors then stay in its cache and reuse memory.
    some = IMAGES_AT_ONCE if images.device.type == "cpu" else max(1, len(images))
    for part in zip(images.split(some), mix.split(some), shift.split(some), strict=True):
        _mix_colours(*part, grey[0])
    return images


def _mix_colours(images: Tensor, mix: Tensor, shift: Tensor, grey: Tensor) -> None:
    """Replaces the colours by `mix`, (batch, 3, 3), times themselves, plus `shift`, (batch, 1), times the mean grey."""
    pixels = images.float()
    count = math.prod(images.shape[2:])
    # Sums of whole numbers are exact in float32 up to 256 x 256 pixels of 255, hence the same on any device.
    means = (pixels if count <= 65_536 else pixels.double()).sum(dim=(2, 3)).float() / count
    offset = shift * (means * grey).sum(dim=1, keepdim=True)
    new = torch.empty_like(pixels).copy_(offset[:, :, None, None])
    # Three products for each pixel and channel take a third of the time of a batched matrix product on a CPU.
    for colour, share in zip(pixels.split(1, dim=1), mix[..., None, None].unbind(dim=2), strict=True):
        new.addcmul_(colour, share)
    images.copy_(new.clamp_(0.0, 255.0).round_().to(torch.int16))  # CPUs have vector instructions from int16 to bytes


@functools.cache
def _parts_of_colour(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns matrices (3, 3) from a colour to its grey part, to the rest, and to the rest after a quarter turn of hue.

    They are cached on the device: a copy in every step would make the host wait.
    """
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    grey = yiq[:1].expand(3, 3)
    quarter = torch.linalg.inv(yiq) @ torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]]) @ yiq
    return grey.to(device), (torch.eye(3) - grey).to(device), quarter.to(device)


WORKLOAD = HeadPose()
