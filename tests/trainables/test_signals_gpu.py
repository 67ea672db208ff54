"""The signals workload on a card: the numbers of the host, and no step that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import knobs_of
from trainables import batches, draws
from trainables.data import npy_sequences
from trainables.workload import Config
from trainables.workloads.signals import Signals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """40 recordings of 1 to 12 steps."""
    rng = np.random.default_rng(0)
    arrays = [("train", "ab"[i % 2], f"{i:02d}", rng.normal(size=(1 + i % 12, 4))) for i in range(40)]
    npy_sequences.write(tmp_path, [*arrays, ("val", "a", "0", np.ones((1, 4)))])
    return Config(knobs_of(hidden_size=32, dropout=0.0, encoder_frac=0.5), {"data": str(tmp_path)})


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    """Makes every call that waits for the device an error, once a test asks for it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def host_batch(config: Config) -> batches.Keyed:
    data = Signals().dataset(config, "train")
    keys = draws.keys(0, 0, torch.arange(16))
    return batches.Keyed(Signals.collate([data[i] for i in range(16)]), keys)


@pytest.mark.parametrize("phase", ["encoder", "classifier"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_gives_what_the_host_gives_and_does_not_wait(
    config: Config, nothing_waits: None, phase: str, packed: bool
) -> None:
    workload, found = Signals(), []
    model = workload.model(config.with_knobs(sequence_packing=packed))
    for device in (torch.device("cpu"), DEVICE):
        model.to(device)
        keyed = batches.to_device(host_batch(config), device)
        workload.augment(keyed.batch, keyed.keys, config, phase)  # the references reach the device once
        torch.cuda.set_sync_debug_mode("error" if device == DEVICE else "default")
        batch = workload.augment(keyed.batch, keyed.keys, config, phase)
        loss = workload.loss(model, batch)
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        found.append((batch["x"].cpu(), loss.item()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-3)
