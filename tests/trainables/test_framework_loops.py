"""The loops of three frameworks under `run`: counted, timed, reported and ended; the real packages, no stand-ins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.fakes import told
from trainables import own_loop, training
from trainables.plan import Plan, steps_to
from trainables.workload import WorkloadError
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

DATA = Path(__file__).parents[1] / "data"


class Framework(NamedTuple):
    """Its package, a knob that its example asks for beside others, samples of a pass and of a batch, and a plan."""

    package: str
    asked: str
    samples: int
    batch: int
    plan: Plan


FRAMEWORKS = {
    "trainer": Framework("transformers", "micro_batch_size", 256, 16, Plan(256, (64, 256))),
    "lightning": Framework("pytorch_lightning", "sdpa_backend", 1024, 32, Plan(3072, (512, 3072))),
    "accelerate": Framework("accelerate", "non_blocking", 1024, 32, Plan(2048, (1024, 2048))),
}
frameworks = pytest.mark.parametrize("name", FRAMEWORKS)


def session_of(name: str, folder: Path, *changes: tuple[str, str]) -> Session:
    """Returns a session with the example of a framework, its text changed and written into the folder."""
    pytest.importorskip(FRAMEWORKS[name].package)
    text = (DATA / f"{name}_loop.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / f"changed_{abs(hash(changes))}.py"
    path.write_text(text)
    return Session(WorkerConfig(str(path), {}))


def knobs_of(name: str) -> dict[str, Any]:
    batch = FRAMEWORKS[name].batch
    return {"learning_rate": 1e-2, "batch_size": batch, "micro_batch_size": batch // 2}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@frameworks
def test_it_tells_what_it_asks_for(name: str, tmp_path: Path) -> None:
    its = FRAMEWORKS[name]
    session = session_of(name, tmp_path)
    facts = session.describe(knobs_of(name))
    assert (facts.train_samples, facts.objectives) == (its.samples, {"accuracy": "max"})
    assert facts.seen == {"batch_size": its.batch, "micro_batch_size": its.batch // 2}
    assert {"learning_rate", "batch_size", "num_workers", "amp_dtype", "compile", its.asked} <= set(facts.asked)
    assert facts.parameters["total"] > 100
    found = session.kinds(knobs_of(name), {"micro_batch_size": its.batch // 4})
    assert (found.outcome, found.message, found.untold) == ("ok", "", ()), "a study of it knows what changes learning"


@frameworks
def test_rungs_and_horizon_are_of_the_plan_nothing_is_written(name: str, tmp_path: Path, here: Path) -> None:
    plan = FRAMEWORKS[name].plan
    first, second = told(session_of(name, tmp_path), knobs_of(name), plan)
    assert (first.samples, first.done, first.outcome) == (plan.milestones[0], False, "ok"), first.message
    assert (second.samples, second.done, second.outcome) == (plan.samples, True, "ok"), second.message
    assert second.values["accuracy"] > 0.9
    assert second.spans["micro_steps"] == 2 * second.spans["steps"]
    assert second.active["optimizer"] == "AdamW"
    assert name != "lightning" or not list(here.iterdir())


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_a_probe_and_an_early_end(name: str, tmp_path: Path) -> None:
    session, workers = session_of(name, tmp_path), int(name == "lightning")
    found = session.probe({**knobs_of(name), "amp_dtype": "bf16", "num_workers": workers}, time_s=0.5)
    assert (found.outcome, found.end) == ("ok", "time"), found.message
    assert "bfloat16" in found.active["matmul_dtypes"]
    assert told(session, knobs_of(name), FRAMEWORKS[name].plan, stops=True)[-1].retire == ""


@frameworks
def test_the_micro_batch_is_halved_where_it_does_not_fit(name: str, tmp_path: Path) -> None:
    made = {"lightning": "moons", "accelerate": "pictures"}.get(name)
    changes = () if made is None else ((f"{made}(256, 2)", f"{made}(16, 2)"),)  # else evaluating needs most
    session, knobs, batch = session_of(name, tmp_path, *changes), knobs_of(name), FRAMEWORKS[name].batch
    plan = Plan(2 * batch, (2 * batch,))
    small, large = (session.train({**knobs, "micro_batch_size": m}, plan, 0).peak_allocated_bytes for m in (8, batch))
    assert small < large
    capped = dataclasses.replace(plan, cap_bytes=(small + large) // 2)
    found = session.train({**knobs, "micro_batch_size": batch}, capped, 0)
    assert (found.outcome, found.knobs["batch_size"]) == ("ok", batch), found.message
    assert found.knobs["micro_batch_size"] < batch


@pytest.mark.parametrize(
    ("samples", "a_pass", "micro", "accumulation", "steps"),
    [(256, 256, 8, 2, 16), (512, 256, 8, 2, 32), (100, 96, 8, 4, 4), (60, 256, 8, 2, 4), (200, 100, 8, 4, 8)],
)
def test_the_steps_reach_the_samples(samples: int, a_pass: int, micro: int, accumulation: int, steps: int) -> None:
    assert steps_to(samples, a_pass, micro, accumulation) == steps


def more(name: str, argument: str) -> tuple[str, str]:
    """Returns the change that gives a framework an argument beside those of `run`."""
    given = {"trainer": 'output_dir="trained"', "accelerate": "accelerator(run"}[name]
    return given, f"{given}, {argument}"


FORGETTING = (
    ("**trainer_kwargs(run)", '**{**trainer_kwargs(run), "callbacks": []}'),
    ("total_steps=steps", "total_steps=100"),  # it is without end
)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        *(
            (name, (more(name, argument),), rf"{argument}\): run sets it")
            for name, argument in (
                *(("trainer", "per_device_train_batch_size=4"), ("trainer", "auto_find_batch_size=True")),
                *(("accelerate", "mixed_precision='fp16'"), ("accelerate", "gradient_accumulation_steps=4")),
            )
        ),
        ("trainer", (("    trainer.add_callback(StudyCallback(run))\n", ""),), r"callbacks=\[StudyCallback"),
        ("lightning", FORGETTING, r"no batch: .*trainer_kwargs\(run, callbacks="),
        ("accelerate", (("run.batches(loader)", "loader"),), r"the loop goes over run.batches\(loader\)"),
    ],
)
def test_what_a_script_gets_wrong_is_said(name: str, changes: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=says):
        session_of(name, tmp_path, *changes).describe(knobs_of(name))


KEEPING = {
    "trainer": (
        ('output_dir="trained"', 'output_dir="trained", save_strategy="steps", save_steps=2'),
        ("trainer.train()", 'trainer.train(resume_from_checkpoint=os.path.exists("trained/checkpoint-2"))'),
        ("import torch\n", "import os\n\nimport torch\n"),
    ),
    "lightning": (
        (
            "Data(**run.loader()))\n\n\nS",
            "Data(**run.loader()), ckpt_path=KEPT if os.path.exists(KEPT) else None)\n\n\nS",
        ),
        ("import math\n", "import math\nimport os\n"),
        (
            "trainer_kwargs(run)",
            "trainer_kwargs(run, enable_checkpointing=True, callbacks=Kept('.', 'kept', every_n_train_steps=2))",
        ),
        (
            "def moons",
            "from pytorch_lightning.callbacks import ModelCheckpoint as Kept\n\nKEPT = 'kept.ckpt'\n\n\ndef moons",
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize("name", KEEPING)
def test_resuming_from_a_checkpoint_of_another_is_refused(name: str, tmp_path: Path) -> None:
    session, plan = session_of(name, tmp_path, *KEEPING[name]), Plan(96, (96,))
    first, second = (session.train(knobs_of(name), plan, 0) for _ in range(2))
    assert first.outcome == "ok", first.message
    assert "the Trainer resumes from a checkpoint, after its step " in second.message


def test_a_trainer_may_evaluate_on_several_sets(tmp_path: Path) -> None:
    several = ("eval_dataset=VAL", 'eval_dataset={"near": VAL, "far": VAL}')
    objectives = ('{"accuracy": "max"}', '{"near_accuracy": "max", "far_accuracy": "max"}')
    states = told(session_of("trainer", tmp_path, several, objectives), knobs_of("trainer"), Plan(64, (32, 64)))
    assert len(states) == 2
    for found in states:
        assert found.outcome == "ok", found.message
        assert found.values.keys() == {"near_accuracy", "far_accuracy"}
    assert found.done


COUNTS = (
    ('"accuracy": float(', '"count": float(len(found.predictions)), "accuracy": float('),
    ('OBJECTIVES = {"accuracy": "max"}', 'OBJECTIVES = {"accuracy": "max", "count": "max"}'),
)
ODD = ("Tokens(64, 2)", "Tokens(30, 2)"), ("Tokens(256, 1)", "Tokens(58, 1)")


@pytest.mark.parametrize(("first", "workers"), [("", 0), ("trainer.evaluate()\n    ", 1)])
def test_a_trainer_trains_whole_micro_batches_evaluates_all(tmp_path: Path, first: str, workers: int) -> None:
    begun = ("trainer.train()", f"{first}trainer.train()")
    session = session_of("trainer", tmp_path, *COUNTS, *ODD, begun)
    knobs = {**knobs_of("trainer"), "num_workers": workers, "persistent_workers": bool(workers)}
    for samples, found in zip((56, 112), told(session, knobs, Plan(112, (56, 112))), strict=True):
        assert (found.outcome, found.samples) == ("ok", samples), found.message
        assert found.values["count"] == 30
    assert found.done


def test_arguments_of_a_trainer_are_for_one_training(tmp_path: Path) -> None:
    early = """class Early(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **own):
        control.should_training_stop = True


