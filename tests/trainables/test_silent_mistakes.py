"""Mistakes in custom loops that torch lets pass, and that would make a faster configuration learn something else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from tests.trainables import test_own_loop
from tests.trainables.test_own_loop import BACKWARD, HEAD, NET, events, loop, prepared
from trainables import kinds, loader_check, own_loop
from trainables.batches import SampleCounts
from trainables.loader_check import SHARES_A_FILE, open_file, reads_differ
from trainables.own_count import OwnState
from trainables.plan import Plan
from trainables.workload import LoopError, NotIndependent
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

script = test_own_loop.script
PLAN = Plan(128, (128,))

TWO_NETS = """
def train(run):
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(net.parameters(), lr=run["learning_rate"]) for net in (one, two))
    run.prepare(nn.ModuleList([one, two]), first, second)
    for i, batch in enumerate(run.batches(DataLoader(DATA, **run.loader()))):
        run.backward(loss_of(one, batch), first)
        if COUNTER % 4 == 0:
            run.backward(loss_of(two, batch), second)
        if run.evaluate_now:
            run.report(error=1.0)
"""


def scheduled(step: str, shown: str = "") -> str:
    first = "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)"
    return loop(f"{BACKWARD}\n        {step}", f"{first}; {shown}")


BY_TURNS = "turns = locals().get('turns', 1) + 1; optimizer.param_groups[0]['lr'] = run['learning_rate'] / turns"
UPDATES = (
    "average.update_parameters(net)",
    "[a.data.mul_(0.9).add_(p.data, alpha=0.1) for a, p in zip(average.parameters(), net.parameters())]",
    "average = {name: 0.9 * p.data for name, p in net.named_parameters()}",
    "[p.data.mul_(1 - run['learning_rate']) for p in net.parameters()]",
)
SCALED = "class Scaled(nn.Module):\n    def forward(self, weight):\n        return 0.5 * weight\n"


def averaged(line: str, when: str = "True") -> str:
    first = "average = torch.optim.swa_utils.AveragedModel(net)"
    return loop(f"stepped = {BACKWARD}\n        if {when}: {line}", first, head=SCALED)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (TWO_NETS.replace("COUNTER", "i"), "run.batch"),
        (TWO_NETS.replace("COUNTER", "run.batch"), ""),
        (scheduled("schedule.step()"), "give it to run.prepare"),
        (scheduled("", "run.prepare(net, schedule)"), ""),
        (scheduled(BY_TURNS), "counts micro-batches"),
        (scheduled(f"if run.ends_batch: {BY_TURNS}"), ""),
        *((averaged(line), "changes weights") for line in UPDATES),
        *((averaged(line, "stepped"), "") for line in UPDATES),
        (averaged("Scaled()(net.weight.data)"), ""),
    ],
)
def test_loop_that_counts_micro_batches_is_told(script: Any, body: str, why: str) -> None:
    state = prepared(script(body), PLAN, micro_batch_size=16)
    own_loop.train(state)
    reasons = kinds.differing(state.resident, state.config, {"micro_batch_size": 4})
    assert reasons.keys() == ({"micro_batch_size"} if why else set())
    assert why in reasons.get("micro_batch_size", "")


@pytest.mark.parametrize("micro", [4, 16])
def test_run_batch_is_the_same_for_all_micro_batches(script: Any, micro: int) -> None:
    body = TWO_NETS.replace("COUNTER", "run.batch").replace("if run.ev", "SEEN.append(run.batch)\n        if run.ev")
    workload = script(body)
    events(workload, PLAN, micro_batch_size=micro)
    assert workload.train.__globals__["SEEN"] == [n for n in range(8) for _ in range(16 // micro)]


@pytest.mark.parametrize(
    "lines",
    [
        "one, two = loss_of(net, batch), net.weight.sum()\n        [run.backward(x, optimizer) for x in (one, two)]",
        "run.backward(loss_of(net, batch), optimizer)\n        run.backward(net(batch[0]).mean(), optimizer)",
    ],
    ids=["two losses of one pass", "two passes"],
)
@pytest.mark.parametrize("micro", [4, 16])
def test_two_losses_of_one_batch_are_refused(script: Any, lines: str, micro: int) -> None:
    with pytest.raises(LoopError, match="add them"):
        events(script(loop(lines)), PLAN, micro_batch_size=micro)


@pytest.mark.parametrize(("micro", "why"), [(16, ""), (8, "whole batches")])
def test_several_steps_on_one_batch_are_said(script: Any, micro: int, why: str) -> None:
    lines = (
        "[run.backward(loss_of(net, batch), optimizer, again=True) for _ in range(3)]\n        SEEN.append(optimizer)"
    )
    workload = script(loop(lines))
    with pytest.raises(LoopError, match=why) if why else nullcontext():
        assert events(workload, PLAN, micro_batch_size=micro)[-1].samples == 128


RARE = "w = 1 + 99 * (batch[2] == 200); run.backward((w * net(batch[0])[:, 0]).sum() / w.sum(), optimizer)"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("optimizer.zero_grad()\n        run.backward(loss_of(net, batch), optimizer)", r"leave out its zero_grad\(\)"),
        ("run.backward(loss_of(net, batch) / run.accumulation, optimizer)", "do not divide it by run.accumulation"),
        ("run.backward(len(batch[0]) * loss_of(net, batch), optimizer)", "a mean loss, not a sum"),
        ("run.backward(run.accumulation * loss_of(net, batch), optimizer)", "2 times as large"),
        ("assert run['batch_size'] > 8; run.backward(len(batch[0]) * loss_of(net, batch), optimizer)", "a mean loss"),
        ("run.backward(loss_of(net, batch), optimizer) and optimizer.zero_grad()", ""),
        (RARE, "by class"),
        ("run.backward((1 + (run.progress > 0.5)) * loss_of(net, batch), optimizer)", ""),
    ],
)
def test_gradients_that_are_not_those_of_the_batch_are_named(
    script: Any, lines: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "QUICK_S", 60.0)  # on a slow machine, too
    many = "DATA = TensorDataset(*(torch.cat(8 * [t]) for t in (X, X.sum(1))), torch.arange(512))\n"
    state = prepared(script(loop(lines, head=many)), PLAN, micro_batch_size=16)
    own_loop.train(state)
    found = kinds.differing(state.resident, state.config, {"micro_batch_size": 4})
    assert found.keys() == ({"micro_batch_size"} if why else set())
    assert re.search(why, found.get("micro_batch_size", ""))


VIEWS = """
import random

