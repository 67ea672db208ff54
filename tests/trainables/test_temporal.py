"""The temporal workload: three models on windows of market bars, its options, and rules that need no network."""

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fakes import heard
from trainables.data.errors import DataError
from trainables.knobs import Knobs
from trainables.loop import Evaluation, prepare
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, WorkloadError
from trainables.workloads import temporal
from trainables.workloads.temporal import Temporal

pytestmark = pytest.mark.workload

KINDS = ("lstm", "transformer", "mlp")


def bars_file(path: Path, count: int = 1200, step: str = "1h") -> Path:
    """Returns a file of bars that are wild in even spells of 12 and calm in odd ones.

    What follows is clear but for decisions near the middle of a spell, before and after which half is wild.
    """
    random = np.random.default_rng(0)
    wild = (np.arange(count) // 12) % 2 == 0
    close = np.exp(np.cumsum(np.where(wild, 0.01, 0.001) * random.standard_normal(count)))
    times = np.datetime64("2024-01-01T00:00") + np.arange(count) * np.timedelta64(int(step[:-1]), step[-1])
    lines = [f"{t},{c},{c * 1.001},{c * 0.999},{c},{v}" for t, c, v in zip(times, close, wild + 1, strict=True)]
    path.write_text("time,open,high,low,close,volume\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options for a small file with three frames."""
    path = bars_file(tmp_path_factory.mktemp("bars") / "spells.csv")
    return {"data": str(path), "timeframes": "1h:14 4h:4 1D:2"}


@pytest.fixture(scope="module")
def resident():
    return Resident(Temporal())


def config(options: dict[str, Any], seed: int = 0, **knobs: Any) -> Config:
    values = {"hidden_size": 16, "batch_size": 32, "micro_batch_size": 32, "learning_rate": 3e-3, "dropout": 0.0}
    return Config(Knobs.of({**values, **knobs}, EVERY), options, seed)


def logits(model: nn.Module, windows: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(windows)


def test_the_default_data_is_real_and_splits_by_time():
    workload = Temporal()
    for path in (None, temporal.STOCKS_FILE):
        asked = Config(options={"data": None if path is None else str(path)})
        train_part, val_part = workload.part(asked, "train"), workload.part(asked, "val")
        assert len(train_part.labels) > 2 * len(val_part.labels) > 3000
        assert train_part.decided_us.max() < val_part.decided_us.min()
        assert train_part.windows.shape[1:] == (sum(f.window for f in workload.frames(asked)), 4)
        assert 0.4 < val_part.labels.mean() < 0.6
    assert [f.name for f in workload.frames(asked)] == ["1D", "1W", "1M"]


def test_without_the_package_the_embedded_stocks_are_read(monkeypatch):
    def gone(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", gone)
    asked = Config()
    assert [f.name for f in Temporal().frames(asked)] == ["1D", "1W", "1M"]


def test_frames_follow_the_data_unless_they_are_given(tmp_path, options):
    workload = Temporal()
    quarter = str(bars_file(tmp_path / "quarter.csv", 4000, "15m"))
    assert [f.name for f in workload.frames(config({"data": quarter}))] == ["1h", "4h", "1D"]
    assert [f.name for f in workload.frames(config(options))] == ["1h", "4h", "1D"]
    daily = str(bars_file(tmp_path / "daily.csv", 900, "24h"))
    assert [f.name for f in workload.frames(config({"data": daily}))] == ["1D", "1W", "1M"]
    with pytest.raises(WorkloadError, match=r"timeframes=4h:6: .*4h.* bars of 24 h"):
        workload.frames(config({"data": daily, "timeframes": "4h:6"}))
    with pytest.raises(WorkloadError, match=r"workload\.timeframes: 'hourly'"):
        workload.frames(config({"data": daily, "timeframes": "hourly"}))
    with pytest.raises(DataError, match="short: found 30 bars"):
        workload.frames(config({"data": str(bars_file(tmp_path / "short.csv", 30))}))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_what_can_be_known(options, resident, kind):
    asked = config(options, architecture=kind)
    state = prepare(resident, asked, Plan(samples=2000, milestones=(2000,)))
    (result,) = [event for event in heard(state) if isinstance(event, Evaluation)]
    assert result.values["accuracy"] > 0.78


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_judged_alone_and_by_every_frame(options, kind):
    torch.manual_seed(0)
    workload = Temporal()
    model = workload.model(config(options, architecture=kind))
    windows = torch.randn(5, 20, 4, requires_grad=True)
    found = logits(model, windows)
    assert found.shape == (5, 2)
    for i in range(5):
        assert torch.allclose(logits(model, windows[i : i + 1])[0], found[i], atol=1e-5)
    model.eval()(windows).sum().backward()
    assert (windows.grad.abs().sum(dim=2) > 0).all()  # no bar of no frame is passed over


def test_a_transformer_has_whole_heads(options):
    with pytest.raises(WorkloadError, match=r"hidden_size=40: a transformer needs a multiple of 16"):
        Temporal().model(config(options, architecture="transformer", hidden_size=40))


def test_rules_are_named_and_know_their_data(options, tmp_path):
    found = {name: v["accuracy"] for name, v in Temporal().baselines(config(options)).items()}
    assert list(found) == ["majority class", "last known label", "hour of day", "logistic regression"]
    assert 0.5 <= found["majority class"] < 0.6
    assert found["last known label"] > 0.8  # spells of 12 take turns: always the opposite
    assert found["hour of day"] > 0.8  # and two of them are a day
    daily = str(bars_file(tmp_path / "daily.csv", 900, "24h"))
    assert "weekday" in Temporal().baselines(config({"data": daily}))
