"""A model without a workload, whose memory `python -m tuning estimate` predicts; it is not trained, and has no weights.

`timm:NAME` classifies images. `hf:FOLDER` is a configuration of transformers with the library's own loss, in full, LoRA
or DoRA fine-tuning: a decoder of text on the next token, an encoder of text on two classes, one of images on its own.
All rows are of `max_length` tokens, so that there is no padding and no mask.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from trainables.frozen_linear import LAYERS, freeze_linears
from trainables.knob_columns import Knob, Options
from trainables.offline import without_hub_kernels
from trainables.our_knobs import FINE_TUNED, HF_OPTIONS
from trainables.workload import Config, Split, WorkloadError

FROZEN_DTYPES = {"fp32": torch.float32, "fp16": torch.float16} | dict.fromkeys(("bf16", *LAYERS), torch.bfloat16)
ALIKE, USUAL_LENGTH = 64, 512
"""More samples than are ever traced at once; the tokens of a row, unless the model takes fewer."""


class Described:
    """A workload of any such model; a batch is a dict of what its `forward` takes, and `labels`."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"loss": "min"}
    default_space: ClassVar[Mapping[str, object]] = {"batch_size": [1]}
    knobs: ClassVar[Mapping[str, Knob]] = FINE_TUNED
    options: ClassVar[Options] = {"source": "hf", "model": None} | dict.fromkeys(HF_OPTIONS)

    def model(self, config: Config) -> nn.Module:
        """Returns the model; with adapters its weights are frozen, in `base_dtype`, and the adapters are fp32."""
        name, knobs = config.options["model"], config.knobs
        if config.options["source"] == "timm":
            return cast(nn.Module, _timm(name).create_model(name, pretrained=False))
        about, auto, _ = _described(name)
        base = "fp32" if knobs.adapter == "none" else knobs.base_dtype
        model: Any = auto.from_config(
            about, dtype=FROZEN_DTYPES[base], attn_implementation=config.options.get("attention") or "sdpa"
        )
        model.config.use_cache = False  # a cache of keys serves generation only
        if knobs.adapter == "none":
            return cast(nn.Module, model)
        if base in LAYERS:
            freeze_linears(model.base_model, base)  # the output layer keeps its type, as in bitsandbytes
        with without_hub_kernels():
            import peft
        targets = config.options.get("targets") or "all-linear"
        targets = targets if targets == "all-linear" else targets.split("+")
        settings = peft.LoraConfig(r=knobs.adapter_rank, use_dora=knobs.adapter == "dora", target_modules=targets)
        try:
            return cast(nn.Module, peft.get_peft_model(model, settings))
        except ValueError as error:
            raise WorkloadError(f"targets: {str(error).partition('. ')[0]}; try: targets=q_proj+v_proj") from None

    def dataset(self, config: Config, split: Split) -> Any:
        """Returns samples that are all alike: an image of the model's size, or a row of the longest length."""
        name, length, label = config.options["model"], config.options.get("max_length"), torch.tensor(0)
        if config.options["source"] == "timm":
            timm = _timm(name)
            known = timm.get_pretrained_cfg(name)
            size = timm.data.resolve_data_config({}, pretrained_cfg=known.to_dict() if known else {})["input_size"]
            return [{"x": torch.zeros(size), "labels": label}] * ALIKE
        about, _, kind = _described(name)
        if kind == "image":
            sides = (about.image_size,) * 2 if isinstance(about.image_size, int) else tuple(about.image_size)
            return [{"pixel_values": torch.zeros(about.num_channels, *sides), "labels": label}] * ALIKE
        most = getattr(about.get_text_config(), "max_position_embeddings", None)
        length = length or min(USUAL_LENGTH, most or USUAL_LENGTH)
        if most and length > most:
            raise WorkloadError(f"max_length={length}; allowed: 1 to {most}, the positions that the model knows")
        tokens = torch.zeros(length, dtype=torch.long)
        return [{"input_ids": tokens, "labels": tokens if kind == "causal" else label}] * ALIKE

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss: the library's own, or the mean cross-entropy of the first output."""
        if "x" not in batch:
            return cast(Tensor, model(**batch).loss)
        out = model(batch["x"])
        return nn.functional.cross_entropy(out[0] if isinstance(out, tuple | list) else out, batch["labels"])

    def evaluate(self, model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Returns the mean loss."""
        return {"loss": torch.stack([self.loss(model, batch) for batch in batches]).mean().item()}

    @staticmethod
    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        """Returns the layers that activation checkpointing wraps: the longest list, or timm's `blocks`."""
        lists: list[Any] = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        lists += [m for m in (getattr(model, "blocks", None),) if isinstance(m, nn.Sequential)]
        return [*max(lists, key=len, default=())]


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise WorkloadError(f"timm:{name} needs: pip install 'cardtune[timm]' ({error})") from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        remedy = f"timm:{near[0]}" if near else "one of timm.list_models()"
        raise WorkloadError(f"timm:{name}: timm {timm.__version__} has no such model; try: {remedy}")
    return timm


@functools.cache
def _described(source: str) -> tuple[Any, Any, str]:
    """Returns the configuration at a path, the class of the library that makes its model, and what it is for."""
    try:
        with without_hub_kernels():
            import transformers
            from transformers.models.auto import modeling_auto as tables
    except ImportError as error:
        raise WorkloadError(f"hf:{source} needs: pip install 'cardtune[nli]' ({error})") from None
    try:
        about = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().splitlines()[0] if Path(source).exists() else "there is no such folder or file"
        raise WorkloadError(f"hf:{source}: {said}; try: the folder of a model, or its config.json") from None
    if not about.is_encoder_decoder:
        if about.model_type in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            return about, transformers.AutoModelForSequenceClassification, "text"
        if about.model_type in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return about, transformers.AutoModelForCausalLM, "causal"
        if about.model_type in tables.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and hasattr(about, "image_size"):
            return about, transformers.AutoModelForImageClassification, "image"
    allowed = "a decoder or an encoder of text, an encoder of images"
    raise WorkloadError(f"hf:{source} is a {about.model_type}; allowed: {allowed}; try: workload=FILE.py with its loss")


WORKLOAD = Described()