def views(samples):
    x = torch.stack([x for x, _ in samples])
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x), torch.stack([y for _, y in samples])

def joined(samples):
    return torch.cat(views(samples)[:2])
"""
NOISE = "net(torch.randn_like(batch[0])).square().mean()"
NOISY = f"run.backward((1 + COUNT % 2) * (loss_of(net, batch) + {NOISE} + 2 * {NOISE}), optimizer)"
OF_VIEWS = "run.backward((net(batch[0]) - net(batch[1])).square().mean() + loss_of(net, batch[::2]), optimizer)"
CONTRASTS = "labels = torch.arange(len(batch[0])); logits = -(net(batch[0]) - net(batch[1]).T).abs()"


@pytest.mark.parametrize(
    ("collate", "lines", "why", "is_known"),
    [
        ("views", OF_VIEWS, "", True),
        (
            "views",
            f"{CONTRASTS}; run.backward(nn.functional.cross_entropy(logits, labels), optimizer)",
            "another gradient",
            True,
        ),
        ("joined", "run.backward((net(batch) - 1).square().mean(), optimizer)", "", False),
        ("None", f"n = locals().get('n', -1) + 1; {NOISY.replace('COUNT', 'n')}", "counts micro-batches", True),
        ("None", NOISY.replace("COUNT", "run.batch"), "", False),
        ("None", BACKWARD.replace("loss_of", "random.random() * loss_of"), "", True),
    ],
    ids=["two views", "views compared", "views in one", "a counter beside noise", "of batches", "one number a batch"],
)
def test_draws_are_told_from_what_a_batch_teaches(
    script: Any, collate: str, lines: str, why: str, is_known: bool
) -> None:
    data = f"DataLoader(DATA, collate_fn={collate}, **run.loader())"
    state = prepared(script(loop(lines, head=VIEWS, data=data)), PLAN, micro_batch_size=16)
    own_loop.train(state)
    untold: list[str] = []
    reasons = kinds.differing(state.resident, state.config, {"micro_batch_size": 4}, untold)
    assert (reasons.keys(), untold) == (
        {"micro_batch_size"} if why else set(),
        [] if is_known else ["micro_batch_size"],
    )
    assert why in reasons.get("micro_batch_size", "")


@pytest.mark.parametrize("given", ["[net], [optimizer]", "net, net, optimizer, optimizer"])
def test_models_are_shown_one_by_one(script: Any, given: str) -> None:
    made = "net = nn.Linear(4, 1); optimizer = torch.optim.SGD(net.parameters(), lr=run['learning_rate'])"
    with pytest.raises(LoopError, match="give one model, then its optimisers"):
        events(script(loop(BACKWARD, f"run.prepare({given})", net=made)), PLAN)


FILLS = "raise torch.OutOfMemoryError('full')"


def thrice(state: OwnState) -> None:
    for _ in range(3):
        own_loop.train(own_loop.prepare(state.resident, state.config, PLAN))


@pytest.mark.parametrize(
    ("keeps", "evaluates", "why"),
    [
        ("", FILLS, "in its evaluation"),
        ("KEPT.append(net)\n    if len(KEPT) > 2: " + FILLS, "pass", "2 models of earlier trainings"),
        ("KEPT.append(net.weight.sum())\n    if len(KEPT) > 2: " + FILLS, "pass", "2 models of earlier trainings"),
        ("KEPT.append('')\n    if len(KEPT) > 2: " + FILLS, "pass", ""),
    ],
    ids=["evaluation", "models", "graphs", "neither"],
)
def test_memory_that_no_micro_batch_frees_is_named(script: Any, keeps: str, evaluates: str, why: str) -> None:
    lines = f"{BACKWARD}\n        if run.evaluate_now: {evaluates}"
    state = prepared(script(loop(lines, keeps, head="KEPT = []\n")), PLAN)
    with pytest.raises(LoopError if why else torch.OutOfMemoryError, match=why or "full"):
        thrice(state)


def test_batch_that_the_loop_leaves_out_for_want_of_memory_is_no_batch(script: Any) -> None:
    skips = "try: torch.zeros(run.batch << 20)\n        except RuntimeError: continue"
    state = prepared(script(loop(f"{skips}\n        {BACKWARD}")), Plan(128, (128,), cap_bytes=1 << 21))
    with pytest.raises(torch.OutOfMemoryError, match="left the batch out"):
        own_loop.train(state)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("zip(loader, loader)", "got a zip"),
        ("zip(loader, itertools.cycle([0]))", "got a zip"),
        ("(pair for pair in zip(loader, loader))", "used up after one epoch"),
        ("zip(itertools.cycle(loader), itertools.count())", ""),
        ("Pairs()", ""),
    ],
)
@pytest.mark.parametrize("epochs", ["", "for _ in run.epochs():"])
def test_iterator_that_ends_is_no_loader(script: Any, data: str, why: str, epochs: str) -> None:
    workload = script(f"""
