"""A session with a loop of one's own: probes, rungs and OOMs as of any workload, and nothing is left behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import study_of, told
from tests.own_files import Here
from tests.trainables.test_own_loop import BACK, BACKWARD, HEAD, PASSES, PATIENT, PLAIN, loop
from trainables import knob_columns
from trainables.plan import Plan
from trainables.state import Diverged
from trainables.workload import LoopError
from tuning.config.complete import fit_to_workload
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.memory import oom
from tuning.study import setup
from tuning.workers import dry_run
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

KNOBS = {"learning_rate": 0.05, "batch_size": 16, "micro_batch_size": 4}
HIDDEN = "(n := nn.Linear(4, 1), torch.optim.SGD(n.parameters(), 0.1))"
"""A model and its optimiser that are not shown to `run.prepare`."""


@pytest.fixture
def session(tmp_path: Path) -> Any:
    def start(body: str, head: str = HEAD) -> Session:
        path = tmp_path / f"own_{abs(hash((head, body, str(tmp_path))))}.py"
        path.write_text(head + body)
        return Session(WorkerConfig(str(path), {}))

    return start


def test_it_tells_what_it_asks_for_and_what_it_learns_from(session: Any) -> None:
    facts = session(PLAIN).describe(KNOBS)
    assert (facts.train_samples, facts.val_samples, facts.objectives) == (64, None, {"error": "min"})
    assert {"learning_rate", "batch_size", "micro_batch_size", "num_workers"} <= set(facts.asked)
    assert not {"amp_dtype", "weight_decay", "length_bucketing"} & set(facts.asked)
    assert facts.seen == {"batch_size": 16, "micro_batch_size": 4}
    assert facts.parameters == {"total": 5, "trainable": 5}
    trained = session(PLAIN).train({**KNOBS, "learning_rate": 1e-12}, Plan(16, (16,)), dry_run.DRY_SEED).values
    assert facts.untrained == pytest.approx(trained, rel=1e-6), "however many steps were tried"
    fixed = session(PLAIN, HEAD.replace('lr=run["learning_rate"]', "lr=0.1"))
    assert fixed.describe(KNOBS).untrained == {}, "it learns whatever the rate"
    parts = 'SGD([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias]}]'
    partly = session(PLAIN, HEAD.replace("SGD(net.parameters()", parts))
    assert partly.describe(KNOBS).untrained == {}, "and where a rate of some weights is its own"
    assert len(facts.workload_sha256) == len(facts.data_sha256) == 64


def test_a_rung_stops_it_and_the_next_trial_finds_nothing_left(session: Any) -> None:
    own = session(PLAIN)
    first, last = told(own, KNOBS, Plan(128, (32, 128)), stops=True)
    assert (first.samples, first.done, first.outcome) == (32, False, "ok")
    assert (last.samples, last.done, last.retire) == (32, True, "")
    whole = own.train(KNOBS, Plan(128, (32, 128)), 0)
    assert (whole.samples, whole.outcome) == (128, "ok")
    assert whole.values == own.train(KNOBS, Plan(128, (128,)), 0).values


def test_a_trial_that_stops_itself_early_ends_well_and_so_does_a_probe(session: Any) -> None:
    own = session(PATIENT)
    found = own.train(KNOBS, Plan(64 * 8, (64, 512)), 0)
    assert (found.outcome, found.samples, found.done) == ("ok", 192, True)
    assert found.values == {"error": 7.0}
    probed = own.probe(KNOBS, time_s=5.0)
    assert (probed.outcome, probed.samples_per_s > 0) == ("ok", True)


def test_a_probe_of_passes_that_are_broken_off_before_a_step_is_timed(session: Any) -> None:
    body = PASSES.replace(
        "            run.backward(",
        "            if not run.ends_batch and run.progress > 1e-12:\n                break\n            run.backward(",
    )
    found = session(body).probe(KNOBS, time_s=1.0)
    assert (found.outcome, found.message) == ("ok", "")
    assert found.samples_per_s > 0


def test_a_loop_that_never_asks_for_the_micro_batch_is_not_begun_again(session: Any) -> None:
    own = session("\ndef train(run):\n" + BACK)
    found = own.train(KNOBS, Plan(64, (64,), cap_bytes=10), 0)
    assert (found.outcome, found.retries) == ("oom", ())


UNDEFINED = PLAIN.replace("loss.item())", "loss.item() if run['learning_rate'] > 1e-9 else float('nan'))")


def test_a_metric_that_is_undefined_before_training_is_left_to_the_trials(session: Any) -> None:
    own = session(UNDEFINED)
    facts = own.describe(KNOBS)
    assert (facts.untrained, facts.seen) == ({}, {"batch_size": 16, "micro_batch_size": 4})
    assert own.train(KNOBS, Plan(64, (64,)), 0).outcome == "ok"


def test_a_metric_that_is_no_objective_may_be_undefined(session: Any) -> None:
    own = session(PLAIN.replace("loss.item())", "loss.item(), auc=float('nan'))"))
    assert set(own.describe(KNOBS).untrained) == {"error"}
    found = own.train(KNOBS, Plan(64, (64,)), 0)
    assert (found.outcome, set(found.values)) == ("ok", {"error", "auc"})


def test_a_metric_that_is_undefined_in_a_trial_is_said_with_the_line_that_reports_it(session: Any) -> None:
    overflown = session(PLAIN.replace("loss.item())", "float('inf'))")).train(KNOBS, Plan(64, (64,)), 0)
    assert (overflown.fault, overflown.message) == (oom.DIVERGED.name, "error is inf after 64 samples")
    found = session(PLAIN.replace("loss.item())", "float('nan'))")).train(KNOBS, Plan(64, (64,)), 0)
    assert (found.outcome, found.fault) == ("diverged", oom.UNDEFINED.name)
    assert re.match(r"error is nan after 64 samples \(\w+\.py:\d+\): mend how the value is made", found.message)


@pytest.mark.parametrize("amp_dtype", ["fp32", "fp16"])
def test_a_first_loss_that_overflows_is_a_fault_unless_in_half_precision(session: Any, amp_dtype: str) -> None:
    knobs = {**KNOBS, "amp_dtype": amp_dtype}
    own = session(PLAIN.replace("loss_of(net, batch)", "loss_of(net, batch) / 0.0"))
    if amp_dtype == "fp16":
        assert own.describe(knobs).untrained == {}
    else:
        with pytest.raises(Diverged, match="mean training loss is inf"):
            own.describe(knobs)
    assert own.train(knobs, Plan(64, (64,)), 0).outcome == "diverged"


def completed(tmp_path: Path, body: str, *arguments: str) -> Any:
    path = tmp_path / f"asks_{abs(hash((body, str(tmp_path))))}.py"
    path.write_text(HEAD + body)
    _, config = setup.prepare_config(
        load([f"workload={path}", "card=cpu", f"runs_dir={tmp_path}", *arguments], (file := Here()).table), file
    )
    facts = Session(WorkerConfig(str(path), {})).describe({})
    return fit_to_workload(config, facts.train_samples, facts.asked, facts.seen, averages=facts.averages)


def test_a_knob_that_is_searched_and_never_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx512bw"}))
    with pytest.raises(ConfigError, match=r"knobs.amp_dtype=\[fp32,bf16\]: train\(run\) never asks for amp_dtype") as e:
        completed(tmp_path, PLAIN, "knobs.amp_dtype=[fp32,bf16]")
    assert "run.autocast()" in e.value.remedy
    with pytest.raises(ConfigError, match=r"knobs.weight_decay=0.3: train\(run\) never asks"):
        completed(tmp_path, PLAIN, "knobs.weight_decay=0.3")


def test_batches_of_its_own_are_what_the_configurations_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "DRY_S", 0.3)  # the first loop reports nothing
    head_sizes = "batch_size=[8,16]"
    with pytest.raises(ConfigError, match="never asks for batch_size"):
        completed(tmp_path, "\ndef train(run):\n" + BACK + "        run['learning_rate']\n")
    whole = PLAIN.replace("**run.loader()", "batch_size=run['batch_size']")
    config = completed(tmp_path, whole, f"knobs.{head_sizes}")
    assert config.space.fixed["micro_batch_size"] == 16
    assert all(values["micro_batch_size"] == values["batch_size"] for values in config.named.values())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("nn.Identity()", ""),
        ("nn.Dropout(0.5)", ""),
        ("nn.BatchNorm1d(8)", "BatchNorm1d (1) gives a sample other values"),
    ],
)
def test_a_micro_batch_that_changes_what_is_learned_is_found(session: Any, layer: str, reason: str) -> None:
    net = f"nn.Sequential(nn.Linear(4, 8), {layer}, nn.Linear(8, 1))"
    own = session(PLAIN.replace("made(run)", f"run.prepare(n := {net}, torch.optim.SGD(n.parameters(), 0.1))"))
    own.describe({})
    found = own.kinds(KNOBS, {"micro_batch_size": 4, "num_workers": 1, "weight_decay": 0.1})
    assert found.message == ""
    assert found.changed.keys() == ({"micro_batch_size"} if reason else set())
    assert reason in found.changed.get("micro_batch_size", "")


def test_a_loop_that_hides_its_model_says_that_kinds_are_not_measured(session: Any) -> None:
    own = session(PLAIN.replace("made(run)", HIDDEN))
    own.describe({})
    found = own.kinds(KNOBS, {"micro_batch_size": 4})
    assert (found.changed, "does not show its model" in found.message) == ({}, True)


def test_of_loader_processes_no_model_has_to_be_shown(session: Any) -> None:
    loader = 'DataLoader(DATA, 8, num_workers=run["num_workers"])'
    own = session(PLAIN.replace("DataLoader(DATA, shuffle=True, **run.loader())", loader).replace("made(run)", HIDDEN))
    own.describe({})
    found = own.kinds(KNOBS, {"micro_batch_size": 1, "num_workers": 2})
    assert (found.changed, found.message) == ({}, "")


def test_a_fault_that_the_check_of_kinds_meets_is_told_with_its_line(session: Any) -> None:
    small = "    if run['micro_batch_size'] == run['batch_size']:\n        {}\n    net, optimizer"  # in a comparison
    own = session(PLAIN.replace("    net, optimizer", small.format("raise ValueError('too few')")))
    own.describe(KNOBS)
    assert own.kinds(KNOBS, {"micro_batch_size": 4}).message.startswith("ValueError: too few (own_")


def test_a_loop_that_goes_through_its_data_and_reports_nothing_is_told_so(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "DRY_S", 0.3)
    silent = session(PLAIN.replace("run.report(", "dict(")).describe(KNOBS)
    assert silent.silent_passes > 1
    config = load(["workload=signals", "card=cpu"])
    assert any(
        said.endswith("if run.evaluate_now: run.report(error=...)") for said in setup.cautions(config, study_of(silent))
    )
    facts = session(PLAIN).describe(KNOBS)
    assert facts.silent_passes == 0
    assert not any("reported nothing" in said for said in setup.cautions(config, study_of(facts)))


def test_a_loop_with_a_seed_of_its_own_is_told_so(session: Any) -> None:
    assert not session(PLAIN).describe(KNOBS).reseeds
    for seed in (7, 0):  # the second is the study's own
        own = session(PLAIN.replace("    net, optimizer", f"    torch.manual_seed({seed})\n    net, optimizer"))
        facts = own.describe(KNOBS)
        assert facts.reseeds
        assert [own.train(KNOBS, Plan(16, (16,)), n).active["seed"] for n in (0, 1)] == [seed, seed]
    said = setup.cautions(load(["workload=signals", "card=cpu"]), study_of(facts))
    assert any("sets a seed of its own" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("line", "why"),
    [("schedule.step()", "so do lines of"), ("nn.utils.clip_grad_norm_(net.parameters(), 1)", "max_norm")],
)
def test_a_step_that_is_taken_or_clipped_twice_is_told_before_anything_is_measured(
    session: Any, line: str, why: str
) -> None:
    schedule = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1); run.prepare(net, optimizer, schedule)"
    body = PLAIN.replace("    try:", f"    {schedule}\n    try:").replace("if run.ev", f"{line}\n            if run.ev")
    with pytest.raises(LoopError, match=why):
        session(body).describe({**KNOBS, "micro_batch_size": 16})


def test_what_lacks_memory_is_not_told_as_what_a_micro_batch_of_one_raises(tmp_path: Path) -> None:
    """Batch norm refuses one sample, to which the micro-batch was cut."""
    path = tmp_path / "norm.py"
    path.write_text(
        HEAD
        + PLAIN.replace(
            "net, optimizer = made(run)",
            """net = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=run["learning_rate"])
    run.prepare(net, optimizer)
    held = torch.zeros(100)""",
        )
    )
    with pytest.raises(Exception, match="out of memory"):
        Session(WorkerConfig(str(path), {}, cap_bytes=100)).describe(KNOBS)


def test_what_they_compile_is_tried_uncompiled(session: Any) -> None:
    body = PLAIN.replace(
        "net, optimizer = made(run)",
        """net, optimizer = made(run)
    net = torch.compile(net, backend=lambda graph, inputs: SEEN.append("compiled") or graph.forward)""",
    )
    own = session(body)
    assert own.describe(KNOBS).untrained
    assert own.resident.workload.train.__globals__["SEEN"] == ["left"]
    own.train(KNOBS, Plan(64, (64,)), 0)
    assert "compiled" in own.resident.workload.train.__globals__["SEEN"]


GROWING = """
def train(run):
    net, optimizer = nn.Sequential(nn.Linear(4, 4096), nn.Sigmoid(), nn.Linear(4096, 1)), None
    optimizer = torch.optim.SGD(net.parameters(), lr=run["learning_rate"])
    run.prepare(net, optimizer)
    history = []
    for batch in run.batches(DataLoader(DATA, shuffle=True, **run.loader())):
        history.append(KEPT)
        run.backward(loss_of(net, batch), optimizer)
        if run.evaluate_now:
            run.report(error=1.0)
