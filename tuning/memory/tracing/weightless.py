"""Models without their weights: built on fake tensors where the workload allows, else built and then emptied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainables.workload import Config, Workload


class Weightless:
    """A workload whose model has parameters and buffers of the right shape and type, and no memory behind them."""

    def __init__(self, workload: Workload, fake: FakeTensorMode) -> None:
        self._workload, self._fake = workload, fake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def model(self, config: Config) -> nn.Module:
        """Returns the workload's model on fake CPU tensors.

        Built beside whoever counts operators: under both modes torch refuses the first parameter, and weights that are
        really drawn take 16 s for 1 B of them.
        """
        with pretrained_from_config(), _disable_current_modes():
            try:
                with self._fake:
                    model = self._workload.model(config)
            except Exception:
                # Some models look at their first weights, which a fake tensor does not have.
                model = self._workload.model(config)
            return moved(model, lambda t: t if isinstance(t, FakeTensor) else self._fake.from_tensor(t))


def moved(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns the model, each parameter and buffer replaced by what `change` makes of it; what is shared stays so."""
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in known:
                    with torch.no_grad():
                        new = change(old)
                    if isinstance(old, nn.Parameter) and new is not old:
                        new = nn.Parameter(new.detach(), old.requires_grad)
                    known[id(old)] = new, old
                cast(Any, table)[name] = known[id(old)][0]
    return model


@contextmanager
def _instead(name: str, made: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Puts `made(the old one)` in the place of from_pretrained of a class of transformers, if that is imported."""
    owner: Any = getattr(sys.modules.get("transformers"), name, None)
    if owner is None:
        yield
        return
    own = owner.__dict__["from_pretrained"]
    owner.from_pretrained = classmethod(made(own))
    try:
        yield
    finally:
        owner.from_pretrained = own


def pretrained_from_config() -> AbstractContextManager[None]:
    """Inside the block `from_pretrained` of transformers reads a model's configuration and none of its weights."""

    def made(_: Any) -> Callable[..., Any]:
        def from_config(cls: Any, source: Any, *args: Any, **how: Any) -> Any:
            wanted = {name: how[name] for name in ("attn_implementation", "dtype") if name in how}
            config = how.get("config") or cls.config_class.from_pretrained(source, local_files_only=True)
            model = cls._from_config(config, **wanted)
            model.eval()
            info: dict[str, Any] = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), frozenset())
            return (model, info) if how.get("output_loading_info") else model

        return from_config

    return _instead("PreTrainedModel", made)


class ByteTokenizer:
    """Stands in for a tokenizer that a model's folder does not hold: every byte is a token."""

    def __call__(self, text: str, *, truncation: bool = False, max_length: int | None = None, **how: Any) -> Any:
        """Returns the ids of one text."""
        found = list(text.encode())
        return {"input_ids": found[:max_length] if truncation else found}


def any_tokenizer(notes: set[str]) -> AbstractContextManager[None]:
    """Inside the block a folder without a tokenizer gets one of bytes, whose rows are longer than another's."""

    def made(own: Any) -> Callable[..., Any]:
        def from_pretrained(cls: Any, source: Any, *args: Any, **how: Any) -> Any:
            if Path(source).is_dir() and not any(Path(source).glob("*token*")) and not any(Path(source).glob("vocab*")):
                notes.add(
                    f"{source} holds no tokenizer: each byte was taken for a token, up to the longest row allowed"
                )
                return ByteTokenizer()
            return own.__func__(cls, source, *args, **how)

        return from_pretrained

    return _instead("AutoTokenizer", made)