import itertools

def train(run):
    loader = DataLoader(DATA, **run.loader())
    class Pairs:
        def __iter__(self):
            return zip(loader, loader)
    net, optimizer = made(run)
    {epochs or "if True:"}
        for batch, _ in run.batches({data}, samples=64):
            run.backward(loss_of(net, batch), optimizer)
            if run.evaluate_now:
                run.report(error=1.0)
""")
    with pytest.raises(LoopError, match=why) if why and not epochs else nullcontext():
        events(workload, PLAN)


@pytest.mark.parametrize("other", ["run.batches(loader)", "loader"])
@pytest.mark.parametrize("more", ["sum(loss_of(net, one) for one in OTHER)", "loss_of(net, next(others))"])
def test_two_loops_over_training_data_are_refused(script: Any, other: str, more: str) -> None:
    lines = f"run.backward(loss_of(net, batch) + {more.replace('OTHER', other)}, optimizer)"
    first = f"loader = DataLoader(DATA, **run.loader()); others = itertools.cycle({other})"
    workload = script(loop(lines, first, data="loader", head="import itertools"))
    with pytest.raises(LoopError, match="two loops") if "run" in other else nullcontext():
        events(workload, PLAN)


EPOCHS = """
class Shifted(torch.utils.data.Dataset):
    def __init__(self):
        self.epoch = 0
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return X[index] + self.epoch, X[index].sum()