"""


def test_memory_that_grows_with_the_steps_is_told(session: Any) -> None:
    knobs, cap_bytes = {**KNOBS, "micro_batch_size": 16, "learning_rate": 1e-6}, 8 * 2**20
    own = session(GROWING.replace("KEPT", "net(batch[0]).mean()"))
    found = own.train(knobs, Plan(1 << 14, (1 << 14,), cap_bytes=cap_bytes), 0)
    assert (found.outcome, [one.knobs["micro_batch_size"] for one in found.retries]) == ("oom", [16, 8])
    assert "grows with the steps" in found.message
    fixed = session(GROWING.replace("KEPT", "net(batch[0]).mean().item()"))
    assert fixed.train(knobs, Plan(1 << 12, (1 << 12,), cap_bytes=cap_bytes), 0).outcome == "ok"
    never_emptied = GROWING.replace("history = []", "history = SEEN")
    own = session(never_emptied.replace("KEPT", "net(batch[0]).mean()"))
    found = own.train(knobs, Plan(1 << 14, (1 << 14,), cap_bytes=cap_bytes), 0)
    assert len(found.retries) == 1, "the memory is still held, so that no smaller micro-batch would help"
    assert "also after a training" in found.message


def test_probe_that_memory_ends_has_a_speed_if_it_grew(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.workers.session.PROBE_WINDOW_S", 0.0)
    own = session(GROWING.replace("KEPT", "torch.zeros(1 << 18)"))
    own.setting = replace(own.setting, cap_bytes=2**27)
    found = own.probe({**KNOBS, "learning_rate": 1e-6}, 60.0)
    assert (found.outcome, bool(found.samples_per_s)) == ("ok", True)
    own.setting = replace(own.setting, cap_bytes=2**15)
    assert own.probe(KNOBS, 1.0).outcome == "oom"


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ("torch.zeros(1 << 18)", "grew with the steps"),
        ("torch.zeros(1 << 21 if run.batch < 9 else 1)", "^$"),
        ("1.0", "^$"),
    ],
)
def test_memory_that_grew_and_fitted_is_told(session: Any, kept: str, why: str) -> None:
    knobs, plan = {**KNOBS, "learning_rate": 1e-6}, Plan(640, (640,), window_s=0.0, cap_bytes=2**30)
    found = session(GROWING.replace("KEPT", kept)).train(knobs, plan, 0)
    assert found.outcome == "ok"
    assert re.search(why, found.remark)


@pytest.mark.parametrize(("kept", "why"), [("SEEN", "were still held after a training"), ("[]", "")])
def test_process_that_a_probe_left_full_runs_nothing_else(session: Any, kept: str, why: str) -> None:
    own = session(GROWING.replace("history = []", f"history = {kept}").replace("KEPT", "torch.zeros(1 << 18)"))
    own.setting = replace(own.setting, cap_bytes=2**30)
    own.describe(KNOBS)
    found = own.probe({**KNOBS, "learning_rate": 1e-6}, 0.5)
    assert (found.outcome, why in found.retire, bool(found.retire)) == ("ok", True, bool(why))


@pytest.mark.parametrize(
    ("head", "reported", "where"),
    [
        (
            "def kept(e):\n    kept.best = min(e, getattr(kept, 'best', 9.0))\n    return kept.best\n",
            "kept(e)",
            "in the module",
        ),
        (
            "import pathlib\nFILE = pathlib.Path(__file__).with_suffix('.best')\ndef kept(e):\n"
            "    e = min(e, float(FILE.read_text())) if FILE.exists() else e\n"
            "    FILE.write_text(str(e))\n    return e\n",
            "kept(e)",
            r"in .*\.best;",
        ),
        ("", "e", ""),
    ],
)
def test_report_that_is_kept_from_an_earlier_training_is_told(
    session: Any, head: str, reported: str, where: str
) -> None:
    report = f"run.report(error=(lambda e: {reported})((net(X).squeeze(1) - X.sum(1)).square().mean().item()))"
    own = session(HEAD + loop(BACKWARD, head=head).replace("run.report(error=1.0)", report), "")
    assert own.describe(KNOBS).untrained
    knobs, plan = {**KNOBS, "learning_rate": 0.1}, Plan(640, (640,))
    found = own.train(knobs, plan, 0)
    assert found.outcome == ("crash" if where else "ok")
    assert re.search(f"NotIndependent: a training that learned nothing .*{where}" if where else "^$", found.message)
    assert own.train(knobs, plan, 1).outcome == "ok", "it is tried once in a process"


def test_an_oom_is_told_before_the_trial_begins_again(session: Any) -> None:
    own = session(PLAIN)
    seen = told(own, {**KNOBS, "micro_batch_size": 16}, Plan(64, (64,), cap_bytes=600))
    assert [len(state.retries) for state in seen if not state.done][:1] == [1]
