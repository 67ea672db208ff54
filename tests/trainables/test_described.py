"""Models that are known by their configuration alone: what is trained of them, and that their step is traced."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.fakes import knobs_of
from trainables.workload import Config, WorkloadError
from trainables.workloads.described import WORKLOAD
from tuning.memory.tracing.step import Job, predict

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": 100, "max_position_embeddings": 64}


def described(folder: Path, about: Any, options: dict[str, Any] | None = None, **knobs: Any) -> Config:
    about.save_pretrained(folder)
    chosen = knobs_of(**{"adapter": "none", **knobs})
    return Config(chosen, {"source": "hf", "model": str(folder), **(options or {})})


@pytest.mark.parametrize(
    ("about", "batch"),
    [
        (transformers.LlamaConfig(**TEXT), {"input_ids": (64,), "labels": (64,)}),
        (transformers.BertConfig(**TEXT), {"input_ids": (64,), "labels": ()}),
        (transformers.ViTConfig(**SMALL, image_size=32), {"pixel_values": (3, 32, 32), "labels": ()}),
    ],
)
def test_each_kind_of_model_is_traced_on_its_own_batch(tmp_path, about, batch):
    config = described(tmp_path, about)
    assert {name: tuple(t.shape) for name, t in WORKLOAD.dataset(config, "train")[0].items()} == batch
    found = predict(Job(WORKLOAD, config), [1, 2])
    assert (found.confidence, found.notes) == ("traced", ())
    assert WORKLOAD.blocks(WORKLOAD.model(config))[0] is not None


def test_adapters_are_trained_beside_frozen_weights_of_their_type(tmp_path):
    config = described(
        tmp_path, transformers.LlamaConfig(**TEXT), {"targets": "q_proj+v_proj"}, adapter="lora", base_dtype="int8"
    )
    model = WORKLOAD.model(config)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".lora_" in name for name in trained)
    kinds = {str(p.dtype) for name, p in model.named_parameters() if "up_proj" in name}
    assert "torch.int8" in kinds
    assert str(model.base_model.model.lm_head.weight.dtype) == "torch.bfloat16"


def test_what_is_wrong_with_a_model_is_said(tmp_path):
    with pytest.raises(WorkloadError, match="no such folder or file"):
        WORKLOAD.model(Config(knobs_of(), {"source": "hf", "model": "absent"}))
    config = described(tmp_path / "bert", transformers.BertConfig(**TEXT), {"max_length": 65})
    with pytest.raises(WorkloadError, match="max_length=65; allowed: 1 to 64"):
        WORKLOAD.dataset(config, "train")
    config = described(tmp_path / "t5", transformers.T5Config())
    with pytest.raises(WorkloadError, match="is a t5; allowed: a decoder or an encoder of text"):
        WORKLOAD.model(config)
    config = described(tmp_path / "llama", transformers.LlamaConfig(**TEXT), {"targets": "nowhere"}, adapter="lora")
    with pytest.raises(WorkloadError, match="targets: "):
        WORKLOAD.model(config)