def train(run):
    data = Shifted()
    loader = DataLoader(data, **run.loader())
    net, optimizer = made(run)
    for epoch in run.epochs():
        data.epoch = epoch
        for batch in run.batches(loader):
            run.backward(loss_of(net, batch), optimizer)
            LATER
    run.report(error=1.0)
"""


@pytest.mark.parametrize(
    ("later", "knobs", "why"),
    [
        ("", {"persistent_workers": True}, "between epochs"),
        ("", {"persistent_workers": False}, ""),
        ("", {"num_workers": 0}, ""),
        ("data.epoch = 7", {"persistent_workers": False}, "within an epoch"),
    ],
)
def test_data_set_that_changes_is_not_copied(script: Any, later: str, knobs: dict[str, Any], why: str) -> None:
    workload = script(EPOCHS.replace("LATER", later))
    asked = {"num_workers": 1, "micro_batch_size": 16, **knobs}
    with pytest.raises(LoopError, match=why) if why else nullcontext():
        events(workload, PLAN, **asked)


def test_transform_that_changes_is_not_copied(script: Any) -> None:
    mosaic = """
class Mosaic:
    p = 1.0
    def __init__(self):
        self.p = 1.0
    def __call__(self, x):
        return x + self.p * torch.rand(())

class Shifted(torch.utils.data.Dataset):
    def __init__(self):
        self.transforms, self.epoch = [Mosaic()], 0
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return self.transforms[0](X[index]), X[index].sum()
"""
    body = mosaic + EPOCHS[EPOCHS.index("\ndef train") :].replace("data.epoch = epoch", "LINE").replace("LATER", "")
    knobs = {"num_workers": 1, "micro_batch_size": 16, "persistent_workers": True}
    long = Plan(256, (256,))
    with pytest.raises(LoopError, match=r"transforms\[0\]\.p has changed"):
        events(script(body.replace("LINE", "data.transforms[0].p = float(epoch < 5)")), long, **knobs)
    events(script(body.replace("LINE", "data.transforms[0].seen = epoch")), long, **knobs)


def test_collate_function_that_changes_is_not_copied(script: Any) -> None:
    collates = "    def __call__(self, samples):\n        return torch.utils.data.default_collate(samples)\n\ndef train"
    body = EPOCHS.replace("\ndef train", collates).replace("(data, ", "(DATA, collate_fn=data, ").replace("LATER", "")
    with pytest.raises(LoopError, match=r"Shifted\.epoch was set between epochs"):
        events(script(body), PLAN, num_workers=1, micro_batch_size=16, persistent_workers=True)


STATES = """
class Stopping:
    patience = 3
    def __init__(self):
        self.best, self.cache = 9.0, {}

HELD = {"dict": {"best": 9.0, "weights": None}, "list": [1.0], "set": {1}}
DICT, LIST, SET, STOPPING = HELD["dict"], HELD["list"], HELD["set"], Stopping()
ADDED, CACHE, FILLED = {}, {}, [None]
"""
CHANGES = """
        DICT.update(best=1.0, weights=net)
        LIST.append(0.5)
        SET.add(2)
        ADDED["best"] = 1.0
        STOPPING.best, Stopping.patience = 1.0, 1
        CACHE[0] = STOPPING.cache[0] = FILLED[0] = net
