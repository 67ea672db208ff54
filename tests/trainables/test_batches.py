"""The plan of an epoch: every sample once, cuts that keep the batch."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.fakes import Lines, Sums, knobs_of
from trainables import sanity
from trainables.batches import (
    Loader,
    SampleCounts,
    Transfer,
    fork_workers,
    plan_epoch,
    sample_lengths,
    to_device,
)
from trainables.knobs import Knobs
from trainables.ram_cache import Cached, CacheLimits, CacheTooLarge
from trainables.resident import Resident
from trainables.validation import VALIDATION_SAMPLES, validation_loader
from trainables.workload import Config, Split

META = torch.device("meta")
sizes = st.integers(1, 40)


@settings(max_examples=60)
@given(count=st.integers(1, 200), batch=sizes, micro=sizes, bucketing=st.booleans())
def test_every_sample_once_and_shares_of_a_batch_add_up_to_one(
    count: int, batch: int, micro: int, bucketing: bool
) -> None:
    knobs = Knobs(batch_size=batch, micro_batch_size=micro, length_bucketing=bucketing)
    plan = plan_epoch(count, knobs, seed=3, epoch=0, lengths=[i % 7 for i in range(count)])
    assert sorted(i for m in plan for i in m.indices) == list(range(count))
    assert all(len(m.indices) <= min(micro, batch) for m in plan)
    if min(count, batch, micro) > 2:
        assert all(len(m.indices) > 1 for m in plan), "batch norm takes no single sample"
    assert all(round(len(m.indices) / m.share) <= batch for m in plan)
    shares, batches = 0.0, 0
    for m in plan:
        shares += m.share
        batches += m.ends_batch
    assert abs(shares - batches) < 1e-9
    assert batches == -(-count // batch)


@settings(max_examples=30)
@given(micro=sizes, bucketing=st.booleans())
def test_a_batch_holds_the_same_samples_however_it_is_cut(micro: int, bucketing: bool) -> None:
    lengths = [(i * 31) % 17 for i in range(100)]

    def batches(knobs: Knobs) -> list[set[int]]:
        groups: list[set[int]] = [set()]
        for m in plan_epoch(100, knobs, 0, 1, lengths):
            groups[-1] |= set(m.indices)
            if m.ends_batch:
                groups.append(set())
        return groups

    whole = Knobs(batch_size=16, micro_batch_size=16)
    assert batches(whole.with_(micro_batch_size=micro, length_bucketing=bucketing)) == batches(whole)


def test_epochs_differ_and_repeat() -> None:
    one, two = (plan_epoch(50, Knobs(), 0, e, None) for e in (0, 1))
    assert one != two
    assert one == plan_epoch(50, Knobs(), 0, 0, None)


class Encoding(UserDict[str, Any]):
    """What moves itself, as a batch of Hugging Face's tokenizers does."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.data.items()}
        return self


class Graph:
    """What takes a device and no more."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def test_an_object_moves_itself_and_the_hosts_batch_stays() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"packed": packed, "rest": (Encoding(ids=torch.zeros(2)), Graph(torch.zeros(2)))}
    for moved in (to_device(batch, META), to_device(batch, META, non_blocking=True), Transfer(Knobs(), META)(batch)):
        assert (moved["packed"].data.device.type, moved["packed"].batch_sizes.device.type) == ("meta", "cpu")
        encoding, graph = moved["rest"]
        assert (type(encoding), encoding["ids"].device.type, graph.nodes.device.type) == (Encoding, "meta", "meta")
    assert batch["rest"][0]["ids"].device.type == "cpu"


def test_a_packed_batch_has_as_many_samples_as_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert SampleCounts(None).of((packed, torch.zeros(2)), 0) == 2
    assert SampleCounts(None, 8).of((torch.tensor(0.5), Encoding(ids=torch.zeros(3, 7))), 0) == 3
    assert SampleCounts(None, 8).of({"text": ["a"]}, 0) == 8


class Table(Lines):
    """Samples with a method `batch` that is not ours, as Hugging Face's data sets have one."""

    def batch(self, batch_size: int, drop_last_batch: bool = False) -> None:
        raise TypeError(f"an int was expected, not {batch_size!r}")


class Tabled(Sums):
    """Sums of such a table."""

    def dataset(self, config: Config, split: Split) -> Table:
        return Table(16, seed=int(split == "val"))


def test_a_batch_method_of_another_meaning_is_not_called() -> None:
    config = Config(knobs_of(batch_size=4, micro_batch_size=4))
    sanity.check(Resident(Tabled()), config)
    table = Table(VALIDATION_SAMPLES, 0)
    in_workers = validation_loader(table, Sums().collate, 1000, None, Config(Knobs(num_workers=1)))
    assert isinstance(in_workers, DataLoader)
    assert len(list(in_workers)) == 2


