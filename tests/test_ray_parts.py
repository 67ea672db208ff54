"""The parts for Ray Tune scripts: an OOM is a result, what cannot fit is not started, and a search is restored."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from torch import nn

from tests.commands import ROOT
from tuning.config.errors import ConfigError
from tuning.ray import KnownSpeedSearcher, OomAwareScheduler, measured, report
from tuning.ray.measuring import measure
from tuning.ray.spaces import TuneSpace
from tuning.ray.training import StepMeter, parts_of
from tuning.workers.ray_cluster import RayCluster

MIB = 2**20
CAP_BYTES = 400 * 1024
"""A third of the cells, those of width 512, need 434 KiB and more."""
SPACE: dict[str, Any] = {
    "lr": tune.loguniform(1e-4, 1e-1),
    "batch_size": tune.choice([8, 32, 128]),
    "width": tune.choice([16, 64, 512]),
}
TODAY = {"lr": 1e-2, "batch_size": 8, "width": 64}


def train(config: dict[str, Any]) -> None:
    """Three epochs of 256 samples; a `leak` in MiB is held from the second epoch on."""
    torch.manual_seed(0)
    x, held = torch.randn(256, 32), []
    model = nn.Sequential(nn.Linear(32, config["width"]), nn.ReLU(), nn.Linear(config["width"], 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(3):
        for batch in torch.arange(256).split(config["batch_size"]):
            optimizer.zero_grad()
            loss = (model(x[batch]) - x[batch].sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        held += [torch.empty(int(config.get("leak", 0)) * MIB // 4)] if epoch else []
        report({"loss": loss.item()})


def searcher(**more: Any) -> KnownSpeedSearcher:
    return KnownSpeedSearcher(SPACE, "loss", "min", reference=TODAY, **more)


@pytest.fixture(scope="module")
def lines() -> bytes:
    """What was measured of `train` on the emulated card, in this process."""
    return measured_here(SPACE, TODAY)


def steady(config: dict[str, Any]) -> None:
    train({**config, "leak": 0})


def measured_here(space: dict[str, Any], today: dict[str, Any], function: Any = train) -> bytes:
    parsed = TuneSpace.parse(space, (), ())
    study = {"objectives": {"loss": "min"}, "knobs": parsed.space.table.as_raw(), "config": {}}
    return measure(function, CAP_BYTES, parsed, study, parsed.knobs(today), 300.0)


def result(own: KnownSpeedSearcher, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The last result of a trial that came to its end: speed and peak of its probe, the loss by its learning rate."""
    sizes = (config["batch_size"], config["width"])
    probe = next(p for p in own.journal.run.probes if (p.config["batch_size"], p.config["width"]) == sizes)
    measured_of = {"samples_per_s": probe.samples_per_s, "peak_bytes": probe.peak_allocated_bytes}
    told = {"loss": abs(config["lr"] - 1e-2), **measured_of, "outcome": "ok"}
    return {**told, "training_iteration": 3, "time_total_s": 1.0, "done": True, **more}


def test_what_cannot_fit_is_not_suggested_and_what_is_suggested_is_faster(lines: bytes) -> None:
    own = searcher(pick={"tolerance": 0.01})
    own.learn(lines)
    suggested = list[dict[str, Any]]()
    while len(suggested) < 12 and (config := own.suggest(f"id{len(suggested)}")) != "FINISHED":
        own.on_trial_complete(f"id{len(suggested)}", result(own, config))
        suggested.append({name: config[name] for name in SPACE})
    speeds = {(p.config["batch_size"], p.config["width"]): p.samples_per_s or 0.0 for p in own.journal.run.probes}
    assert suggested[0] == TODAY
    assert len(suggested) > 4
    assert all(speeds[one["batch_size"], one["width"]] > speeds[8, 64] for one in suggested[1:])
    assert all(one["width"] < 512 for one in suggested)
    best = own.best
    assert best.value <= 0.01
    assert best.samples_per_s >= (best.reference_per_s or 0.0) > 0


def test_one_lucky_training_among_worse_is_not_the_best(lines: bytes) -> None:
    own = searcher()
    own.learn(lines)
    for number in range(10):
        config = own.suggest(f"id{number}")
        loss = {0: 1.0, 7: 0.99}.get(number, 1.2 if number % 2 else 1.1)
        own.on_trial_complete(f"id{number}", result(own, config, loss=loss))
    assert own.best is not None
    assert {name: own.best.config[name] for name in TODAY} == TODAY


