"""Our workloads and a decoder without weights, traced: on fake CUDA tensors in a process, and against the CPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainables import loop
from trainables.knobs import LOOP, Knobs, Scalar
from trainables.our_knobs import EVERY
from trainables.resident import Resident
from trainables.workload import Config
from trainables.workload_files import load
from tuning.memory.peaks import alone_bytes, highest
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, predict_all
from tuning.memory.tracing.step import Job, predict

pytestmark = [pytest.mark.workload, pytest.mark.timeout(600)]

SMALL: dict[str, dict[str, Any]] = {
    "nli": {"max_train_samples": 40, "max_val_samples": 8, "max_length": 16, "layers": 1},
    "pointer": {"train_samples": 40, "val_samples": 8},
    "headpose": {"heads": 64},
    "temporal": {"timeframes": "1h:8 4h:4 1D:4"},
    "signals": {"max_train_samples": 200},
}
KNOBS: dict[str, list[dict[str, Scalar]]] = {
    "nli": [{"amp_dtype": "bf16", "activation_checkpointing": True}, {"base_dtype": "int8"}, {"base_dtype": "nf4"}],
    "pointer": [{"amp_dtype": "bf16", "device_augmentation": True}],
    "headpose": [{"channels_last": True, "device_augmentation": True}],
    "temporal": [{}, {"architecture": "transformer", "amp_dtype": "bf16"}],
    "signals": [{"encoder_frac": 0.5}, {"sequence_packing": True}],
}
CONVOLUTIONAL, RECURRENT = {"headpose"}, {"signals"}
"""Those whose kernels have workspaces on a card that follow a model, and such as no trace sees."""
DECODER = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 16,
}


@pytest.mark.parametrize("name", SMALL)
def test_the_cpus_peak_is_what_a_virtual_card_counts(name: str) -> None:
    workload = load(name)
    for knobs in KNOBS[name]:
        config = Config(Knobs.of(knobs, EVERY), SMALL[name])
        prediction = predict(Job(workload, config), (32,))
        assert prediction.confidence == "traced", prediction.notes
        (trace,) = prediction.traces
        several, alone = loop.peaks(Resident(workload), config.with_knobs(micro_batch_size=32), 32)
        # Equal but for pointer in bf16, which is 0.24 % under.
        assert highest(trace.events)[1] == pytest.approx(several, rel=0.003), knobs
        assert alone_bytes(trace) == pytest.approx(alone, rel=0.003), knobs


ATTENTION: list[dict[str, Scalar]] = [
    {"architecture": "transformer", "amp_dtype": "bf16"},
    {"architecture": "transformer"},
    {"architecture": "transformer", "amp_dtype": "bf16", "sdpa_backend": "math"},
    {"architecture": "transformer", "amp_dtype": "bf16", "sdpa_backend": "efficient"},
]
OPTIMIZERS: list[dict[str, Scalar]] = [{}, {"fused_optimizer": True}, {"optimizer": "adamw8bit"}]
DECODED: list[dict[str, Scalar]] = [
    *({"optimizer": "adamw8bit"}, {"adapter": "dora"}, {"activation_checkpointing": True}, {"adapter": "lora"})
]
MADE = ("silu", "full", "tensor", "as_tensor", "new_tensor", "nested", "drawn")
MAKES = """
MADE = {
    "silu": lambda x: torch.nn.functional.silu(x.detach().requires_grad_()),
    "full": lambda x: torch.full((2000,), 1.0, device=x.device),
    "tensor": lambda x: torch.tensor([1.0] * 2000, device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1.0] * 2000, device="cuda"),
    "new_tensor": lambda x: x.new_tensor([1.0] * 2000),
    "nested": lambda x: torch.nested.nested_tensor([torch.ones(9)], device=x.device),
    "drawn": lambda x: torch.rand(9, generator=torch.Generator(x.device), device=x.device),
}


class Weighted(Moons):
    knobs = {**Moons.knobs, "made": Knob("full", "both", values=tuple(MADE), shapes_model=True)}

    def model(self, config):
        self.made = config.knobs.made
        return super().model(config)

    def loss(self, model, batch):
        return super().loss(model, batch) * MADE[self.made](batch[0]).mean()