def train(run):"""
    twice = ("    trainer.train()", "    trainer.add_callback(Early())\n    trainer.train()\n    trainer.train()")
    changes = (*ODD, ("def train(run):", early), ("import torch\n", "import torch\nimport transformers\n"), twice)
    found = session_of("trainer", tmp_path, *changes).train(knobs_of("trainer"), Plan(512, (512,)), 0)
    assert "make new ones by training_arguments(run, train_set)" in found.message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (('{"accuracy": "max"}', '{"f1": "max"}'), ("['accuracy', 'epoch', ", "f1 of OBJECTIVES: give Trainer comp")),
        ((", compute_metrics=metrics", ""), ("gave ['epoch', 'loss'", "which returns {'accuracy'")),
        (('{"accuracy": "max"}', '{"eval_accuracy": "max"}'), ("['accuracy', 'epoch', ", "leave out eval_")),
    ],
)
def test_metrics_of_a_trainer_without_an_objective_are_told(
    tmp_path: Path, changes: tuple[str, str], says: tuple[str, ...]
) -> None:
    found = session_of("trainer", tmp_path, changes).train(knobs_of("trainer"), Plan(32, (32,)), 0)
    assert all(said in found.message for said in says), found.message


def test_what_a_script_evaluates_for_itself_is_in_no_window(tmp_path: Path) -> None:
    own = 'training_arguments(run, TRAIN, eval_strategy="steps", eval_steps=1, '
    session = session_of("trainer", tmp_path, ("training_arguments(run, TRAIN, ", own))
    found = session.train(knobs_of("trainer"), Plan(256, (256,)), 0)
    assert found.outcome == "ok", found.message
    assert found.spans["data_wait_s"] < 0.2 * found.spans["wall_s"]


OWN_OPTIMIZER = {
    "trainer": ("compute_metrics=metrics)", "compute_metrics=metrics, optimizers=own(model))"),
    "lightning": ("lr=self.learning_rate)", "lr=5e-3)"),
    "accelerate": ('lr=run["learning_rate"])', "lr=5e-3)"),
}
OWN = """def own(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))


