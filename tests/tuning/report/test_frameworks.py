"""What was found, in the words of a framework: nothing is dropped, and each loads and trains with what it is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import ROOT
from tests.tuning.snapshots import check
from trainables.host_memory import AT_START
from trainables.knob_columns import Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config import best_file
from tuning.config.best_file import Best
from tuning.config.environment import ON_A_CPU
from tuning.config.errors import ConfigError
from tuning.report.frameworks import FRAMEWORKS, Exported, exported
from tuning.report.summary import Place

FOUND = {
    **{"batch_size": 16, "micro_batch_size": 8, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True},
    **{"amp_dtype": "bf16", "learning_rate": 3e-3, "channels_last": True, "width": 64},
}
THEIRS = KnobTable(
    {
        "optimizer": Knob("adam", "learning", values=("adam", "lion")),
        "schedule": Knob("cosine", "learning", values=("cosine", "step")),
        "architecture": Knob("resnet18", "both", values=("resnet18", "resnet50")),
    },
    hooks=("optimizer", "schedule"),
)
"""Of a workload that has knobs of its own by names that ours have."""
THEIR_VALUES = {"optimizer": "lion", "schedule": "cosine", "architecture": "resnet18"}


def best(**knobs: Any) -> Best:
    read = best_file.read(ROOT / "benchmarks" / "results" / "best" / "signals.yaml")
    return replace(read, path=Path("best.yaml"), ref="mine", options={}, knobs=knobs, samples=64, seed=0)


def words(framework: str, **knobs: Any) -> Exported:
    return exported(best(**knobs), framework, Place(type="cpu"))


def another(row: Knob) -> Any:
    """Returns a value of a knob that is not its default."""
    if row.domain.values:
        return next(value for value in row.domain.values if value != row.default)
    if isinstance(row.default, bool):
        return not row.default
    if isinstance(row.default, int):
        return row.default * 2 or 1
    return row.default / 2 or 0.5


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_change_of_any_knob_changes_what_is_written_or_listed(framework: str) -> None:
    for name, row in EVERY.items():
        knobs = dict(EVERY.defaults)
        if row.requires:
            required = EVERY[row.requires.knob]
            values = [another(required), *(required.domain.values or ())]
            knobs[row.requires.knob] = next(value for value in values if row.requires.met(value))
        assert words(framework, **knobs) != words(framework, **{**knobs, name: another(row)}), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_has_its_words(framework: str) -> None:
    knobs = {**KnobTable(hooks=["parameter_groups", "schedule"]).defaults, **FOUND, "weight_decay": 0.1}
    cases = {
        "measured on a CPU": words(framework, **FOUND),
        "with knobs of its own by names of ours": exported(best(**FOUND, **THEIR_VALUES), framework, None, THEIRS),
        "with hooks of its own": exported(best(**knobs), framework, None, KnobTable(hooks=["schedule"])),
        "with groups of parameters of its own": exported(
            best(**knobs), framework, None, KnobTable(hooks=["parameter_groups"])
        ),
        "compiled": exported(best(compile="default", tf32=False), framework, Place(type="cuda")),
    }
    check(f"framework_{framework}", "\n\n".join(found.to_python(case) for case, found in cases.items()))


def test_as_python_it_runs_and_as_json_it_is_the_same() -> None:
    found = words("lightning", **FOUND)
    scope: dict[str, Any] = {}
    text = found.to_python("the best of run one")
    exec(text, scope)  # noqa: S102
    assert {"Trainer": scope["trainer"], "DataLoader": scope["data_loader"]} == found.settings
    assert json.loads(found.to_json()) == found.settings
    assert json.loads(words("deepspeed", **FOUND).to_json())["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}


def test_what_was_measured_on_a_cpu_is_told_so() -> None:
    for place, on_cpu in ((Place(type="cpu"), True), (Place(type="cpu", virtual=True), False), (None, False)):
        found = exported(best(**FOUND), "transformers", place)
        assert ("use_cpu" in found.settings["TrainingArguments"], "GOMP_SPINCOUNT" in found.unsaid) == (on_cpu, on_cpu)


def test_a_value_that_a_knob_may_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"knobs\.amp_dtype"):
        words("json", amp_dtype="fp8")


def test_transformers_loads_it_and_trains_a_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import BertForTokenClassification, Trainer, TrainingArguments

    from tests.data import trainer_script as script

    told = {"optimizer": "sgd", "momentum": 0.5, "nesterov": True, "schedule": "constant", "warmup_frac": 0.5}
    found = words("transformers", **{**FOUND, "num_workers": 0, **told, "max_grad_norm": 1.0})
    (settings,) = found.settings.values()
    arguments = TrainingArguments(str(tmp_path), **settings, max_steps=2, report_to="none")
    trainer = Trainer(BertForTokenClassification(script.CONFIG), arguments, train_dataset=script.TRAIN)
    assert trainer.train().global_step == 2
    (group, *_) = trainer.optimizer.optimizer.param_groups
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.5, True, 3e-3)
    assert (arguments.train_batch_size, arguments.gradient_accumulation_steps, arguments.bf16) == (8, 2, True)
    assert set(found.unsaid) == {"channels_last", "width", *ON_A_CPU, *AT_START}


def test_lightning_loads_it_and_trains_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from tests.data import lightning_script as script

    monkeypatch.chdir(tmp_path)
    found = words("lightning", **FOUND, max_grad_norm=1.0).settings
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(**found["Trainer"], max_steps=1, limit_val_batches=0, **quiet)
    trainer.fit(script.Net(3e-3), script.Data(**found["DataLoader"]))
    assert (trainer.global_step, trainer.accumulate_grad_batches, trainer.precision) == (1, 2, "bf16-mixed")
    assert trainer.train_dataloader.batch_size == 8
    assert trainer.gradient_clip_val == 1.0


def test_accelerate_loads_it_and_trains_a_step() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin

    from tests.data import accelerate_script as script

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    found = words("accelerate", **FOUND, non_blocking=True, compile="default").settings
    assert TorchDynamoPlugin(**found["TorchDynamoPlugin"]).mode == "default"
    loading = DataLoaderConfiguration(**found["DataLoaderConfiguration"])
    accelerator = Accelerator(**found["Accelerator"], dataloader_config=loading)
    net = script.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(
        net, optimizer, torch.utils.data.DataLoader(script.TRAIN, **found["DataLoader"])
    )
    before, steps = [p.detach().clone() for p in net.parameters()], []
    for _, (images, labels) in zip(range(2), loader, strict=False):
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(images), labels))
            optimizer.step()
            steps.append(accelerator.sync_gradients)
    assert steps == [False, True]
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert (len(images), accelerator.mixed_precision) == (8, "bf16")
