"""A probe by a clock of its own: a workload that takes as long as its batches are wide, and what is found of it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.fakes import heard
from tests.trainables.test_own_loop import HEAD
from trainables import batches, loop
from trainables.stopwatch import Window
from tuning.workers.session import PROBE_WINDOW_S, Session, WorkerConfig
from tuning.workers.windows import Works, micro_steps

TIMED = '''
import time
from tests.fakes import Sums

class Timed(Sums):
    """Takes 10 ms and 2 ms a position of the padded batch, by the clock that the test has set."""

    def loss(self, model, batch):
        time.perf_counter.now += 0.01 + 0.002 * batch["values"].numel()
        return super().loss(model, batch)

WORKLOAD = Timed()
'''
KNOBS: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 16, "micro_batch_size": 4, "dropout": 0.0}


class Clock:
    """Seconds that pass only where somebody adds to them."""

    now = 0.0

    def __call__(self) -> float:
        """Returns the seconds."""
        return self.now


@pytest.fixture
def session_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a session of a file with this text, by such a clock."""

    def made(text: str, options: dict[str, Any] | None = None) -> Session:
        path = tmp_path / f"file_{abs(hash(text))}.py"
        path.write_text(text)
        session = Session(WorkerConfig(str(path), options or {}))
        if options:
            session.warm({})
        monkeypatch.setattr(time, "perf_counter", Clock())
        return session

    return made


@pytest.fixture
def session(session_of: Any) -> Session:
    return session_of(TIMED, {"count": 62})


def expected_step_s(session: Session, knobs: dict[str, Any]) -> float:
    """Returns the mean seconds of the whole micro-batches of the first epoch."""
    config = session.config(knobs)
    return 0.01 + 0.002 * Works(loop.prepare(session.resident, config, loop.Plan(64))).mean


@pytest.mark.parametrize("change", [{}, {"length_bucketing": True}, {"micro_batch_size": 8}, {"batch_size": 62}])
def test_a_probe_of_a_machine_at_rest_is_exact(session: Session, change: Any) -> None:
    knobs = {**KNOBS, **change}
    found = session.probe(knobs, time_s=3.0)
    assert found.micro_step_s == pytest.approx(expected_step_s(session, knobs))
    size, steps = knobs["batch_size"], math.ceil(knobs["batch_size"] / knobs["micro_batch_size"])
    assert found.samples_per_s == pytest.approx(size / (steps * found.micro_step_s + found.optimizer_step_s))


def test_a_probe_keeps_to_its_time_however_sure_it_is(session: Session) -> None:
    found = session.probe(KNOBS, time_s=2.0)
    assert found.end == "time"
    longest_window_s = PROBE_WINDOW_S + 4 * 0.01 + 0.002 * 16 * 9  # and one batch of the longest samples
    assert 2.0 - longest_window_s < found.wall_s <= 2.0


def test_a_probe_that_is_far_behind_ends_after_a_window(session: Session) -> None:
    rate = session.probe(KNOBS, time_s=3.0).samples_per_s
    behind = session.probe(KNOBS, time_s=3.0, best_samples_per_s=1.02 * rate)
    assert behind.end == "time", "its windows may be slow ones"
    hopeless = session.probe(KNOBS, time_s=60.0, best_samples_per_s=2.0 * rate)
    assert (hopeless.end, len(hopeless.windows)) == ("cannot win", 1)


def test_works_follow_the_run_from_epoch_to_epoch(session: Session) -> None:
    state = loop.prepare(session.resident, session.config(KNOBS), loop.Plan(200, window_s=0.0, each_step=True))
    works, seen = Works(state), 0

    def check(event: Any) -> None:
        nonlocal seen
        assert isinstance(event, Window)
        planned = works.before(event.micro_steps)
        seen += len(planned)
        for one, seconds in zip(planned, event.micro_steps_s, strict=True):
            assert seconds == pytest.approx(0.01 + 0.002 * one.work)
        assert [one.ends_batch for one in planned] == [False] * (len(planned) - 1) + [True]
        assert len(event.optimizer_steps_s) == event.steps == 1
        whole = [one.whole for one in planned]
        assert len(micro_steps(event, planned)) == sum(whole)
        assert all(whole) is (state.micro_batches_done < 16)  # 62 samples: the last batch has 14

    heard(state, check)
    assert seen > 3 * 16