def train(run):"""


@frameworks
@pytest.mark.parametrize("is_own", [True, False])
def test_a_learning_rate_without_effect_is_remarked_upon(name: str, is_own: bool, tmp_path: Path) -> None:
    changes = (OWN_OPTIMIZER[name], ("def train(run):", OWN)) if is_own else ()
    if is_own and name == "lightning":  # whose schedule has the knob's rate, too
        changes = (*changes, ("OneCycleLR(optimizer, self.learning_rate, ", "OneCycleLR(optimizer, 5e-3, "))
    session, remarks, samples = session_of(name, tmp_path, *changes), [], 2 * FRAMEWORKS[name].batch
    for rate in (1e-3, 3e-3):
        found = session.train({**knobs_of(name), "learning_rate": rate}, Plan(samples, (samples,)), 0)
        assert (found.outcome, found.done) == ("ok", True), found.message
        remarks.append(found.remark)
    assert remarks[0] == ""
    assert ("learning_rate was 0.001 and 0.003" in remarks[1]) if is_own else remarks[1] == ""


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("trainer", ("    trainer.train()\n", "    trainer.train()\n    trainer.train()\n")),
        ("lightning", ("**run.loader()))\n\n\nSPACE", "**run.loader()))\n    train(run)\n\n\nSPACE")),
    ],
)
def test_a_second_trainer_after_the_end_is_not_begun_and_told(name: str, again: Any, tmp_path: Path) -> None:
    session = session_of(name, tmp_path, again)
    state = training.prepare(session.resident, session.config(knobs_of(name)), Plan(32, (32,)))
    training.train(state)
    assert "only the first is tuned" in state.remark
    assert state.samples == 32


def test_accelerate_changes_number_types_from_trial_to_trial(tmp_path: Path) -> None:
    session = session_of("accelerate", tmp_path, ("pictures(1024, 1)", "pictures(64, 1)"))
    knobs = knobs_of("accelerate")
    for amp, seen in (("bf16", "bfloat16"), ("fp32", "float32")):
        found = session.probe({**knobs, "amp_dtype": amp, "num_workers": 1}, time_s=0.3)
        assert (found.outcome, found.end) == ("ok", "time"), found.message
        assert seen in found.active["matmul_dtypes"]
        assert "workers" not in found.active, "they are not denied"
    assert told(session, knobs, Plan(128, (64, 128)), stops=True)[-1].retire == ""


def test_the_micro_batch_of_accelerate_leaves_learning_alone(tmp_path: Path) -> None:
    changes = ("optim.AdamW", "optim.SGD")  # Adam makes a step of what is left of rounding
    session, found = session_of("accelerate", tmp_path, changes), []
    for micro in (8, 32):
        config = session.config({**knobs_of("accelerate"), "micro_batch_size": micro})
        state = own_loop.prepare(own_loop.OwnResident(session.resident.workload), config, Plan(128, (128,)))
        own_loop.train(state)
        assert (state.samples, state.steps) == (128, 4)
        found.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_a_schedule_of_accelerate_ends_with_the_run(tmp_path: Path) -> None:
    made = "    schedule = accelerator.prepare(CosineAnnealingLR(optimizer, run.steps))\n"
    changes = (
        ("pictures(1024, 1)", "pictures(100, 1)"),
        ("from torch.utils.data", "from torch.optim.lr_scheduler import CosineAnnealingLR\nfrom torch.utils.data"),
        ("    for _ in run.epochs", made + "    for _ in run.epochs"),
        ("                optimizer.step()\n", "                optimizer.step()\n                schedule.step()\n"),
    )
    session = session_of("accelerate", tmp_path, *changes)
    state = training.prepare(session.resident, session.config(knobs_of("accelerate")), Plan(200, (200,)))
    training.train(state)
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_accelerate_steps_where_a_horizon_within_a_batch_ends(tmp_path: Path) -> None:
    one = ("        run.report(acc", "            if run.evaluate_now:\n                run.report(acc")
    session = session_of("accelerate", tmp_path, ("pictures(1024, 1)", "pictures(100, 1)"), one)
    found = session.train(knobs_of("accelerate"), Plan(248, (248,)), 0)
    assert (found.outcome, found.samples) == ("ok", 248), found.message
    assert found.spans["steps"] == 9  # behind the first, of passes of four


def test_an_epoch_has_the_samples_that_an_own_sampler_draws(tmp_path: Path) -> None:
    own = "DataLoader(TRAIN, sampler=torch.utils.data.SubsetRandomSampler(range(100)), **run.loader())"
    session = session_of("accelerate", tmp_path, ("DataLoader(TRAIN, shuffle=True, **run.loader())", own))
    assert session.describe(knobs_of("accelerate")).train_samples == 100


STREAM = """class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (TOKENS[index] for index in range(len(TOKENS)))


TOKENS, TRAIN, VAL = Tokens(256, 1), Stream(), Tokens(64, 2)"""


def test_a_trainer_takes_a_stream_and_arguments_of_another_class(tmp_path: Path) -> None:
    changes = (
        ("TRAIN, VAL = Tokens(256, 1), Tokens(64, 2)", STREAM),
        ("BertForTokenClassification, Trainer", "BertForTokenClassification, Seq2SeqTrainingArguments, Trainer"),
    )
    said = "training_arguments(run, TRAIN, pass_samples=256, cls=Seq2SeqTrainingArguments, "
    session = session_of("trainer", tmp_path, *changes, ("training_arguments(run, TRAIN, ", said))
    found = session.train(knobs_of("trainer"), Plan(512, (512,)), 0)
    assert (found.outcome, found.samples) == ("ok", 512), found.message
    unsaid = session_of("trainer", tmp_path, *changes).train(knobs_of("trainer"), Plan(64, (64,)), 0)
    assert "pass_samples=N" in unsaid.message
