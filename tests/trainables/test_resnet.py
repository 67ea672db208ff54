"""ResNets of headpose: the network of the paper, norms that micro-batches leave alone, files that are refused."""

import re
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.trainables.test_headpose import noise
from trainables import kinds
from trainables.knobs import Knobs
from trainables.our_knobs import EVERY
from trainables.precision import autocast, checkpointed
from trainables.resident import Resident
from trainables.resnet import NORMS, RESIDUAL_BLOCKS, FrozenNorm, GroupNorm, ResNet
from trainables.workload import Config, WorkloadError, blocks
from trainables.workloads.headpose import BINS, HeadPose

pytestmark = pytest.mark.workload

THEIRS = {  # names of weights in transformers, and in torchvision
    r"resnet\.embedder\.embedder\.": "1.",
    r"resnet\.encoder\.stages\.(\d)\.layers\.": lambda found: f"layer{int(found[1]) + 1}.",
    r"shortcut\.convolution": "downsample.0",
    r"shortcut\.normalization": "downsample.1",
    r"layer\.(\d)\.": lambda found: f"{int(found[1]) + 1}.",
    r"(\d)\.convolution": r"conv\1",
    r"(\d)\.normalization": r"bn\1",
    r"classifier\.1": "fc",
}


def config(**options: Any) -> Config:
    knobs = {"batch_size": 8, "micro_batch_size": 8, "hidden_size": 32, "dropout": 0.0}
    return Config(Knobs.of(knobs, EVERY), {"network": "resnet18", "image_size": 32, "heads": 24, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of narrow weights for each norm, and one without."""
    folder = tmp_path_factory.mktemp("weights")
    group, frozen = (ResNet("resnet18", (10,), 16, norm, 0.0).state_dict() for norm in ("group", "frozen"))
    moved = {n: torch.rand_like(w) + 0.5 if "bn" in n and w.is_floating_point() else w for n, w in frozen.items()}
    torch.save(moved, folder / "frozen.pth")
    save_file(group, folder / "group.safetensors")
    (folder / "text.pth").write_text("no weights")
    return folder


@pytest.mark.parametrize(("network", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_parameters_are_as_many_as_published(network, count):
    with torch.device("meta"):
        made = [ResNet(network, (1000,), 64, norm, 0.0) for norm in NORMS]
    assert [sum(p.numel() for p in model.parameters()) for model in made] == [count, count]


@pytest.mark.parametrize(("network", "layer", "wider"), [("resnet18", "basic", 1), ("resnet50", "bottleneck", 4)])
def test_it_computes_what_another_implementation_does(network, layer, wider):
    sizes = {"hidden_sizes": [8 * wider * 2**n for n in range(4)], "depths": list(RESIDUAL_BLOCKS[network])}
    asked = transformers.ResNetConfig(layer_type=layer, embedding_size=8, num_labels=10, **sizes)
    other, model = transformers.ResNetForImageClassification(asked).train(), ResNet(network, (10,), 8, "frozen", 0.0)
    images = noise(4, 64).image
    normed = (images.float() - model.imagenet[0]) / model.imagenet[1]
    other(normed)  # its statistics move
    weights = other.state_dict()
    for theirs, ours in THEIRS.items():
        weights = {re.sub(theirs, ours, name): weight for name, weight in weights.items()}
    model.load_state_dict(weights)
    torch.testing.assert_close(model.train()(images), other.eval()(normed).logits)


@pytest.mark.parametrize(("norm", "file"), [("group", "group.safetensors"), ("frozen", "frozen.pth")])
def test_micro_batches_and_layouts_change_nothing(norm, file, files):
    asked, resident = config(norm=norm, weights=str(files / file)), Resident(HeadPose())
    changes = {"micro_batch_size": 2, "channels_last": True, "activation_checkpointing": True}
    assert not kinds.differing(resident, asked, changes)


def test_a_file_gives_all_but_the_classifier(files):
    given = torch.load(files / "frozen.pth")
    found = HeadPose().model(config(norm="frozen", weights=str(files / "frozen.pth")))
    assert all(torch.equal(weight, given[name]) for name, weight in found.state_dict().items() if name[:3] != "fc.")
    assert found(noise(2, 224).image).shape == (2, 3, BINS)


@pytest.mark.parametrize(
    ("network", "norm", "file", "says"),
    [
        ("resnet18", "frozen", None, "frozen needs weights"),
        ("small", "group", "group.safetensors", "these a ResNet; try: workload.network=resnet50"),
        ("resnet18", "group", "frozen.pth", "Unexpected key.*running_mean.*norm=frozen"),
        ("resnet18", "frozen", "group.safetensors", "Missing key.*running_mean"),
        ("resnet18", "group", "none.pth", "No such file"),
        ("resnet18", "group", "text.pth", "text.pth does not fit"),
    ],
)
def test_weights_that_do_not_fit_are_one_error(network, norm, file, says, files):
    with pytest.raises(WorkloadError, match=says) as raised:
        HeadPose().model(config(network=network, norm=norm, weights=file and str(files / file)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_keep_the_type_that_autocast_chose(norm):
    model, seen = ResNet("resnet50", (3, 2), 8, norm, 0.0), set[torch.dtype]()
    for module in model.modules():
        if isinstance(module, GroupNorm | FrozenNorm):
            module.register_forward_hook(lambda _, given, result: seen.update({given[0].dtype, result.dtype}))
    with autocast(Knobs.of({"amp_dtype": "bf16"}, EVERY), torch.device("cpu")), checkpointed(blocks(None, model), True):
        assert model(noise(2, 32).image).dtype == torch.float32
    assert seen == {torch.bfloat16}
