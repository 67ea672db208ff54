"""Accelerate's loop as a custom loop: its Accelerator sets number types and accumulation, `run` counts and ends it.

def train(run):
    accelerator = study_accelerator(run)
    loader = DataLoader(train_set, shuffle=True, **run.loader())
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, AdamW(net.parameters(), lr=run["learning_rate"]), loader)
    for inputs, labels in run.batches(loader):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        if run.evaluate_now:
            run.report(accuracy=evaluate(model))
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.integrations import refuse_twice
from trainables.own_run import Run

_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def study_accelerator(run: Run, **own: Any) -> StudyAccelerator:
    """Returns an Accelerator configured by the knobs; `own` are your further arguments.

    Raises WorkloadError for an own argument that a knob sets.
    """
    arguments = {
        "mixed_precision": _MIXED_PRECISION[run["amp_dtype"]],
        "cpu": run.device.type == "cpu",
        "dataloader_config": own.pop("dataloader_config", None) or DataLoaderConfiguration(),
    }
    arguments["dataloader_config"].non_blocking = run["non_blocking"]
    refuse_twice("study_accelerator", own, (*arguments, "gradient_accumulation_steps", "gradient_accumulation_plugin"))
    AcceleratorState._reset_state(reset_partial_state=True)  # process-wide state, perhaps of an earlier trial
    GradientState._reset_state()
    return StudyAccelerator(run, **own, **arguments)


class StudyAccelerator(Accelerator):  # type: ignore[misc]  # it is not typed
    """An Accelerator that reports models, losses and steps to `run`, and takes a step when the run ends."""

    def __init__(self, run: Run, **arguments: Any) -> None:
        self._run = run
        run.ends_with_pass = True
        self._model: nn.Module | None = None
        self._stepping: list[Optimizer] = []
        self._every = 0
        """Micro-batches of a step; 0 until the first batch, when they are known."""
        super().__init__(**arguments)

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Applies the knobs to the model; returns it wrapped by Accelerate."""
        if not evaluation_mode:
            model = self._run.prepare(model)
            self._model = self._model or model
            self._shows()
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Any:
        """Returns the optimiser wrapped by Accelerate; its steps are counted."""
        optimizer.register_step_pre_hook(self._run.before_step)
        optimizer.register_step_post_hook(self._run.step)
        self._stepping.append(optimizer)
        self._shows()
        return super().prepare_optimizer(optimizer, device_placement)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Returns a context that accumulates gradients; optimisers step after a batch, an epoch and the run."""
        if self._every == 0:
            self._every = self.gradient_accumulation_steps = self._run.accumulation
        if self._run.is_over:
            self.step = self._every - 1  # so that the current micro-batch is the last of its batch
        return cast(AbstractContextManager[None], super().accumulate(*models))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradients of a mean loss."""
        self._run.saw_loss(loss)
        super().backward(loss, **kwargs)

    def _shows(self) -> None:
        if self._model is not None and self._stepping:
            self._run.shows(self._model, *self._stepping)
