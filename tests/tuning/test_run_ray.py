"""The main job on a user's own workload, with Ray: every output, both strategies, loopback only, warm actors."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.commands import MINE, run
from tuning.journal.records import read, trials
from tuning.report.export import read_best
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.workers.ray_tune import RayCluster, RayExecutor
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
QUICK = [
    f"workload={MINE}",
    "name=one",
    "search.trials=6",
    "budget.train_epochs=2",
    "budget.probe.max_time_s=3",
    "budget.probe.probe_time_s=0.3",
    "budget.confirm.window_s=0.1",
    "budget.confirm.seeds=2",
]


@pytest.mark.parametrize("strategy", ["staged", "joint"])
def test_a_study_from_command_line_to_best_yaml_and_a_training_from_it(tmp_path: Path, strategy: str) -> None:
    assert run("tuning.run", [*QUICK, f"search.strategy={strategy}"], tmp_path) == 0, (tmp_path / "err").read_text()
    folder = tmp_path / "runs" / "mine" / "one"
    for name in ("trials.jsonl", "config.yaml", "best.yaml", "front.csv", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    assert "command line" in (folder / "config.yaml").read_text()
    best = read_best(folder / "best.yaml")
    assert not best.warnings
    assert best.measured["samples_per_s"]["status"] == "confirmed"
    assert len(best.measured["samples_per_s"]["windows"]) >= 5
    records, _ = read(folder / "trials.jsonl")
    events = {r.event for r in records}
    assert ("probe" in events) == (strategy == "staged")
    assert {t.outcome for t in trials(records)} <= {"ok", "stopped"}
    shown = (tmp_path / "out").read_text()
    assert " before" in shown
    assert "\x1b" not in shown + (tmp_path / "err").read_text()

    assert run("tuning", ["train", "--from", str(folder / "best.yaml"), "--json"], tmp_path) == 0
    result = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert result["samples"] >= best.samples
    again = yaml.safe_load((folder / "best.yaml").read_text())
    low, high = again["measured"]["quality"]["accuracy"]["interval"]
    assert low <= result["values"]["accuracy"] <= high

    assert run("tuning", ["ablate", "one", "--rounds", "2", "--window", "0.05", "--json"], tmp_path) == 0
    receipts = json.loads((tmp_path / "out").read_text().splitlines()[-1])["receipts"]
    assert receipts
    assert all(r["gain"]["ratio"] > 0 for r in receipts)
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_one_trial_at_a_time_needs_no_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise RuntimeError('Ray was imported')")  # the working folder comes first
    assert run("tuning.run", [*QUICK, "concurrency=1"], tmp_path) == 0, (tmp_path / "err").read_text()
    assert read_best(tmp_path / "runs" / "mine" / "one" / "best.yaml").measured["samples_per_s"]["windows"]


@pytest.mark.parametrize("option", ["data=nothing.jsonl", "layers=0", "model=nowhere/at-all", "val_frac=2"])
def test_a_bad_option_is_one_error_and_writes_nothing(tmp_path: Path, option: str) -> None:
    code = run("tuning.run", ["workload=nli", f"workload.{option}"], tmp_path)
    err = (tmp_path / "err").read_text()
    assert code == 2
    assert err.startswith(f"error: workload.{option}")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 8
    assert not (tmp_path / "runs").exists()


class OneSlot:
    """A scheduler with six trials: two that need more than the cap, one that crashes its process' workload."""

    def __init__(self) -> None:
        small, large = {"micro_batch_size": 4}, {"micro_batch_size": 64, "batch_size": 64}
        self._left = [large, small, large, small, small, small]
        self.found: list[dict[str, object]] = []
        self.decisions: list[tuple[str, str, str]] = []

    def next_trial(self) -> TrialRequest | None:
        """Returns the next one."""
        return TrialRequest(f"t{len(self.found)}", self._left.pop(0), 0) if self._left else None

    def at_rung(self, trial: str, result: object) -> bool:
        """Lets everyone go on."""
        return True

    def goes_on(self, trial: str, result: object) -> bool:
        """Lets everyone go on."""
        return True

    def ended(self, trial: str, result: dict[str, object] | None) -> None:
        """Keeps what came."""
        self.found.append(dict(result or {}))

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Keeps what the backend did."""
        self.decisions.append((event, trial, reason))


def _listening(process: psutil.Process) -> set[Any]:
    """Returns where a process listens; nowhere where it has ended meanwhile, as some of Ray's helpers do."""
    try:
        return {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    except psutil.NoSuchProcess:
        return set()


def test_one_cluster_is_on_loopback_asks_for_its_token_and_keeps_its_actors_through_ooms() -> None:
    with RayCluster(cores=2, gpus=0, dashboard=True) as cluster:
        assert stat.S_IMODE(cluster.token_path.stat().st_mode) == 0o600
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        listening = {at for process in family for at in _listening(process)}
        assert listening
        assert {address.ip.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}
        for token, code in ((None, 401), (cluster.token_path.read_text(), 200)):
            assert status(f"{cluster.dashboard_url}/api/jobs/", token) == code

        wide = {"hidden": 2048, "noise": 0.15}  # 8 KiB of activations a sample, a layer
        with Worker(WorkerConfig(str(MINE), wide)) as profiler:
            knobs = {"micro_batch_size": 4, "batch_size": 64}
            need = profiler.train(knobs, 64, (64,), 0)["peak_allocated_bytes"]
        scheduler = OneSlot()
        setting = WorkerConfig(str(MINE), wide, cap_bytes=need + 400 * 1024)
        RayExecutor(setting, "mine_trials").run(scheduler, TrialPlan(256, (256,), False, 1, 1))
    assert [f["outcome"] for f in scheduler.found] == ["oom", "ok", "oom", "ok", "ok", "ok"]
    gaps = [
        b["first_step_at"] - a["returned_at"] for a, b in zip(scheduler.found[1:], scheduler.found[2:], strict=False)
    ]  # type: ignore[operator]
    assert max(gaps) < 0.5, "a fresh actor takes 1 to 3 seconds"


def status(url: str, token: str | None) -> int:
    request = urllib.request.Request(url)  # noqa: S310  (our own dashboard on loopback)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
