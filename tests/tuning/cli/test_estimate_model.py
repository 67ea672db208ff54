"""estimate of a model that has no workload: what is asked, and the one setting that is looked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.memory.logs import MIB, prediction
from tuning.cli import estimate
from tuning.cli.estimate_model import model_question
from tuning.config.errors import ConfigError, TuningError
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request

asked: list[Request] = []


def linear(requests: list[Request]) -> list[Prediction]:
    """A layer keeps half a MiB of each token; without max_length 64 are meant."""
    asked.extend(requests)
    tokens = [int(one.options.get("max_length") or 64) for one in requests]
    return [prediction(layers=6, width_bytes=16 * MIB, sample_bytes=length * MIB // 2) for length in tokens]


def told(settings: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    asked.clear()
    assert estimate.main([*settings.split(), "--json"], linear) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    return tmp_path


def test_the_answer_to_what_is_given_is_the_first_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert estimate.main(["timm:resnet50", "card=rtx4060", "batch_size=8"], linear) == 0
    assert capsys.readouterr().out.startswith("resnet50: batch_size=8 fits rtx4060 (7.30 GiB for tensors): it needs ")
    assert estimate.main(["timm:resnet50", "card=rtx4060", "batch_size=80"], linear) == 0
    assert "batch_size=80 does not fit rtx4060 (7.30 GiB for tensors): it needs 17" in capsys.readouterr().out


def test_the_largest_batch_is_one_that_fits_and_the_next_does_not(capsys):
    for settings in ("card=rtx4060", "card=rtx4060 batch_size=?", "card=rtx4060 knobs.micro_batch_size=?"):
        found = told(f"timm:resnet50 {settings}", capsys)
        largest = int(found["answer"].partition("batch_size=")[2].split()[0])
        assert found["rows"][0]["largest"] == largest
        assert f"is the largest that is expected to fit {'rtx4060'}" in found["answer"]
    beyond = told(f"timm:resnet50 card=rtx4060 batch_size={largest + 2}", capsys)
    assert f"the largest batch that does is {largest}" in beyond["answer"]


def test_the_longest_row_fits_and_the_next_length_does_not(folder, capsys):
    found = told(f"hf:{folder} card=rtx4060 batch_size=4 max_length=?", capsys)
    length = int(found["answer"].partition("max_length=")[2].split()[0])
    assert len(asked) <= 6
    fits = [
        told(f"hf:{folder} card=rtx4060 batch_size=4 max_length={n}", capsys)["answer"] for n in (length, length + 64)
    ]
    assert " fits " in fits[0] or " may fit " in fits[0]
    assert " does not fit " in fits[1]


def test_no_row_is_longer_than_the_positions_of_the_model(folder, capsys):
    assert "max_length=1024 is the longest" in told(f"hf:{folder} card=h200 max_length=?", capsys)["answer"]


def test_the_smallest_card_that_can_do_it_is_named(capsys):
    assert "card=t4 is the smallest listed" in told("timm:resnet50 batch_size=50", capsys)["answer"]
    found = told("timm:resnet50 batch_size=50 dtype=bf16", capsys)
    assert "card=rtx3090 is the smallest listed" in found["answer"]  # a T4 has no bf16
    assert {one.capability for one in asked} == {(8, 6), (8, 9)}
    assert "no card that is listed holds" in told("timm:resnet50 batch_size=5000 card=?", capsys)["answer"]


def test_a_batch_of_one_micro_step_holds_no_gradients_of_others(capsys):
    found = told("timm:resnet50 card=rtx4060 batch_size=2", capsys)
    plain = linear([Request("", {}, {}, "cuda")])[0]
    assert found["rows"][0]["cells"][1]["needed_bytes"] <= plain.peak(2).capacity_bytes
    assert found["rows"][0]["cells"][0]["peak"]["breakdown"]["optimizer"] == 6 * 2 * 16 * MIB


def test_short_names_reach_the_knobs_and_the_model(folder):
    settings = f"hf:{folder / 'config.json'} card=rtx3090 dtype=bf16 checkpointing=true adapter=lora rank=8 targets=q+v"
    with pytest.raises(ConfigError, match="there is no setting rank"):
        model_question(settings.split(), ())
    about = model_question(settings.replace("rank", "adapter_rank").split(), ()).about
    assert about.couplings == ({"amp_dtype": "bf16", "activation_checkpointing": True, "adapter": "lora"},)
    assert (about.knobs["adapter_rank"], about.knobs["fused_optimizer"], about.workload.name) == (8, True, folder.name)
    assert about.workload.options == {"source": "hf", "model": str(folder / "config.json"), "targets": "q+v"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("timm: card=t4", "names no model"),
        ("timm:resnet50 batch_size=? card=?", "one setting can be looked for"),
        ("timm:resnet50 card=t4 max_length=?", "one setting can be looked for"),
        ("timm:resnet50 card=cpu", "card=cpu is no GPU"),
        ("timm:resnet50 card=t4 dtype=bf16", "amp_dtype=bf16 cannot be had with card=t4"),
        ("timm:resnet50 card=t4 max_length=8", "there is no setting max_length"),
        ("hf:here card=t4 max_length=few", "max_length=few"),
        ("timm:resnet50 card=none", "there is no such card"),
    ],
)
def test_a_wrong_question_is_one_clear_error(settings, said):
    with pytest.raises(ConfigError, match=said):
        model_question(settings.split(), ())


def test_a_step_that_cannot_be_predicted_says_why():
    def none(requests: list[Request]) -> list[Prediction]:
        return [Prediction("none", (note,), ())]

    note = "Untraceable: it reads the device"
    with pytest.raises(TuningError, match="cannot be predicted: Untraceable"):
        estimate.main(["timm:resnet50", "card=t4"], none)
    note = "WorkloadError: timm:resnet5 needs: pip install 'cardtune[timm]' (no module)"
    with pytest.raises(TuningError, match="needs") as raised:
        estimate.main(["timm:resnet5", "card=t4"], none)
    assert (raised.value.exit_code, raised.value.remedy) == (3, "pip install 'cardtune[timm]'")
