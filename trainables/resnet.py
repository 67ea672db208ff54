"""ResNet-18 and ResNet-50 (He et al., arXiv 1512.03385), whose weights have the names of torchvision's files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from trainables.workload import WorkloadError

RESIDUAL_BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}  # in each of four stages
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # means and deviations of colours that weights expect


class GroupNorm(nn.GroupNorm):
    """Group norm (Wu and He, arXiv 1803.08494): without statistics over the batch a micro-batch changes nothing."""

    def forward(self, features: Tensor) -> Tensor:
        """Returns features, normed in their own type: by autocast, in fp32, resnet50 takes 13.3 GiB and not 5.8."""
        weight, bias = self.weight.to(features.dtype), self.bias.to(features.dtype)
        with torch.autocast(features.device.type, enabled=False):
            return F.group_norm(features, self.num_groups, weight, bias, self.eps)


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm by the statistics of a weights file, in training too: they are what its filters expect."""

    def forward(self, features: Tensor) -> Tensor:
        """Returns features, normed."""
        return F.batch_norm(features, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


NORMS: Mapping[str, Callable[[int], GroupNorm | FrozenNorm]] = {
    "group": lambda channels: GroupNorm(math.gcd(32, channels), channels),
    "frozen": FrozenNorm,
}


class ResidualBlock(nn.Module):
    """Two convolutions, or three in a `deep` network, each with a norm; their result is added to what they read."""

    def __init__(self, channels_in: int, planes: int, stride: int, deep: bool, norm: str) -> None:
        super().__init__()
        middle = (planes, 3, stride)
        sizes = [(planes, 1, 1), middle, (4 * planes, 1, 1)] if deep else [middle, (planes, 3, 1)]
        self.last, width = len(sizes), channels_in
        for number, (channels, kernel, step) in enumerate(sizes, 1):
            self.add_module(f"conv{number}", nn.Conv2d(width, channels, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{number}", NORMS[norm](channels))
            width = channels
        nn.init.zeros_(getattr(self, f"bn{self.last}").weight)  # begins as the identity (arXiv 1706.02677)
        self.downsample = nn.Sequential()
        if stride > 1 or channels_in != width:
            self.downsample.extend([nn.Conv2d(channels_in, width, 1, stride, bias=False), NORMS[norm](width)])

    def forward(self, features: Tensor) -> Tensor:
        """Returns features (batch, channels, height / stride, width / stride)."""
        result = features
        for number in range(1, self.last + 1):
            result = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(result))
            result = F.relu_(result) if number < self.last else result
        return F.relu_(result.add_(self.downsample(features)))


class ResNet(nn.Module):
    """A network with `planes` channels at first, 64 in the paper; its output has the shape (batch, *outputs)."""

    imagenet: Tensor

    def __init__(self, network: str, outputs: tuple[int, ...], planes: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.register_buffer("imagenet", 255.0 * torch.tensor(IMAGENET)[..., None, None], persistent=False)
        self.conv1, self.bn1, channels = nn.Conv2d(3, planes, 7, 2, 3, bias=False), NORMS[norm](planes), planes
        stages = [nn.ModuleList() for _ in RESIDUAL_BLOCKS[network]]
        for stage, count in enumerate(RESIDUAL_BLOCKS[network]):
            for stride in (2 if stage else 1, *[1] * (count - 1)):
                stages[stage].append(ResidualBlock(channels, planes * 2**stage, stride, network == "resnet50", norm))
                channels = planes * 2**stage * (4 if network == "resnet50" else 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.dropout, self.fc, self.outputs = nn.Dropout(dropout), nn.Linear(channels, math.prod(outputs)), outputs
        for convolution in (module for module in self.modules() if isinstance(module, nn.Conv2d)):
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Returns the output, fp32, of images, uint8, (batch, 3, height, width)."""
        mean, deviation = self.imagenet
        features = F.max_pool2d(F.relu_(self.bn1(self.conv1((images.float() - mean) / deviation))), 3, 2, padding=1)
        for block in (*self.layer1, *self.layer2, *self.layer3, *self.layer4):
            features = block(features)
        found: Tensor = self.fc(self.dropout(features.mean(dim=(2, 3))))
        return found.float().view(-1, *self.outputs)


def load_weights(model: ResNet, path: str) -> None:
    """Loads a file's tensors, but for its classifier `fc`; raises WorkloadError if they are not those of the model."""
    kept = {n: weight for n, weight in model.state_dict().items() if n.startswith("fc") or "num_batches" in n}
    try:
        safe = path.endswith(".safetensors")
        found = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(kept | {name: weight for name, weight in found.items() if not name.startswith("fc")})
    except Exception as error:  # whatever the reader of a wrong file makes of it
        said = " ".join(str(error).split()).rpartition("for ResNet: ")[2][:80]
        allowed = ".pth or .safetensors as torchvision has them, with norm=frozen and hidden_size=128"
        raise WorkloadError(f"workload.weights={path} does not fit: {said}; allowed: {allowed}") from None
