"""A model by its configuration alone, whose memory `python -m tuning estimate hf:FOLDER` predicts; nothing trains it.

Full, LoRA or DoRA fine-tuning with the library's own loss: a decoder of text on the next token, an encoder of text on
two classes, an encoder of images on its own classes. Rows are all of `max_length` tokens, so that there is no padding
and no mask. No weights are read or made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainables.frozen_linear import LAYERS, freeze_linears
from trainables.knob_columns import Domain, Knob
from trainables.offline import without_hub_kernels
from trainables.our_knobs import FINE_TUNED
from trainables.workload import Config, Split, WorkloadError, options_of

try:
    with without_hub_kernels():
        import peft
        import transformers
        from transformers.models.auto import modeling_auto
except ImportError as error:
    raise WorkloadError(f"hf:FOLDER needs: pip install 'cardtune[nli]' ({error})") from None

DTYPES = {"fp32": torch.float32, "fp16": torch.float16} | dict.fromkeys(("bf16", *LAYERS), torch.bfloat16)
SAMPLES = 64
"""More than are ever traced at once."""
USUAL_LENGTH = 512


class Rows(Dataset[dict[str, Tensor]]):
    """Samples that are all alike, as the model's `forward` takes them."""

    def __init__(self, sample: Mapping[str, Tensor]) -> None:
        self._sample = dict(sample)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sample


class OfTransformers:
    """Fine-tunes whatever the configuration describes."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"loss": "min"}
    default_space: ClassVar[Mapping[str, Any]] = {"batch_size": [1]}
    knobs: ClassVar[Mapping[str, Knob]] = FINE_TUNED
    options: ClassVar[Mapping[str, Any]] = {
        "model": None,  # a folder with a config.json, or that file
        "max_length": None,  # tokens of a row; None: 512, or as many as the model takes
        "targets": "all-linear",  # the layers with adapters: so many names, joined by commas
    }
    domains: ClassVar[Mapping[str, Domain]] = {"max_length": Domain(int, low=1)}

    def model(self, config: Config) -> nn.Module:
        """Returns the model; with adapters its weights are frozen, in `base_dtype`, and the adapters in fp32."""
        options, knobs = options_of(self, config), config.knobs
        about, auto = _described(options["model"])
        base = "fp32" if knobs.adapter == "none" else knobs.base_dtype
        with torch.device("cpu"):
            model = auto.from_config(about, dtype=DTYPES[base], attn_implementation="sdpa")
        model.config.use_cache = False  # a cache of keys serves generation only
        if knobs.adapter == "none":
            return cast(nn.Module, model)
        if base in LAYERS:
            freeze_linears(model.base_model, base)  # the output layer keeps its type, as in bitsandbytes
        names = options["targets"]
        settings = peft.LoraConfig(
            r=knobs.adapter_rank,
            use_dora=knobs.adapter == "dora",
            target_modules=names if names == "all-linear" else names.split(","),
        )
        try:
            return cast(nn.Module, peft.get_peft_model(model, settings))
        except ValueError as error:
            raise WorkloadError(f"targets={names}: {str(error).partition('. ')[0]}") from None

    def dataset(self, config: Config, split: Split) -> Rows:
        """Returns rows of the longest length, or images of the model's size."""
        options = options_of(self, config)
        about, auto = _described(options["model"])
        if auto is transformers.AutoModelForImageClassification:
            sides = (about.image_size,) * 2 if isinstance(about.image_size, int) else tuple(about.image_size)
            return Rows({"pixel_values": torch.zeros(about.num_channels, *sides), "labels": torch.tensor(0)})
        text = about.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        length = options["max_length"] or min(USUAL_LENGTH, most or USUAL_LENGTH)
        if most and length > most:
            raise WorkloadError(f"max_length={length}: expected 1 to {most}, the model's max_position_embeddings")
        tokens = torch.zeros(length, dtype=torch.long)
        is_causal = auto is transformers.AutoModelForCausalLM
        return Rows({"input_ids": tokens, "labels": tokens if is_causal else torch.tensor(0)})

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss that the library computes of the labels."""
        return cast(Tensor, model(**batch).loss)

    def evaluate(self, model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Returns the mean loss of the batches."""
        losses = [self.loss(model, batch).item() for batch in batches]
        return {"loss": sum(losses) / len(losses)}

    @staticmethod
    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        """Returns the layers of the longest list, which activation checkpointing wraps."""
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        return list(max(lists, key=len, default=nn.ModuleList()))


@functools.cache
def _described(source: str) -> tuple[Any, Any]:
    """Returns the configuration at a path, and the class of the library that makes its model."""
    try:
        about = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = "there is no such folder or file" if not Path(source).exists() else str(error).strip().splitlines()[0]
        remedy = "the folder of a model, or its config.json; nothing is downloaded"
        raise WorkloadError(f"hf:{source}: {said}; try: {remedy}") from None
    kind, tables = about.model_type, modeling_auto
    if not about.is_encoder_decoder:
        if kind in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            return about, transformers.AutoModelForSequenceClassification
        if kind in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return about, transformers.AutoModelForCausalLM
        if kind in tables.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and hasattr(about, "image_size"):
            return about, transformers.AutoModelForImageClassification
    allowed = "a decoder or an encoder of text, an encoder of images"
    raise WorkloadError(f"hf:{source} describes a {kind}; allowed: {allowed}; try: workload=FILE.py, with its own loss")


WORKLOAD = OfTransformers()
