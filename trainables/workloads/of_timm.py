"""A model of timm by its name, whose memory `python -m tuning estimate timm:NAME` predicts; nothing trains it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from trainables.workload import Config, Split, WorkloadError

try:
    import timm
except ImportError as error:
    raise WorkloadError(f"timm:NAME needs: pip install 'cardtune[timm]' ({error})") from None

SAMPLES = 64
"""More than are ever traced at once."""


class OfTimm:
    """Classifies images of the model's own size, with its own number of classes."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"loss": "min"}
    default_space: ClassVar[Mapping[str, Any]] = {"batch_size": [1]}
    options: ClassVar[Mapping[str, Any]] = {"model": "resnet50"}

    def model(self, config: Config) -> nn.Module:
        """Returns the model, without weights of anybody."""
        return cast(nn.Module, timm.create_model(_name(config), pretrained=False))

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns images that are all alike; they take the memory of one."""
        known = timm.get_pretrained_cfg(_name(config))
        image = timm.data.resolve_data_config({}, pretrained_cfg=known.to_dict() if known else {})["input_size"]
        return TensorDataset(torch.zeros(1).expand(SAMPLES, *image), torch.zeros(SAMPLES, dtype=torch.long))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the mean cross-entropy; of a model with several outputs that of the first."""
        out = model(batch[0])
        return F.cross_entropy(out[0] if isinstance(out, tuple | list) else out, batch[1])

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Returns the mean loss of the batches."""
        losses = [self.loss(model, batch).item() for batch in batches]
        return {"loss": sum(losses) / len(losses)}


def _name(config: Config) -> str:
    name = str(config.options["model"])
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        remedy = f"did you mean timm:{near[0]}?" if near else "timm.list_models() has the names"
        raise WorkloadError(f"timm:{name}: timm {timm.__version__} has no such model; try: {remedy}")
    return name


WORKLOAD = OfTimm()