WORKLOAD = Weighted()
"""


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Prediction]]:
    """What each test asks of a card's kernels, traced in one process; of temporal those of `ATTENTION` last."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "config.json").write_text(json.dumps(DECODER))
    (folder / "weighted.py").write_text(Path("tests/data/mine.py").read_text() + MAKES)
    decoder = {**SMALL["nli"], "model": str(folder)}
    # First, as peft looks only once for bitsandbytes, in the place of whose optimiser a trace has its own.
    asked = {"decoder": [Request("nli", decoder, one, "cuda") for one in DECODED]}
    asked |= {name: [Request(name, SMALL[name], one, "cuda") for one in KNOBS[name]] for name in SMALL}
    asked["temporal"] += [Request("temporal", SMALL["temporal"], one, "cuda") for one in ATTENTION]
    asked["mine"] = [Request("tests/data/mine.py", {"hidden": 4096}, one, "cuda") for one in OPTIMIZERS]
    asked["weighted"] = [Request(str(folder / "weighted.py"), {}, {"made": name}, "cuda") for name in MADE]
    requests = [one for of_one in asked.values() for one in of_one]
    found = iter(
        predict_all(requests, LOOP, timeout_s=540.0, cache=None)
    )  # each workload has its own at their defaults
    return {name: [next(found) for _ in of_one] for name, of_one in asked.items()}


@pytest.mark.parametrize("name", SMALL)
def test_every_workload_is_traced_with_a_cards_kernels(name: str, predictions: dict[str, list[Prediction]]) -> None:
    for index, found in enumerate(predictions[name]):
        is_unseen = name in RECURRENT or (name, index) == ("temporal", 0)
        seen = "workspaces modelled" if name in CONVOLUTIONAL else "traced"
        assert found.confidence == ("workspaces unseen" if is_unseen else seen), found.notes
        one, other = found.traces
        assert one.ops == other.ops
        assert found.peak(64) is not None


def test_attention_takes_the_kernel_that_a_card_would(predictions: dict[str, list[Prediction]]) -> None:
    def kernels_of(found: Prediction) -> set[str]:
        return set(re.findall(r"aten\._scaled_dot_product_(\w+?)_attention", " ".join(found.traces[0].ops)))

    kernels = [kernels_of(found) for found in predictions["temporal"][-len(ATTENTION) :]]
    assert kernels == [{"flash"}, {"efficient"}, set(), {"efficient"}]


def test_the_optimisers_kernels_differ_in_their_temporaries(predictions: dict[str, list[Prediction]]) -> None:
    def of_optimiser(found: Prediction) -> set[str]:
        return {op for op in found.traces[0].ops if "foreach" in op or "fused" in op}

    foreach, fused, eight = predictions["mine"]
    assert any("_foreach_sqrt" in op for op in of_optimiser(foreach))
    assert not of_optimiser(fused)
    state = [
        sum(size for i, size in found.traces[0].events if size >= 0 and found.traces[0].categories[i] == "optimizer")
        for found in (foreach, eight)
    ]
    assert state[1] < 0.4 * state[0]


def test_a_tensor_that_a_loss_makes_of_numbers_counts(predictions: dict[str, list[Prediction]]) -> None:
    silu, full, *others, nested, drawn = predictions["weighted"]
    assert "aten.silu_backward.default" in silu.traces[0].ops, "a card has one kernel for it"
    assert full.confidence == "traced", full.notes
    births = [[size for trace in one.traces for _, size in trace.events if size >= 0] for one in (full, *others)]
    assert births == births[:1] * 4
    for refused, named in ((nested, "aten::empty_strided"), (drawn, "torch.Generator")):
        (said,) = refused.notes
        assert said.startswith(f"{named} (weighted.py:")
        assert "--kernels cpu" in said


def test_a_decoder_without_weights_is_traced_with_its_adapters(predictions: dict[str, list[Prediction]]) -> None:
    found = predictions["decoder"]
    for one in found:
        assert one.confidence == "traced", one.notes
        assert any("no tokenizer" in note for note in one.notes)
    _, dora, checkpointed, lora = found
    assert checkpointed.peak(64).live_bytes < dora.peak(64).live_bytes
    norms = [sum("vector_norm" in op for op in one.traces[0].ops) for one in (dora, lora)]
    assert norms[0] > norms[1], "DoRA takes the norm of its columns in each forward pass"
    assert dora.peak(1).live_bytes > lora.peak(1).live_bytes


def test_without_a_compiler_the_cpus_kernels_are_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    (found,) = predict_all([Request("tests/data/mine.py", {}, {}, "cuda")], LOOP, timeout_s=240.0, cache=None)
    assert found.confidence == "fallback"
    assert "no C++ compiler" in found.notes[0]
    assert len(found.traces) == 2