"""


def test_what_a_module_learned_is_gone_and_its_caches_stay(script: Any) -> None:
    learned = "(dict(DICT), LIST[:], set(SET), ADDED.copy(), STOPPING.best, Stopping.patience)"
    seen = f"SEEN.extend([{learned}, [len(CACHE), len(STOPPING.cache), FILLED[0]]])"
    state = prepared(script(loop(BACKWARD + CHANGES, seen, head=STATES)), PLAN)
    for _ in range(2):
        own_loop.train(own_loop.prepare(state.resident, state.config, PLAN))
    first, caches, second, later = state.workload.train.__globals__["SEEN"]
    assert first == second == ({"best": 9.0, "weights": None}, [1.0], {1}, {}, 9.0, 3)
    assert caches == [0, 0, None]
    assert later[:2] == [1, 1]
    assert later[2] is not None


def test_second_training_after_the_end_is_refused(script: Any) -> None:
    folds = """
def train(run):
    for fold in range(3):
        net, optimizer = made(run)
        for batch in run.batches(DataLoader(DATA, **run.loader())):
            run.backward(loss_of(net, batch), optimizer)
            if run.evaluate_now:
                run.report(error=1.0)
"""
    with pytest.raises(LoopError, match="one training"):
        events(script(folds), PLAN)


def test_graphs_of_a_stream_are_counted_by_their_labels() -> None:
    class Loader:
        batch_size = 8

    counts = SampleCounts(Loader())
    for size in (8, 8, 5):
        graphs = {"edges": torch.zeros(2, 9 * size), "nodes": torch.zeros(3 * size, 4), "label": torch.zeros(size)}
        assert counts.of(graphs, 0) == size


def test_stream_that_batches_itself_is_counted_by_the_size_asked_for() -> None:
    counts = SampleCounts([], asked=32)
    for size in (32, 32, 7):
        batch = {"mask": torch.zeros(24, 24), "ids": torch.zeros(size, 24), "label": torch.zeros(size)}
        assert counts.of(batch, 0) == size


@pytest.mark.parametrize(("told", "why"), [(64, "had 16 samples"), (20, "")])
def test_epoch_that_counts_other_samples_than_told_is_refused(script: Any, told: int, why: str) -> None:
    edges = "[(torch.zeros(2, 9), X[i : i + 8]) for i in range(0, 64, 8)]"
    lines = "run.backward(net(batch[1]).mean(), optimizer)"
    with pytest.raises(LoopError, match=why) if why else nullcontext():
        events(script(loop(lines, data=f"DataLoader({edges}, batch_size=None), samples={told}")), PLAN)


class Records(Dataset[torch.Tensor]):
    """Numbers in a file, read through one handle, or one that each process opens."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        path.write_bytes(b"".join(number.to_bytes(512, "little") for number in range(256)))
        self._path, self._file = path, path.open("rb", buffering=0) if shared else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        file = self._file or self._path.open("rb", buffering=0)
        file.seek(512 * index)
        parts = []
        for _ in range(8):
            os.sched_yield()  # as a slow disk does
            parts.append(file.read(64))
        if file is not self._file:
            file.close()
        return torch.tensor(int.from_bytes(b"".join(parts), "little"))


def test_file_handle_shared_by_loader_processes_is_found(tmp_path: Path) -> None:
    assert not reads_differ(Records(tmp_path / "own.bin", shared=False), 2)
    with closing(Records(tmp_path / "shared.bin", shared=True)) as shared:
        assert reads_differ(shared, 2)
        assert open_file(Subset(shared, [0])) == "dataset._file"
    assert not open_file(shared)
    assert "worker_init_fn" in SHARES_A_FILE


class Lazy(Records):
    """Records whose first reading opens the file."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self._file = self._file or self._path.open("rb", buffering=0)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_file_opened_by_each_process_is_not_opened_before(tmp_path: Path) -> None:
    lazy = Lazy(tmp_path / "lazy.bin", shared=False)
    assert not reads_differ(lazy, 2)
    assert not open_file(lazy)


OPENS = """
class Records(torch.utils.data.Dataset):
    def __init__(self):
        self.file = open(__file__, "rb")
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return X[index], X[index].sum()