def test_a_probe_waits_for_a_whole_batch(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.workers.session.PROBE_WINDOW_S", 0.0)  # a window is a step, the first of two samples
    found = session.probe({**KNOBS, "batch_size": 61, "micro_batch_size": 61}, time_s=0.1)
    assert (found.outcome, found.end, len(found.windows)) == ("ok", "time", 2)
    assert found.samples_per_s == pytest.approx(61 / (found.micro_step_s + found.optimizer_step_s))


BUCKETS = """
import time

BUCKETS = [range(4), range(4, 12), range(12, 28)]
TWO = [range(4), range(4, 8), range(8, 12), range(12, 28)]

def train(run):
    net, optimizer = made(run)
    for batch in run.batches(DataLoader(DATA, batch_sampler=SIZES), samples=28):
        time.perf_counter.now += 0.01
        run.backward(loss_of(net, batch), optimizer)
"""


@pytest.mark.parametrize(
    ("sizes", "first", "count"),
    [("BUCKETS", 4, 3), ("BUCKETS[::-1]", 16, 3), ("TWO", 4, 4), ("TWO[::-1]", 16, 4)],
)
def test_a_probe_of_batches_of_varying_size_has_the_speed_of_all(
    session_of: Any, sizes: str, first: int, count: int
) -> None:
    session = session_of(HEAD + BUCKETS.replace("SIZES", sizes))
    found = session.probe({"learning_rate": 0.1, "batch_size": first, "micro_batch_size": first}, time_s=3.0)
    assert found.outcome == "ok", found.message
    assert found.samples_per_s == pytest.approx(28 / (count * 0.01), rel=0.02)
    assert first / (found.micro_step_s + found.optimizer_step_s) == pytest.approx(found.samples_per_s)


def test_a_smaller_batch_at_the_end_of_each_pass_is_left_out(session_of: Any) -> None:
    session = session_of(HEAD + BUCKETS.replace("batch_sampler=SIZES), samples=28", "12)"))
    found = session.probe({"learning_rate": 0.1, "batch_size": 12, "micro_batch_size": 12}, time_s=3.0)
    assert found.outcome == "ok", found.message
    assert found.samples_per_s == pytest.approx(12 / 0.01), "64 samples: the last batch has 4"


COMPILING = '''
import time
import torch
from tests.fakes import Sums

def slow(graph, inputs):
    time.perf_counter.now += 100.0
    Compiling.graphs += 1
    return graph.forward

@torch.compile(backend=slow)
def error_of(predicted, target):
    return (predicted - target).square().mean()

class Compiling(Sums):
    """Takes 10 ms a micro-batch, and 100 s to compile its loss, for each new shape."""
    graphs = 0

    def loss(self, model, batch):
        time.perf_counter.now += 0.01
        return error_of(model(batch["values"]), batch["target"])

WORKLOAD = Compiling()
'''


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_what_a_workload_compiles_itself_is_no_part_of_its_speed(session_of: Any) -> None:
    session = session_of(COMPILING, {"count": 62})
    found = session.probe(KNOBS, time_s=150.0)
    assert found.outcome == "ok", found.message
    assert session.resident.workload.graphs == 2
    assert found.micro_step_s == pytest.approx(0.01)


FORKING = """
import time

class Loader:
    \"\"\"Takes 0.25 s to start its workers, in each pass or in the first one.\"\"\"
    batch_size, dataset, num_workers, begun = 8, DATA, 1, False

    def __init__(self, keeps):
        self.persistent_workers = keeps

    def __iter__(self):
        time.perf_counter.now += 0.0 if self.begun and self.persistent_workers else 0.25
        self.begun = True
        for batch in DataLoader(self.dataset, 8):
            time.perf_counter.now += 0.001
            yield batch

def train(run):
    net, optimizer = made(run)
    loader = Loader(run["persistent_workers"])
    PASSES
        time.perf_counter.now += 0.01
        run.backward(loss_of(net, batch), optimizer)
"""
ENDLESS = "for batch in run.batches(loader):"
PER_EPOCH = "for batch in (one for _ in run.epochs() for one in run.batches(loader)):"


@pytest.mark.parametrize("passes", [ENDLESS, PER_EPOCH])
@pytest.mark.parametrize("count", [64, 16_000])
def test_workers_that_start_in_each_pass_are_paid_for(session_of: Any, passes: str, count: int) -> None:
    more = f"DATA = torch.utils.data.TensorDataset(torch.randn({count}, 4), torch.randn({count}, 1))"
    session = session_of(HEAD + more + FORKING.replace("PASSES", passes))
    steps_s = {keeps: 0.011 * count / 8 + (0.0 if keeps else 0.25) for keeps in (True, False)}
    for keeps, pass_s in steps_s.items():
        own = {"learning_rate": 0.1, "batch_size": 8, "persistent_workers": keeps, "num_workers": 1}
        probe, window = session.probe(own, time_s=3.0), session.window(own, 1.0, seed=0)
        assert probe.outcome == "ok", probe.message
        assert probe.samples_per_s == pytest.approx(count / pass_s, rel=1e-3)
        assert window.samples_per_s == pytest.approx(count / pass_s, rel=1e-3)
        assert probe.micro_step_s + probe.optimizer_step_s == pytest.approx(0.011)


class Starting(DataLoader[Any]):
    """Takes 0.25 s more wherever its workers start."""

    def __iter__(self) -> Any:
        """Returns torch's own iterator."""
        time.perf_counter.now += 0.0 if self.persistent_workers and self._iterator else 0.25  # type: ignore[attr-defined]
        return super().__iter__()


@pytest.mark.parametrize("keeps", [True, False])
def test_our_loop_pays_for_workers_that_start_in_each_pass(
    session: Session, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(batches, "DataLoader", Starting)
    own = {**KNOBS, "batch_size": 62, "num_workers": 1, "persistent_workers": keeps}
    alone, pass_s = session.probe(KNOBS, time_s=3.0), 0.0 if keeps else 0.25
    probe, window = session.probe(own, time_s=3.0), session.window(own, 1.0, seed=0)
    assert probe.micro_step_s == pytest.approx(alone.micro_step_s, rel=0.01), "without a wait"
    assert probe.pass_s == pytest.approx(pass_s)
    steps_s = 16 * probe.micro_step_s + probe.optimizer_step_s
    assert probe.samples_per_s == pytest.approx(62 / (steps_s + pass_s))
    assert window.samples_per_s == pytest.approx(probe.samples_per_s, rel=0.1), "of other batches"