def test_the_cells_that_are_refused_are_those_that_run_out_of_memory(lines: bytes) -> None:
    own = searcher()
    own.learn(lines)
    refused = {(int(one.config["batch_size"]), one.config["width"]) for one in own.journal.run.refused}
    cells = [(batch, width) for batch in (8, 32, 128) for width in (16, 64, 512)]
    unfit = set()
    for batch, width in cells:
        with StepMeter(CAP_BYTES, is_over=lambda meter: False):  # a probe's: it reports nothing
            try:
                train({"lr": 1e-2, "batch_size": batch, "width": width})
            except torch.OutOfMemoryError:
                unfit.add((batch, width))
    assert unfit
    assert refused == unfit


def test_an_oom_is_a_constraint_with_its_bytes(lines: bytes) -> None:
    own = searcher()
    own.learn(lines)
    own.on_trial_complete("id0", result(own, own.suggest("id0")))
    config = own.suggest("id1")
    oom = {"loss": float("nan"), "outcome": "oom", "wanted_bytes": 5 * MIB, "message": "out of memory"}
    own.on_trial_complete("id1", result(own, config, **oom))
    end = own.journal.run.ended[-1]
    assert (end.outcome, end.wanted_bytes, end.cap_bytes) == ("oom", 5 * MIB, CAP_BYTES)
    seen = {config["batch_size"], config["width"]}
    for number in range(2, 12):
        later = own.suggest(f"id{number}")
        if later == "FINISHED":
            break
        assert not (later["width"] == config["width"] and later["batch_size"] >= config["batch_size"]), seen
        own.on_trial_complete(f"id{number}", result(own, later))


def test_a_restored_search_goes_on_as_it_would_have(lines: bytes, tmp_path: Path) -> None:
    own = searcher()
    own.learn(lines)
    for number in range(3):
        own.on_trial_complete(f"id{number}", result(own, own.suggest(f"id{number}")))
    running = own.suggest("id3")
    own.save(str(tmp_path / "state"))
    other = searcher()
    other.restore(str(tmp_path / "state"))
    copied = pickle.loads(pickle.dumps(own))  # noqa: S301
    ends = result(own, running)
    for one in (own, other, copied):
        one.on_trial_complete("id3", ends)
    suggested = [one.suggest("id4") for one in (own, other, copied)]
    assert suggested[0] == suggested[1] == suggested[2]
    assert len(other.journal.run.trials) == len(own.journal.run.trials)


def test_a_trial_stops_where_it_is_behind_or_slow_and_at_its_end(lines: bytes) -> None:
    own = searcher(pick={"tolerance": 0.01})
    own.learn(lines)
    assert OomAwareScheduler(own, max_t=9, grace_period=3).metric is None
    *ended, behind, slow = configs = [own.suggest(f"id{number}") for number in range(7)]
    assert "FINISHED" not in configs
    for number, config in enumerate(ended):
        rung = result(own, config, loss=0.5 + 0.01 * number, training_iteration=3, done=False)
        assert own.goes_on(f"id{number}", rung)
        assert own.goes_on(f"id{number}", {**rung, "training_iteration": 4})
        end = {**rung, "loss": 0.1 + 0.01 * number, "training_iteration": 9}
        assert not own.goes_on(f"id{number}", end)
        own.on_trial_complete(f"id{number}", {**end, "done": True})
    last = {"training_iteration": 3, "done": False}
    assert not own.goes_on("id5", result(own, behind, loss=9.0, **last))
    assert not own.goes_on("id6", result(own, slow, loss=0.1, **last, samples_per_s=1.0))
    assert own.goes_on("id6", {**result(own, slow), "outcome": "oom"}), "it ends by itself"
    for number, config in ((5, behind), (6, slow)):
        own.on_trial_complete(f"id{number}", result(own, config, **last) | {"done": True})
    outcomes = {end.trial: end.outcome for end in own.journal.run.ended}
    assert list(outcomes.values()) == ["ok"] * 5 + ["stopped"] * 2
    assert "slower than the best" in own.journal.run.ended[-1].message


