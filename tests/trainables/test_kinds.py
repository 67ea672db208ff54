"""Which system knobs change what is learned, on nets of which the answer is known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset, TensorDataset

from trainables import Knob, kinds, loader_check, own_loop
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, Split, table_of
from trainables.workload_files import load

CHANGES = {"micro_batch_size": 4, "activation_checkpointing": True, "channels_last": True, "length_bucketing": True}


class Images:
    """Classes of small noisy images; `made` is the net, `judged` the loss of outputs and classes."""

    objectives: ClassVar[Mapping[str, Any]] = {"accuracy": "max"}
    default_space: ClassVar[Mapping[str, Any]] = {"learning_rate": [0.1, 0.01]}

    def __init__(self, made: Any, judged: Any = functional.cross_entropy) -> None:
        self.made, self.judged = made, judged

    def model(self, config: Config) -> nn.Module:
        return self.made()

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        random = torch.Generator().manual_seed(int(split == "val"))
        return TensorDataset(torch.randn(32, 3, 8, 8, generator=random), torch.arange(32) % 5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.judged(model(batch[0]), batch[1])

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[0]] if isinstance(model, nn.Sequential) else []

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        return {"accuracy": 0.0}


def conv(norm: nn.Module | None = None, *more: nn.Module) -> nn.Module:
    """Returns a small convolutional net, with a norm inside its first block."""
    inner = [nn.Conv2d(3, 8, 3, padding=1), *([norm] if norm is not None else []), nn.ReLU(), *more]
    return nn.Sequential(nn.Sequential(*inner), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


class Dora(nn.Module):
    """A frozen layer with a low-rank part, and the magnitude of its columns trained apart (arXiv 2402.09353)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(192, 5)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 192) / 20), nn.Parameter(torch.randn(5, 4) / 20)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1, keepdim=True).detach())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.up @ self.down
        return functional.linear(x.flatten(1), self.magnitude * weight / weight.norm(dim=1, keepdim=True))


