"""The head pose workload on a few drawn heads: geometry of the angles, augmentation, network, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainables.data import rendered_heads
from trainables.data.head_mesh import rotation
from trainables.knobs import Knobs
from trainables.loop import prepare, train
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, blocks
from trainables.workloads import headpose
from trainables.workloads.headpose import BINS, FaceSample, HeadPose, PoseNet, expected_deg

pytestmark = pytest.mark.workload

SMALL: dict[str, Any] = {"heads": 24, "image_size": 32, "val_frac": 0.34}


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_a_cache(tmp_path_factory):
    """One torch thread, so that sums have one order, and a cache folder of the tests' own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def resident():
    """The workload with its data, shared."""
    return Resident(HeadPose())


def config(seed: int = 0, **knobs: Any) -> Config:
    chosen = {"batch_size": 8, "micro_batch_size": 8, "dropout": 0.0, "learning_rate": 2e-3, "hidden_size": 32, **knobs}
    return Config(Knobs.of(chosen, EVERY), SMALL, seed=seed)


def noise(count: int = 6, size: int = 16) -> FaceSample:
    """Returns a batch of random images and angles."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return FaceSample(images, 60.0 * torch.randn(count, 3, generator=generator))


def augmented(batch: FaceSample, keys: Tensor, **knobs: Any) -> FaceSample:
    return HeadPose.augment(FaceSample(*(t.clone() for t in batch)), keys, config(**knobs), "")


def brightness(images: Tensor) -> Tensor:
    """Returns the brightness of each pixel (batch, height, width), ITU-R BT.601."""
    return torch.einsum("bchw,c->bhw", images.double(), torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64))


# -- geometry -------------------------------------------------------------------------------------------------------


def test_a_mirrored_head_has_yaw_and_roll_negated():
    mirror = np.diag([-1.0, 1.0, 1.0])
    for yaw, pitch, roll in np.random.default_rng(0).uniform(-90, 90, (10, 3)):
        np.testing.assert_allclose(
            rotation(-yaw, pitch, -roll), mirror @ rotation(yaw, pitch, roll) @ mirror, atol=1e-6
        )


def test_the_expected_angle_of_one_bin_is_its_middle():
    sure = torch.full((BINS, 3, BINS), -1e4)
    sure[torch.arange(BINS), :, torch.arange(BINS)] = 0.0
    middles = torch.arange(BINS) * 3.0 - 97.5
    torch.testing.assert_close(expected_deg(sure), middles[:, None].expand(-1, 3))
    torch.testing.assert_close(expected_deg(torch.zeros(1, 3, BINS)), torch.zeros(1, 3), rtol=0, atol=1e-4)


# -- augmentation ---------------------------------------------------------------------------------------------------


def test_half_of_the_faces_are_mirrored_with_their_angles(monkeypatch):
    monkeypatch.setattr(headpose, "JITTER", (0.0, 0.0, 0.0, 0.0))
    batch = noise(400, 8)
    images, angles = augmented(batch, torch.arange(400))
    mirrored = (angles != batch.angles_deg).any(dim=1)
    assert 160 < mirrored.sum() < 240
    assert torch.equal(images[mirrored], batch.image[mirrored].flip(-1))
    assert torch.equal(images[~mirrored], batch.image[~mirrored])
    assert torch.equal(angles[mirrored], batch.angles_deg[mirrored] * torch.tensor([-1.0, 1.0, -1.0]))


def test_augmentation_in_place_gives_the_same_numbers():
    batch, keys = noise(), torch.arange(6)
    plain = HeadPose.augment(batch, keys, config(), "")
    untouched = noise()
    assert all(torch.equal(a, b) for a, b in zip(batch, untouched, strict=True))
    within = HeadPose.augment(batch, keys, config(inplace_augmentation=True), "")
    assert [a.data_ptr() for a in within] == [b.data_ptr() for b in batch]
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))
    assert plain.image.dtype == torch.uint8
    assert not torch.equal(plain.image, untouched.image)


def test_augmentation_of_a_sample_depends_on_its_key_alone():
    batch, keys = noise(10), torch.tensor([5, 9, -3, 1 << 60, 5, 0, 1, 2, 3, 4])
    assert len(batch.image) > headpose.IMAGES_AT_ONCE
    whole = augmented(batch, keys)
    parts = [augmented(FaceSample(*(t[i : i + 2] for t in batch)), keys[i : i + 2]) for i in range(0, 10, 2)]
    assert all(torch.equal(a, torch.cat(p)) for a, p in zip(whole, zip(*parts, strict=True), strict=True))
    nhwc = augmented(FaceSample(batch.image.contiguous(memory_format=torch.channels_last), batch.angles_deg), keys)
    assert torch.equal(nhwc.image, whole.image)


def test_augmentation_0_changes_nothing_and_2_more_than_1():
    batch, keys = noise(64), torch.arange(64)
    changes = [
        (brightness(augmented(batch, keys, augmentation=s).image).mean((1, 2)) - brightness(batch.image).mean((1, 2)))
        for s in (0.0, 1.0, 2.0)
    ]
    sizes = [c.abs().mean().item() for c in changes]
    assert sizes[0] == 0.0 < 10.0 < sizes[1] < 0.7 * sizes[2]


def recoloured(images: Tensor, **change: float) -> Tensor:
    names = ("brightness", "contrast", "saturation", "hue")
    return headpose._recolour(images.clone(), [torch.full((len(images),), change.get(name, 0.0)) for name in names])


def test_brightness_scales_every_channel():
    images = noise().image
    assert torch.equal(recoloured(images, brightness=-0.5), (images * 0.5).round().byte())
    assert torch.equal(recoloured(images, brightness=0.5), (images * 1.5).clamp(max=255).round().byte())


def test_without_contrast_an_image_is_its_mean_brightness():
    images = noise().image
    flat = recoloured(images, contrast=-1.0, saturation=-1.0)
    means = brightness(images).mean(dim=(1, 2))
    torch.testing.assert_close(flat.double(), means[:, None, None, None].expand_as(flat), rtol=0, atol=0.51)


@pytest.mark.parametrize("change", [{"saturation": 0.4}, {"hue": -0.4}], ids=str)
def test_saturation_and_hue_leave_the_brightness(change):
    images = (110 + noise().image // 8).byte()  # pale: nothing is clipped
    found = recoloured(images, **change)
    torch.testing.assert_close(brightness(found), brightness(images), rtol=0, atol=0.6)
    assert not torch.equal(found, images)


# -- network and loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "width"), [(16, 8), (100, 64)])
def test_a_network_of_any_size_gives_one_face_what_a_batch_gets(size, width):
    torch.manual_seed(0)
    model = PoseNet(width, size, 0.5).eval()
    images = noise(3, size).image
    together = model(images)
    assert together.shape == (3, 3, BINS)
    torch.testing.assert_close(together, torch.cat([model(image[None]) for image in images]), rtol=1e-4, atol=1e-4)
    assert len(blocks(HeadPose(), model)) == math.ceil(math.log2(size)) - 2


def test_loss_of_an_angle_at_the_limit_is_finite(resident):
    batch = FaceSample(noise(2).image, torch.tensor([[99.0, -99.0, 0.0], [98.9, -98.9, 99.0]]))
    assert math.isfinite(resident.workload.loss(PoseNet(8, 16, 0.0), batch).item())


def test_evaluate_gives_the_error_of_each_angle(resident):
    class Straight(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.zeros(len(images), 3, BINS)

    angles = torch.tensor([[30.0, 0.0, 0.0], [-30.0, 12.0, 0.0], [0.0, 0.0, 9.0], [0.0, 0.0, -9.0]])
    batches = [FaceSample(noise(3).image, angles[:3]), FaceSample(noise(1).image, angles[3:])]
    found = resident.workload.evaluate(Straight(), batches)
    assert found == pytest.approx({"mae": 7.5, "mae_yaw": 15.0, "mae_pitch": 3.0, "mae_roll": 4.5}, abs=0.05)


# -- data, and the loop ---------------------------------------------------------------------------------------------


def test_splits_share_no_face_and_are_the_same_for_every_seed(resident):
    found = [HeadPose().faces(config(seed)) for seed in (0, 1)]
    assert found[0] == found[1]
    assert [len(found[0][s]) for s in ("train", "val")] == [16, 8]  # type: ignore[index]
    assert not {f.image for f in found[0]["train"]} & {f.image for f in found[0]["val"]}
    baseline = resident.workload.baselines(config())["mean pose"]["mae"]  # type: ignore[attr-defined]
    assert 10 < baseline < 35


def test_it_learns_the_faces_it_is_shown(resident):
    asked = config(augmentation=0.0)
    state = prepare(resident, asked, Plan(samples=16 * 15))
    train(state)
    shown = resident.dataset(asked, "train")
    batch = HeadPose.collate([shown[i] for i in range(16)])
    with torch.no_grad():
        error = resident.workload.evaluate(state.model.eval(), [batch])["mae"]
    assert error < 10 < resident.workload.baselines(asked)["mean pose"]["mae"]  # type: ignore[attr-defined]


def test_a_folder_of_one_s_own_and_another_to_validate_on():
    one, other = (str(rendered_heads.folder(n)) for n in (6, 4))
    faces = HeadPose().faces(Config(options={"data": one, "val_data": other, "max_train_samples": 5}))
    assert [len(faces["train"]), len(faces["val"])] == [5, 4]