@pytest.mark.parametrize(
    ("space", "more", "said"),
    [
        ({}, {}, "nothing to search"),
        ({"lr": tune.qloguniform(1e-4, 1e-1, 1e-4)}, {}, "lr=.* is drawn in a way"),
        ({"width": [16, "wide"]}, {}, "width=.*must be numbers, or texts"),
        ({"lr": [0.1, 0.1]}, {}, "listed twice"),
        (SPACE, {"learning": ("widht",)}, "names widht, which the space lacks"),
        (SPACE, {"reference": {"widht": 3}}, "names widht, which the space lacks"),
        (SPACE, {"reference": {"width": "wide"}}, "reference=.*wide"),
        (SPACE, {"pick": {"tolerence": 0.1}}, "no setting pick.tolerence"),
        (SPACE, {"pick": {"goal": "fast"}}, "pick.goal=fast is not allowed"),
    ],
)
def test_what_cannot_be_searched_is_said_once(space: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        KnownSpeedSearcher(space, "loss", "min", **more)
    assert raised.value.remedy


def test_what_is_used_wrongly_is_said_once(lines: bytes) -> None:
    with pytest.raises(ConfigError, match="outside of a measured function"):
        report({"loss": 1.0})
    with pytest.raises(ConfigError, match="cap_bytes=0"):
        measured(train, metric="loss", cap_bytes=0)
    with pytest.raises(ConfigError, match="metric=''"):
        measured(train)
    with pytest.raises(ConfigError, match="no function"):
        measured(3, metric="loss")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"metric='gain'.*the searcher has 'loss'"):
        searcher().measure(measured(train, metric="gain"))
    with pytest.raises(ConfigError, match="'train' is not measured"):
        parts_of(train)
    with pytest.raises(ConfigError, match="nothing was measured"):
        searcher().suggest("id0")
    with pytest.raises(ConfigError, match="mode='most'"):
        KnownSpeedSearcher(SPACE, "loss", "most")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_t=0"):
        OomAwareScheduler(searcher(), max_t=0)
    wide = {"lr": 1e-2, "batch_size": 8, "width": 512}
    with pytest.raises(ConfigError, match=r"the reference .*512.* could not be measured: .*P\(OOM\)"):
        KnownSpeedSearcher(SPACE, "loss", "min", reference=wide).learn(measured_here(SPACE, wide))
    with pytest.raises(ConfigError, match="ended before two optimiser steps"):
        searcher().learn(measured_here(SPACE, TODAY, lambda config: None))
    own = searcher()
    own.learn(lines)
    own.suggest("id0")
    with pytest.raises(ConfigError, match="a result has no outcome"):
        own.on_trial_complete("id0", {"loss": 1.0, "training_iteration": 1})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with RayCluster(cores=2, gpus=0, dashboard=False):
        yield


class Ends(tune.Callback):
    """Ends the driver once, at the first result of the second trial; a file says that it has."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        if len(trials) > 1 and not self.file.exists():
            self.file.touch()
            raise RuntimeError("the driver ends")


def tuner(trainable: Any, own: KnownSpeedSearcher, folder: Path, trials: int, *callbacks: Any) -> tune.Tuner:
    return tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=own,
            scheduler=OomAwareScheduler(own, max_t=3),
            num_samples=trials,
            max_concurrent_trials=1,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="parts", storage_path=str(folder), verbose=0, callbacks=[*callbacks]),
    )


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cluster")
def test_an_oom_that_no_probe_could_see_ends_its_trial_and_not_its_actor(tmp_path: Path) -> None:
    space = {**SPACE, "leak": [0, 4]}
    own = KnownSpeedSearcher(space, "loss", "min", reference={**TODAY, "leak": 4})
    trainable = measured(train, metric="loss", cap_bytes=CAP_BYTES)
    own.learn(measured_here(space, {**TODAY, "leak": 4}, steady))
    results = tuner(trainable, own, tmp_path, 3).fit()
    assert results.num_errors == 0
    told = [one.metrics or {} for one in results]
    ooms = [one for one in told if one["outcome"] == "oom"]
    assert ooms[0]["requested_bytes"] == 4 * MIB
    assert ooms[0]["wanted_bytes"] > CAP_BYTES > ooms[0]["held_bytes"]
    assert {one["pid"] for one in told} == {told[0]["pid"]}
    assert sum(end.outcome == "oom" for end in own.journal.run.ended) == len(ooms)


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cluster")
def test_tune_restores_an_experiment(tmp_path: Path, lines: bytes) -> None:
    own = searcher()
    own.learn(lines)
    trainable = measured(train, metric="loss", cap_bytes=CAP_BYTES)
    with pytest.raises(tune.TuneError, match="the driver ends"):
        tuner(trainable, own, tmp_path, 4, Ends(tmp_path / "ended")).fit()
    results = tune.Tuner.restore(str(tmp_path / "parts"), trainable=trainable).fit()
    assert len(results) == 4
    assert results.num_errors == 0
    assert all((one.metrics or {})["training_iteration"] == 3 for one in results)
    after = searcher()
    after.restore_from_dir(str(tmp_path / "parts"))
    assert [end.outcome for end in after.journal.run.ended] == ["ok"] * 4
    assert after.best is not None


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cluster")
def test_the_example_kills_no_actor_and_starts_nothing_that_cannot_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope: dict[str, Any] = {"__name__": "my_tune"}
    exec((ROOT / "tuning" / "examples" / "my_tune.py").read_text(encoding="utf-8"), scope)  # noqa: S102
    results, own = scope["main"](trials=5, measure_s=20.0, storage_path=str(tmp_path))
    assert results.num_errors == 0
    assert {(one.metrics or {})["outcome"] for one in results} == {"ok"}
    assert own.best.samples_per_s >= own.best.reference_per_s
    assert " trials, 0 with an error" in capsys.readouterr().out