def opens(worker):
    torch.utils.data.get_worker_info().dataset.file = open(__file__, "rb")
"""


class OfProcess(Lazy):
    """Records whose file is opened anew in each process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if getattr(self, "pid", None) != os.getpid():
            self._file, self.pid = self._path.open("rb", buffering=0), os.getpid()
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_file_that_each_process_opens_anew_may_be_open(tmp_path: Path) -> None:
    for made, is_shared in ((Lazy, True), (OfProcess, False)):
        records = made(tmp_path / f"{made.__name__}.bin", shared=False)
        assert records[0] is not None
        assert bool(open_file(records)) == is_shared


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize(
    ("init", "workers", "why"), [("None", 2, "Records.file is open"), ("None", 0, ""), ("opens", 2, "")]
)
def test_open_file_is_not_handed_to_loader_processes(script: Any, init: str, workers: int, why: str) -> None:
    with pytest.raises(LoopError, match=why) if why else nullcontext():
        events(
            script(loop(BACKWARD, head=OPENS, data=f"DataLoader(Records(), worker_init_fn={init}, **run.loader())")),
            PLAN,
            num_workers=workers,
        )


class Noisy(Dataset[torch.Tensor]):
    """Samples that are drawn anew at each reading."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + index


class Draws(Noisy):
    """Samples that are drawn by a generator of the data set's own, or count how often they were read."""

    def __init__(self, *, counts: bool) -> None:
        self.generator, self.reads, self._counts = np.random.default_rng(0), 0, counts

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(self.reads if self._counts else self.generator.random()) + index


def seeds_its_own(worker: int) -> None:
    info = get_worker_info()
    info.dataset.generator = np.random.default_rng(torch.initial_seed() % 2**32)  # type: ignore[attr-defined]


class OfNumPy(Noisy):
    """Samples that are drawn by NumPy's own generator, which torch seeds in each process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(np.random.rand()) + index


def seeds_alike(worker: int) -> None:
    np.random.seed(42 + worker)


class Kept(Noisy):
    """Samples that are kept as they were drawn first."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._kept.setdefault(index, super().__getitem__(index))


DEEPER = """
def build(sizes=[4, 1]):
    sizes.insert(1, 8)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))
"""


@pytest.mark.parametrize(
    ("sizes", "why"), [("[4, 1]", ""), ("__import__('collections').UserList([4, 1])", "parameters")]
)
def test_net_that_grows_from_training_to_training_is_told(script: Any, sizes: str, why: str) -> None:
    made = "run.prepare(net := build(), optimizer := torch.optim.SGD(net.parameters(), lr=run['learning_rate']))"
    state = prepared(script(loop(BACKWARD, net=made, head=DEEPER.replace("[4, 1]", sizes))), PLAN)
    with pytest.raises(NotIndependent, match=why) if why else nullcontext():
        thrice(state)


class WarmsUp(Noisy):
    """Samples that are what they are for an epoch, and then are changed more and more."""

    reads = 0

    def __init__(self, *, matters: bool) -> None:
        self._matters = matters

    def __getitem__(self, index: int) -> torch.Tensor:
        type(self).reads += 1
        return torch.tensor(index + self._matters * max(0.0, type(self).reads / len(self) - 1))