class Standardised(nn.Module):
    """A batch norm that nobody has named so."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class Attending(nn.Module):
    """Attention with dropout everywhere torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.memory = nn.GRU(24, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.memory(x.transpose(1, 2).flatten(2))
        x = x + functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        x, _ = self.attention(x, x, x)
        return torch.as_tensor(self.head(functional.dropout(x, 0.5).flatten(1)))


class Rated(nn.Module):
    """A dropout whose rate is no attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


class Flattened(nn.Module):
    """A batch norm over all places of all samples, as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        rows = self.norm(x.permute(0, 2, 3, 1).reshape(-1, channels))
        return rows.reshape(count, height, width, channels).permute(0, 3, 1, 2)


class Kinked(nn.Module):
    """A rectifier whose inputs are rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        exact = functional.conv2d(x.double(), self.conv.weight.double(), self.conv.bias.double(), padding=1)
        out: Tensor = self.conv(x)
        return out * (out > exact)


class Noisy(nn.Module):
    """Noise of its own on what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn_like(x)


def contrastive(out: Tensor, classes: Tensor) -> Tensor:
    """Returns the loss of telling each sample's own shifted view from those of the others of its batch."""
    views = functional.normalize(out, dim=1)
    return functional.cross_entropy(views @ functional.normalize(out + 0.1, dim=1).T / 0.2, torch.arange(len(out)))


def summed(out: Tensor, classes: Tensor) -> Tensor:
    """Returns a sum where the contract asks for a mean."""
    return functional.cross_entropy(out, classes, reduction="sum")


def weighted(out: Tensor, classes: Tensor) -> Tensor:
    """Returns a mean by the weights of the classes, on samples that are all of one class."""
    return functional.cross_entropy(out, torch.zeros_like(classes), torch.arange(5.0) + 1)


NETS: dict[str, tuple[Images, dict[str, str]]] = {
    "batch norm": (
        Images(lambda: conv(nn.BatchNorm2d(8))),
        {"micro_batch_size": "BatchNorm2d (0.1) gives", "activation_checkpointing": "BatchNorm2d (0.1) updates"},
    ),
    "group norm": (Images(lambda: conv(nn.GroupNorm(2, 8))), {}),
    "dropout": (Images(lambda: conv(None, nn.Dropout2d(0.5), nn.AlphaDropout(0.3))), {}),
    "dropout amid a block": (Images(lambda: conv(nn.Dropout(0.5), nn.Conv2d(8, 8, 1), nn.Sigmoid())), {}),
    "a rate in a function": (Images(lambda: conv(Rated(), nn.Conv2d(8, 8, 1), nn.Sigmoid())), {}),
    "dropout in attention and recurrence": (Images(Attending), {}),
    "contrastive": (Images(conv, contrastive), {"micro_batch_size": "a batch cut in two has another gradient"}),
    "sum": (Images(conv, summed), {"micro_batch_size": "0.5 times as large"}),
    "weighted classes": (Images(conv, weighted), {"micro_batch_size": "cross_entropy(weight=...)"}),
    "weight norm": (Images(lambda: conv(None, weight_norm(nn.Conv2d(8, 8, 1)))), {}),
    "DoRA": (Images(Dora), {}),
    "a batch norm by hand": (Images(lambda: conv(Standardised())), {"micro_batch_size": "Standardised (0.1) gives"}),
    "a batch norm of rows": (
        Images(lambda: conv(Flattened())),
        {"micro_batch_size": "(0.1.norm) gives", "activation_checkpointing": "(0.1.norm) updates"},
    ),
    "noise": (Images(lambda: conv(Noisy())), {}),
}


def found(workload: Any, changes: Mapping[str, Any] = CHANGES) -> dict[str, str]:
    return kinds.differing(Resident(workload), Config(Knobs.of({}, table_of(workload))), changes)


@pytest.mark.parametrize("name", NETS)
def test_what_changes_learning_is_found_and_the_model_unharmed(name: str) -> None:
    workload, expected = NETS[name]
    resident, config = Resident(workload), Config(Knobs.of({}, table_of(workload)))
    before = {n: t.clone() for n, t in resident.model(config).state_dict().items()}
    torch.manual_seed(config.seed)  # as each run of a comparison begins; its draws are forked off
    state = torch.random.get_rng_state()
    begun = time.process_time()
    seen = kinds.differing(resident, config, CHANGES)
    took_s = time.process_time() - begun
    assert seen.keys() == expected.keys()
    for knob, why in expected.items():
        assert why in seen[knob]
    assert took_s < 3.0
    model = resident.model(config)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    if isinstance(model, Attending):
        assert model.attention.dropout == model.memory.dropout == 0.5
    assert torch.equal(torch.random.get_rng_state(), state)


def test_rounding_that_a_rectifier_decides_by_is_no_effect() -> None:
    assert found(Images(lambda: conv(Kinked())), {"channels_last": True}) == {}


def test_samples_drawn_anew_at_each_reading_are_found() -> None:
    class Flipped(Images):
        def dataset(self, config: Config, split: Split) -> Any:
            whole = super().dataset(config, split)

            class Anew(Dataset[Any]):
                def __len__(self) -> int:
                    return 32

                def __getitem__(self, index: int) -> Any:
                    image, kind = whole[index]
                    return image + torch.rand(1), kind

            return Anew()

    assert found(Images(conv), {"ram_cache": True}) == {}
    assert "draws random numbers" in found(Flipped(conv), {"ram_cache": True})["ram_cache"]


def test_a_system_knob_of_ones_own_is_held_to_its_word() -> None:
    class Own(Images):
        knobs: ClassVar = {"halved": Knob(False, "system"), "idle": Knob(1, "system", values=(1, 2))}

        def model(self, config: Config) -> nn.Module:
            self.halved = config.knobs.halved
            return super().model(config)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) * (0.5 if self.halved else 1.0)

    own = Own(conv)
    own.knobs["halved"] = Knob(False, "system", shapes_model=True)
    assert found(own, {"halved": True, "idle": 2}) == {"halved": "its gradients differ"}