class Sized(Dataset[Tensor]):
    """So many samples of 1,000 numbers; how often one was read is counted."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.cat([torch.tensor([float(index)]), torch.zeros(999)])


@pytest.mark.parametrize(
    ("count", "workers", "is_read_here"),
    [(VALIDATION_SAMPLES, 0, True), (VALIDATION_SAMPLES, 2, False), (1300, 2, True)],
    ids=["no workers", "workers", "too few samples to be worth workers"],
)
def test_validation_comes_in_the_same_batches_from_workers(count: int, workers: int, is_read_here: bool) -> None:
    samples = Sized(count)
    config = Config(Knobs(num_workers=workers), loader_timeout_s=30.0)
    loaded = validation_loader(samples, torch.stack, 600, None, config)
    assert getattr(loaded, "timeout", None) == (None if is_read_here else 30.0)
    assert [float(batch[0, 0]) for batch in loaded] == [float(start) for start in range(0, count, 600)]
    assert samples.reads == (count if is_read_here else 0)


def test_workers_have_what_a_users_file_defines() -> None:
    class Local(Sized):
        """A data set that no other process could import."""

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)  # as Python 3.14 has it
    try:
        config = Config(Knobs(num_workers=1, batch_size=4, micro_batch_size=4))
        loader = Loader(Local(4), config, torch.stack, None)
        assert len(next(loader.epoch(plan_epoch(4, config.knobs, 0, 0, None)))) == 4
        fork_workers()  # then loaders of their own have it, too
        assert len(list(DataLoader(Local(4), num_workers=1))) == 4
        multiprocessing.set_start_method(None, force=True)
        fork_workers()
        is_chosen = multiprocessing.get_start_method(allow_none=True) is not None
        assert is_chosen == (sys.version_info >= (3, 14)), "their own choice is free where nothing is amiss"
    finally:
        multiprocessing.set_start_method(before, force=True)


class Streamed(IterableDataset[Tensor]):
    """Ten images, one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(10, 3, 5, 5))


def sizes_of(loader: DataLoader[Tensor]) -> list[int]:
    found: list[int] = []
    for batch in loader:
        found.append(SampleCounts(loader).of(batch, sum(found)))
    return found


@pytest.mark.parametrize("collate", [None, tuple, lambda images: torch.stack(images, 1)])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_a_batch_has_the_samples_that_its_loader_drew(collate: Any, drop_last: bool, sizes: list[int]) -> None:
    images: Any = torch.zeros(10, 3, 5, 5)  # a tuple of them begins with one image of 3 rows
    assert sizes_of(DataLoader(images, 4, drop_last=drop_last, collate_fn=collate)) == sizes


def test_else_a_batch_has_the_rows_of_its_first_tensor() -> None:
    images: Any = torch.zeros(10, 3, 5, 5)
    assert sizes_of(DataLoader(Streamed(), 4)) == [4, 4, 2]
    assert sizes_of(DataLoader(images, batch_sampler=[[0], [1, 2, 3]])) == [1, 3]
    assert SampleCounts(None, 8).of("words", 0) == 8
    with pytest.raises(TypeError, match="type str"):
        SampleCounts(None).of("words", 0)


def test_a_data_set_that_knows_its_lengths_is_not_read_for_them() -> None:
    class Known(Lines):
        def sample_lengths(self) -> list[int]:
            return [3] * len(self)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise AssertionError("read")

    known = Known(5, seed=0)
    assert sample_lengths(known, Sums().length) == [3] * 5
    assert sample_lengths(known, None) is None
    known.sample_lengths = lambda: [1]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="1 lengths for 5 samples"):
        sample_lengths(known, Sums().length)


FEW_IMAGES = [SimpleNamespace(pixels=bytes(100_000)) for _ in range(64)]
VIEWS = [SimpleNamespace(x=row) for row in torch.zeros(64, 10_000)]  # each in the storage of all


@pytest.mark.parametrize(
    ("samples", "limits", "says"),
    [
        (Sized(10_000), CacheLimits(lambda: 2e7), r"10000 samples in RAM: about 0\.0 GiB, .*knobs\.ram_cache=false"),
        (Sized(10_000), CacheLimits(lambda: 8e7), ""),
        (Sized(10_000), CacheLimits(most_s=1e-9), r"s to prepare, 0 s are allowed"),
        (Sized(8), CacheLimits(lambda: 0.0, 0.0), ""),
        (FEW_IMAGES, CacheLimits(lambda: 5e6), "64 samples"),
        (VIEWS, CacheLimits(lambda: 5e6), ""),
    ],
    ids=["too large", "large enough", "too slow", "too few to matter", "objects by what they hold", "shared storage"],
)
def test_a_cache_beyond_its_limits_is_refused(samples: Any, limits: CacheLimits, says: str) -> None:
    if says:
        with pytest.raises(CacheTooLarge, match=says):
            Cached(samples, limits)
        assert getattr(samples, "reads", 0) < 100, "after a few samples"
    else:
        assert len(Cached(samples, limits)) == len(samples)


def test_a_cached_sample_stays_whole_whatever_collate_takes() -> None:
    kept = Cached([{"x": number, "label": 1} for number in range(3)])  # type: ignore[arg-type]
    for _ in range(2):
        assert [kept[number].pop("label") for number in range(3)] == [1, 1, 1]


MANY_TENSORS = """
import resource
import torch
from torch.utils.data import DataLoader
from trainables.batches import fork_workers

many = lambda samples: [torch.ones(2) for _ in samples * 5]
for most in (4096, 64):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    fork_workers()
    loader = DataLoader(range(64), batch_size=8, num_workers=2, timeout=20, collate_fn=many)
    print(sum(len(batch) for batch in loader), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_loader_processes_need_few_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_TENSORS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["320", "4096", "320", "64"]
