"""A session: every ending of a trial is a result, and the next trial finds the process as it was."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import told
from trainables import loop
from trainables.plan import Plan
from trainables.ram_cache import CacheLimits
from tuning.memory import oom
from tuning.workers import machine
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

BROKEN = '''
import math
from tests.fakes import Sums

class Broken(Sums):
    options = {"poison": "", "count": 64}
    calls = 0
    armed = True

    def loss(self, model, batch):
        """Fails in the way the option names, from its fourth call on."""
        Broken.calls += 1
        loss = super().loss(model, batch)
        if Broken.calls % 8 < 4 or not self.armed:
            return loss
        if self.poison == "nan":
            return loss * math.nan
        if self.poison == "value":
            raise ValueError("shapes do not match")
        return loss

    def dataset(self, config, split):
        """Remembers how to fail."""
        self.poison = config.options["poison"]
        return super().dataset(config, split)

WORKLOAD = Broken()
'''


WIDE = """
import torch
from tests.fakes import Sums

class Wide(Sums):
    def model(self, config):
        '''Returns layers whose gradients are a good part of what a step needs.'''
        wide = [torch.nn.Linear(9, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
        return torch.nn.Sequential(*wide, torch.nn.Linear(256, 1))

    def collate(self, samples):
        '''Returns nine numbers of each sample, whatever its length.'''
        values = torch.zeros(len(samples), 9)
        for row, (own, _) in zip(values, samples):
            row[: len(own)] = own
        return {"values": values, "target": torch.stack([t for _, t in samples])}

    def loss(self, model, batch):
        return (model(batch["values"]).squeeze(1) - batch["target"]).square().mean()

WORKLOAD = Wide()
"""


@pytest.fixture
def session_of(tmp_path: Path) -> Any:
    """Returns a session of a file with this text."""

    def made(text: str, options: dict[str, Any] | None = None, **more: Any) -> Session:
        path = tmp_path / f"file_{abs(hash(text))}.py"
        path.write_text(text)
        return Session(WorkerConfig(str(path), options or {}, **more))

    return made


@pytest.fixture
def broken(session_of: Any) -> Any:
    return lambda poison: session_of(BROKEN, {"poison": poison})


KNOBS = {"learning_rate": 0.05, "batch_size": 16, "micro_batch_size": 4, "dropout": 0.0}
PLAN = Plan(samples=64, milestones=(32, 64))


def test_a_trial_pauses_between_milestones_where_it_is_asked_to_and_learns_the_same(broken: Any) -> None:
    plan = Plan(samples=64, milestones=(32, 64), window_s=0.0)
    expected = [state.values for state in told(broken(""), KNOBS, plan)]
    found = told(broken(""), KNOBS, plan, pause_after_s=1e-9)
    paused = [one for one in found if not one.values]
    assert len(paused) >= 2
    assert all(0 < one.samples < 64 and one.outcome == "ok" for one in paused)
    assert [one.values for one in found if one.values] == expected


@pytest.mark.parametrize(
    ("poison", "outcome", "says"),
    [
        ("nan", "diverged", "loss is nan"),
        ("value", "crash", "ValueError: shapes do not match"),
    ],
)
def test_an_error_is_a_result_and_the_next_trial_is_unharmed(broken: Any, poison: str, outcome: str, says: str) -> None:
    session = broken(poison)
    found = session.train(KNOBS, PLAN, seed=0, shrink="")
    assert (found.outcome, found.done, bool(found.retire)) == (outcome, True, outcome == "crash")
    assert says in found.message
    session.resident.workload.armed = False
    assert session.train(KNOBS, PLAN, seed=0).outcome == "ok"


def test_an_oom_halves_the_micro_batch_and_keeps_the_batch(broken: Any) -> None:
    session = broken("")
    need = session.train(KNOBS, PLAN, 0).peak_allocated_bytes
    large = session.train({**KNOBS, "micro_batch_size": 16}, PLAN, 0).peak_allocated_bytes
    assert need < large
    plan = Plan(64, (64,), cap_bytes=(need + large) // 2)
    found = session.train({**KNOBS, "micro_batch_size": 16}, plan, 0)
    assert found.outcome == "ok"
    assert found.knobs["micro_batch_size"] < 16
    assert found.knobs["batch_size"] == 16
    assert found.retries[0].knobs["micro_batch_size"] == 16


def test_a_trial_that_fits_at_no_micro_batch_ends_as_oom(broken: Any) -> None:
    found = broken("").train(KNOBS, Plan(64, (64,), cap_bytes=1), 0)
    assert found.outcome == "oom"
    assert [o.knobs["micro_batch_size"] for o in found.retries] == [4, 2]


@pytest.mark.parametrize("shrink", ["", "loader", "all"])
def test_a_trial_goes_on_without_a_cache_that_does_not_fit_and_a_probe_says_so(broken: Any, shrink: Any) -> None:
    session = broken("")
    session.resident.cache_limits = CacheLimits(lambda: 0.0)
    knobs = {**KNOBS, "ram_cache": True}
    assert session.probe(knobs, 0.1).outcome == "host_oom"
    found = session.train(knobs, Plan(64, (64,)), seed=0, shrink=shrink)
    assert (found.outcome, found.knobs["ram_cache"]) == ("ok", False)
    assert [(r.fault, r.knobs["ram_cache"]) for r in found.retries] == [("RAM cache", True)]


HANGS = """
import threading
import torch
from tests.fakes import Sums

class Hanging(Sums):
    def collate(self, samples):
        if torch.utils.data.get_worker_info() is not None:
            threading.Event().wait()
        return super().collate(samples)

WORKLOAD = Hanging()
"""


def test_a_trial_whose_loader_hangs_says_so_in_time_and_goes_on_with_fewer_processes(session_of: Any) -> None:
    session = session_of(HANGS, {"count": 64}, hang_s=1.0)
    first, last = told(session, {**KNOBS, "num_workers": 1}, Plan(64, (64,)), pause_after_s=0.5)
    assert (first.values, first.done, first.samples, first.knobs["num_workers"]) == ({}, False, 0, 0)
    assert (last.outcome, last.done) == ("ok", True)
    (restart,) = last.retries
    assert (restart.fault, restart.knobs["num_workers"]) == ("loader process hung", 1)
    assert "DataLoader timed out after 0.75 seconds" in restart.message


@pytest.mark.parametrize(("hang_s", "silent_s"), [(60.0, 45.0), (3600.0, 120.0)])
def test_a_loader_is_taken_for_hung_before_its_process_is(hang_s: float, silent_s: float, session_of: Any) -> None:
    assert session_of(HANGS, hang_s=hang_s).config(KNOBS).loader_timeout_s == silent_s


def test_a_validation_split_that_does_not_fit_is_read_as_it_is(broken: Any) -> None:
    session, allowed = broken(""), iter([math.inf])
    session.resident.cache_limits = CacheLimits(lambda: next(allowed, 0.0))
    found = session.train({**KNOBS, "ram_cache": True}, PLAN, seed=0)
    assert (found.outcome, found.knobs["ram_cache"], found.retries) == ("ok", True, ())
    assert found.active["samples_in_ram"] is True


def test_a_probe_leaves_room_for_the_cache_of_every_slot(monkeypatch: pytest.MonkeyPatch, session_of: Any) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100_000)
    session = session_of(BROKEN, {"poison": ""}, slots=100)
    knobs = {**KNOBS, "ram_cache": True}
    assert session.probe(knobs, 0.1).outcome == "host_oom"
    assert session.train(knobs, PLAN, seed=0).knobs["ram_cache"] is True


LATE = WIDE.replace(
    "class Wide",
    """class Late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ones", None)

    def forward(self, values):
        if self.ones is None:
            self.ones = torch.ones(1)
        return values * self.ones

class Wide""",
).replace("Sequential(", "Sequential(Late(), ")


def test_a_model_that_is_made_anew_is_not_measured_beside_the_old_one(session_of: Any) -> None:
    peaks = []
    for text in (WIDE, LATE):
        found = session_of(text).footprint(KNOBS, (2, 4))
        peaks.append(found.measured[1][1])
    assert peaks[0] < peaks[1] < peaks[0] + found.parameter_bytes // 2


TOO_LARGE = """
import torch
from tests.fakes import Sums

class TooLarge(Sums):
    def model(self, config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

WORKLOAD = TooLarge()
"""


def test_a_model_that_does_not_fit_is_a_footprint_of_nothing_and_ends_no_study(session_of: Any) -> None:
    found = session_of(TOO_LARGE).footprint(KNOBS, (2, 4))
    assert (found.measured, found.parameter_bytes) == ((), 0)
    assert "CUDA out of memory" in found.message


@pytest.mark.parametrize("micro_batch", [4, 512])
def test_a_batch_of_one_micro_step_needs_less_by_the_gradients(session_of: Any, micro_batch: int) -> None:
    session = session_of(WIDE, {"count": 2048}, cap_bytes=10**9)
    knobs = {"learning_rate": 1e-4, "micro_batch_size": micro_batch, "dropout": 0.0}
    found = session.footprint(knobs, (micro_batch,))
    plan = Plan(samples=4 * micro_batch, milestones=(4 * micro_batch,), cap_bytes=10**9)
    several, alone = (
        session.train({**knobs, "batch_size": size}, plan, 0).peak_allocated_bytes
        for size in (2 * micro_batch, micro_batch)
    )
    assert several == pytest.approx(found.measured[0][1], rel=0.01)
    assert alone == pytest.approx(found.measured_alone[0][1], rel=0.01)
    assert (several - alone > 0.5 * found.gradient_bytes) == (micro_batch == 512), "the optimiser's step needs more"


UNDEFINED = """
from tests.fakes import Sums

class Undefined(Sums):
    objectives = {"val_loss": "min"}

    def evaluate(self, model, batches):
        return {"val_loss": super().evaluate(model, batches)["error"] * float("nan")}

WORKLOAD = Undefined()
"""


def test_an_objective_that_is_undefined_before_training_is_not_taken_for_the_loss(session_of: Any) -> None:
    assert session_of(UNDEFINED).sanity_check(KNOBS).values == {}


def test_an_objective_that_is_undefined_in_a_trial_is_said_once_with_what_to_do(session_of: Any) -> None:
    found = session_of(UNDEFINED).train(KNOBS, PLAN, 0)
    assert (found.outcome, found.fault) == ("diverged", oom.UNDEFINED.name)
    assert re.match(r"val_loss is nan after \d+ samples: mend how .* `evaluate` returns", found.message)


def test_the_untrained_model_is_that_of_the_seed_of_a_training_before_its_first_step(broken: Any) -> None:
    session = broken("")
    untrained = session.sanity_check(KNOBS).values
    config = session.config(KNOBS)
    whole = loop.prepare(session.resident, config, Plan(samples=8))
    assert untrained == pytest.approx(loop.evaluate(whole, whole.model).values)
    assert session.sanity_check(KNOBS).values == untrained, "nothing is learned meanwhile"
    assert session.train(KNOBS, Plan(samples=64, milestones=(64,)), 0).values["error"] < untrained["error"]


def test_every_measurement_has_its_spans_what_was_active_and_what_the_machine_did(broken: Any) -> None:
    session, asked = broken(""), {**KNOBS, "fused_optimizer": True}
    found = [session.probe(asked, 0.5, 0.03), session.window(asked, 0.2, seed=0), session.train(asked, PLAN, 0)]
    for one in found:
        spans, telemetry = one.spans, one.telemetry
        parts = sum(spans[f"{name}_s"] for name in ("data_wait", "transfer", "forward_backward", "optimizer"))
        assert 0 < parts <= spans["wall_s"] * 1.001
        assert spans["micro_steps"] >= 4 * spans["steps"] > 0
        assert telemetry["readings"] >= 1
        assert "gpu_sm_frac" not in telemetry
        assert one.active["optimizer_ops"] == ["aten._fused_adamw_"]


def test_the_telemetry_of_a_trial_is_its_own(broken: Any) -> None:
    session = broken("")
    session.probe(KNOBS, 0.5, 0.0)
    first = session.train(KNOBS, PLAN, 0)
    assert session.train(KNOBS, PLAN, 0).telemetry["readings"] == first.telemetry["readings"] <= 4