def test_padding_that_reaches_the_model_is_found() -> None:
    """Sorted by length, or in smaller micro-batches, there is less of it."""

    class Means(Images):
        def dataset(self, config: Config, split: Split) -> Any:
            return [
                torch.randn(3 + index % 7, 8, generator=torch.Generator().manual_seed(index)) for index in range(32)
            ]

        def collate(self, samples: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(samples, batch_first=True)

        def length(self, sample: Tensor) -> int:
            return len(sample)

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).mean(dim=1).square().mean()

    class Masked(Means):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch.sum(dim=1)).square().mean()

    assert {"micro_batch_size", "length_bucketing"} <= found(Means(lambda: nn.Linear(8, 1))).keys()
    assert found(Masked(lambda: nn.Linear(8, 1, bias=False))) == {}


NOISY_LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return X[index] + AUGMENTS * torch.randn(4), index

DATA = Augmented()
SPACE = {"micro_batch_size": [8, 16], "batch_size": [16]}
OBJECTIVES = {"error": "min"}

def train(run):
    net = nn.Sequential(nn.Linear(4, 8), NORM, nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), run["learning_rate"])
    run.prepare(net, optimizer)
    for x, _ in run.batches(DataLoader(DATA, shuffle=True, **run.loader())):
        noise = torch.NOISE_like(x)
        run.backward((net(x + noise) - noise).square().mean(), optimizer)
        if run.evaluate_now:
            run.report(error=1.0)
"""


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(DATA)

def train"""


def found_in_loop(
    path: Path, changes: dict[str, Any], norm: str = "ReLU()", noise: str = "zeros", augments: float = 0, **also: str
) -> tuple[dict[str, str], list[str]]:
    """Returns what is found in the loop above, written with these words, and the knobs of which nothing is known."""
    text = NOISY_LOOP.replace("NORM", f"nn.{norm}").replace("NOISE", noise).replace("AUGMENTS", str(augments))
    for old, new in also.items():
        text = text.replace(old, new)
    path.write_text(text)
    resident = own_loop.OwnResident(load(str(path)))
    config = Config(Knobs.of({"batch_size": 16, "micro_batch_size": 16}, table_of(resident.workload)), {})
    own_loop.train(own_loop.prepare(resident, config, Plan(16, (16,))))  # it has asked for its knobs
    untold: list[str] = []
    return kinds.differing(resident, config, changes, untold), untold


@pytest.mark.parametrize(("is_stream", "workers", "is_found"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_two_workers_of_a_stream_change_what_is_learned(
    is_stream: bool, workers: int, is_found: bool, tmp_path: Path
) -> None:
    streamed = {"def train": STREAM, "DATA, shuffle=True": "Stream()", "loader())": "loader()), samples=64"}
    path = tmp_path / f"stream_{is_stream}_{workers}.py"
    changed, _ = found_in_loop(path, {"micro_batch_size": 8, "num_workers": workers}, **(streamed if is_stream else {}))
    assert changed == ({"num_workers": loader_check.STREAM} if is_found else {})


@pytest.mark.parametrize(
    ("norm", "noise", "augments", "is_found"),
    [
        ("ReLU()", "randn", 0.0, False),
        ("ReLU()", "zeros", 1.0, False),
        ("BatchNorm1d(8)", "zeros", 0.0, True),
        ("BatchNorm1d(8)", "randn", 0.0, True),
        ("ReLU(inplace=True)", "randn", 0.0, False),
    ],
)
def test_noise_of_a_custom_loop_is_not_taken_for_an_effect(
    norm: str, noise: str, augments: float, is_found: bool, tmp_path: Path
) -> None:
    """A norm is found by itself beside noise; else what is as large as that is said not to be known."""
    path = tmp_path / f"noisy_{noise}_{augments:.0f}.py"
    changed, untold = found_in_loop(path, {"micro_batch_size": 8}, norm=norm, noise=noise, augments=augments)
    assert changed.keys() == ({"micro_batch_size"} if is_found else set())
    assert all(why.startswith("BatchNorm1d (1) gives a sample other values") for why in changed.values())
    assert untold == ["micro_batch_size"] * (noise == "randn" and not is_found)