CURRICULUM = """
STATE = {"width": 0, "seen": 0}

class Cropped(torch.utils.data.Dataset):
    def __len__(self):
        STATE["reads"] = STATE.get("reads", 0) + 1
        return 64
    def __getitem__(self, index):
        return crop(X[index]), X[index].sum()

def crop(x):
    return torch.cat([torch.zeros(STATE["width"]), x[STATE["width"]:]])
"""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("STATE['width'] = int(2.99 * run.progress)", r"STATE\['width'\]"),
        ("STATE['width'] = 2 * (run.batch > 0 or STATE['seen'] > 9)", r"STATE\['width'\]"),
        ("STATE['seen'] += 1", "^$"),
        ("crop.calls = getattr(crop, 'calls', 0) + 1", "^$"),
    ],
)
def test_curriculum_that_loader_processes_do_not_see_is_told(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / f"curriculum_{abs(hash(line))}.py"
    lines = f"{BACKWARD}\n        {line}"
    data = "DataLoader(Cropped(), **run.loader())"
    path.write_text(HEAD + loop(lines, "STATE['width'] = 0", head=CURRICULUM, data=data))
    session = Session(WorkerConfig(str(path)))
    session.describe({})
    changed = session.kinds({"batch_size": 8, "micro_batch_size": 8}, {"num_workers": 1, "micro_batch_size": 4}).changed
    assert re.search(why, changed.get("num_workers", ""))


def test_counter_of_reads_is_told_if_samples_depend_on_it() -> None:
    assert reads_differ(WarmsUp(matters=True), 1) == loader_check.COUNTS_READS.format("WarmsUp.reads")
    WarmsUp.reads = 0
    assert not reads_differ(WarmsUp(matters=False), 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_copies_of_a_generator_are_told_from_seeded_ones(workers: int) -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert not reads_differ(Noisy(), workers)
    assert not reads_differ(OfNumPy(), workers)
    assert reads_differ(Draws(counts=False), workers) == loader_check.COPIES
    assert reads_differ(Draws(counts=True), workers) == loader_check.COUNTS_READS.format("Draws.reads")
    assert not reads_differ(Draws(counts=False), workers, seeds_its_own)
    assert reads_differ(OfNumPy(), workers, seeds_alike) == loader_check.COPIES
    assert reads_differ(Kept(), workers) == loader_check.KEPT
    assert reads_differ(Stream(cut="epochs"), workers) == loader_check.COPIES
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


class Stream(IterableDataset[tuple[str, torch.Tensor]]):
    """Texts and numbers, which each process reads whole, or its share of."""

    def __init__(self, *, cut: str) -> None:
        self._cut, self._epoch = cut, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        numbers, self._epoch = range(400), self._epoch + 1
        cuts = {"": numbers, "in turns": numbers[part::parts], "halves": numbers[part * 400 // parts :][: 400 // parts]}
        cuts["epochs"] = range(self._epoch + part, 400, parts)
        return ((str(n), torch.tensor(n // 2)) for n in cuts[self._cut])


def test_stream_that_every_process_reads_whole_is_told_from_a_sharded_one() -> None:
    assert reads_differ(Stream(cut=""), 2) == loader_check.STREAM
    assert not reads_differ(Stream(cut="in turns"), 2)
    assert not reads_differ(Stream(cut="halves"), 2)
    assert not reads_differ(Stream(cut=""), 1)


OF_MODULE = "run.prepare(net := OF_ALL, optimizer := torch.optim.SGD(net.parameters(), lr=run['learning_rate']))"


@pytest.mark.parametrize("keeps", [False, True])
def test_training_begins_where_no_other_ended(script: Any, keeps: bool) -> None:
    state = prepared(script(loop(BACKWARD, net=OF_MODULE if keeps else NET, head="OF_ALL = nn.Linear(4, 1)\n")), PLAN)
    own_loop.train(state)
    again = state.config.with_knobs(learning_rate=0.05)
    with pytest.raises(LoopError, match="module level") if keeps else nullcontext():
        own_loop.train(own_loop.prepare(state.resident, again, PLAN))


LEFT = """
SCALE = __import__('numpy').zeros(1)
NET = nn.Linear(4, 1)
ADAM = torch.optim.Adam(NET.parameters())
FIRST = [p.detach().clone() for p in NET.parameters()]

class Scaled(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return X[index] + SCALE[0], X[index].sum()

def train(run):
    net, optimizer, data = nn.Linear(4, 1), None, DATA
    optimizer = torch.optim.SGD(net.parameters(), lr=run["learning_rate"])
    LINES
    run.prepare(net, optimizer)
    loader = DataLoader(data, **run.loader())
    for epoch in run.epochs():
        for batch in run.batches(loader):
            run.backward(loss_of(net, batch), optimizer)
        SCALE[0] += 1
    run.report(error=1.0)
"""


@pytest.mark.parametrize(
    ("lines", "knobs", "why"),
    [
        ("data = Scaled()", {}, "other samples than in an earlier training"),
        ("SCALE[0] = 0; data = Scaled()", {}, ""),
        ("X.sub_(1)", {}, ""),
        ("SCALE[0] = 0; data = Scaled()", {"num_workers": 1, "persistent_workers": True}, "after an epoch"),
        ("[p.data.copy_(v) for p, v in zip(NET.parameters(), FIRST)]; net, optimizer = NET, ADAM", {}, "the state of"),
        ("optimizer = torch.optim.LBFGS(net.parameters())", {}, "takes a closure"),
    ],
)
def test_what_a_training_leaves_behind_is_told(script: Any, lines: str, knobs: dict[str, Any], why: str) -> None:
    state = prepared(script(LEFT.replace("LINES", lines)), PLAN, micro_batch_size=16, **knobs)
    with pytest.raises(LoopError, match=why) if why else nullcontext():
        thrice(state)


def test_training_begins_with_the_first_values_of_its_module(script: Any) -> None:
    counts = "global BEST; BEST += 1; BANK[0] += 1; run.report(error=BEST + float(BANK[0]))"
    state = prepared(script(loop(f"{BACKWARD}\n        {counts}", head="BEST, BANK = 0.0, torch.zeros(2)\n")), PLAN)
    own_loop.train(state)
    own_loop.train(again := own_loop.prepare(state.resident, state.config, PLAN))
    assert again.last_report == state.last_report


@pytest.mark.parametrize("leaves", ["set_default_dtype(torch.float64)", "set_grad_enabled(False)"])
def test_setting_of_a_training_is_not_left_to_the_next(script: Any, leaves: str) -> None:
    once = f"SEEN or (torch.{leaves}, torch.set_num_threads(7)); SEEN.append('')"
    threads = torch.get_num_threads()
    state = prepared(script(loop(BACKWARD, net=f"{once}; {NET}")), PLAN)
    with pytest.raises(RuntimeError):  # float64 weights and float32 data, or no gradients
        own_loop.train(state)
    own_loop.train(own_loop.prepare(state.resident, state.config, PLAN))
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, threads)


TOKENS = """
class Tokens:
    def __iter__(self):
        return iter([[0, 1, 2], [3], [4, 5, 6, 7]])
    LENGTH

def train(run):
    SEEN.append(str(READS))
    data = [torch.ones(3 + i, 4) for i in range(8)]
    loader = DataLoader(data, batch_sampler=Tokens(), collate_fn=torch.cat, num_workers=run["num_workers"])
    net, optimizer = made(run)
    for batch in run.batches(loader):
        run.backward(net(batch).mean(), optimizer)
        if run.evaluate_now:
            SEEN.append(str(run.steps))
            run.report(error=1.0)
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [Plan(8, (8,)), Plan(20, (20,))])
def test_batches_of_tokens_are_counted_by_their_sampler(script: Any, workers: int, plan: Plan) -> None:
    length = "def __len__(self): return 3"
    workload = script(TOKENS.replace("LENGTH", length).replace("READS", "run.steps"))
    found = events(workload, plan, num_workers=workers)
    steps = {8: 3, 20: 8}[plan.samples]
    assert (found[-1].samples, workload.train.__globals__["SEEN"][1:]) == (plan.samples, [str(steps)] * 2)


def test_length_of_a_sampler_that_is_wrong_is_told_if_steps_go_by_it(script: Any) -> None:
    wrong = TOKENS.replace("LENGTH", "def __len__(self): return 2")
    with pytest.raises(LoopError, match="length of 2, and an epoch had 3"):
        events(script(wrong.replace("READS", "run.steps")), Plan(20, (20,)))
    events(script(wrong.replace("READS", "0").replace("str(run.steps)", "''")), Plan(20, (20,)))


def test_steps_of_a_sampler_without_a_length_are_not_known(script: Any) -> None:
    with pytest.raises(LoopError, match=r"run\.progress"):
        events(script(TOKENS.replace("LENGTH", "").replace("READS", "run.steps")), Plan(8, (8,)))
