"""Lightning's Trainer as a custom loop: its loop trains, a callback counts, times, reports and ends it.

    def train(run):
        trainer = Trainer(**trainer_kwargs(run))
        trainer.fit(Net(run["learning_rate"]), Data(**run.loader()))

The module logs the OBJECTIVES by their names while it validates; a validation runs whenever a report is due. Import
`lightning.pytorch` or `pytorch_lightning` before this module: it uses the one that is imported.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

from torch import Tensor

from trainables import batches
from trainables.integrations import SECOND, expect_callback, refuse_resumed, refuse_twice
from trainables.knobs import asked_by
from trainables.own_run import Run
from trainables.plan import steps_to
from trainables.reports import Ended
from trainables.workload import WorkloadError

if "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ProgressBar
else:
    from pytorch_lightning import Callback, LightningModule
    from pytorch_lightning.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ProgressBar

_TRAINER_OFF = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Off by default: a Trainer's own reports and checkpoints would be part of every probe."""

_NEEDING = {
    "logger": (LearningRateMonitor, DeviceStatsMonitor),
    "enable_checkpointing": (Checkpoint,),
    "enable_progress_bar": (ProgressBar,),
}
"""By argument: callbacks that a Trainer refuses if it is off."""

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_NEVER = 2**62
"""A validation interval in micro-batches that is never reached."""


def trainer_kwargs(run: Run, *, pass_samples: int | None = None, **own: Any) -> dict[str, Any]:
    """Returns the arguments of a Trainer, as knobs set them; `own` are your further arguments.

    `pass_samples` is the size of an epoch, for data without a length. Raises WorkloadError for an own argument that a
    knob or the study sets, and for a callback that needs something that is off.
    """
    precision = _PRECISION[run["amp_dtype"]]
    for name in asked_by("around"):
        run[name]
    on_card = run.device.type == "cuda"
    arguments = {
        "accelerator": "gpu" if on_card else "cpu",
        "devices": [run.device.index or 0] if on_card else 1,
        "precision": precision,
        "max_epochs": -1,
        "val_check_interval": _NEVER,
        "check_val_every_n_epoch": None,
    }
    lengths = ("max_steps", "max_time", "min_epochs", "min_steps", "accumulate_grad_batches", "fast_dev_run")
    refuse_twice("trainer_kwargs", own, (*arguments, *lengths))
    callbacks = own.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    arguments = {**_TRAINER_OFF, **own, **arguments, "callbacks": [*callbacks, _StudyCallback(run, pass_samples)]}
    for callback, (needed, types) in itertools.product(callbacks, _NEEDING.items()):
        if arguments[needed] is False and isinstance(callback, types):
            raise WorkloadError(
                f"trainer_kwargs(run, callbacks=[{type(callback).__name__}(...)]): it needs {needed}, which is off "
                f"in a study: leave the callback out, or give trainer_kwargs(run, {needed}=True), for every probe and "
                "trial"
            )
    expect_callback(run, "keep the callbacks of trainer_kwargs(run, callbacks=[yours])", "trainer_kwargs(run)")
    return arguments


class _StudyCallback(Callback):  # type: ignore[misc]  # the package may be missing in a check of types
    """Reports the Trainer's progress to `run`, and tells the Trainer when to validate and when to end."""

    def __init__(self, run: Run, pass_samples: int | None) -> None:
        self._run, self._given, self._steps = run, pass_samples, 0
        self._usual = 1
        self._counts = batches.SampleCounts(None)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Sets the run's length; after the module's `setup` if the module has its own loader, which may need that."""
        if stage != "fit":
            return
        if self._run.is_done:
            raise Ended(SECOND)
        self._run.ends_with_pass = True
        if trainer.datamodule is not None or type(pl_module).train_dataloader is LightningModule.train_dataloader:
            self._set_length(trainer)
            return
        hook = pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            del pl_module.configure_optimizers
            self._set_length(trainer)
            return hook()

        pl_module.configure_optimizers = configure_optimizers

    def _set_length(self, trainer: Any) -> None:
        """Sets the Trainer's numbers of steps and epochs, for a schedule."""
        trainer.fit_loop.setup_data()
        trainer.accumulate_grad_batches = self._run.accumulation
        samples, micro = self._epoch_size(trainer)
        steps = steps_to(self._run.samples, samples, micro, trainer.accumulate_grad_batches)
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit_loop.max_epochs = math.ceil(self._run.samples / min(samples, trainer.num_training_batches * micro))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuses to resume from a checkpoint; after the end of the run, loading one for evaluation is allowed."""
        if not self._run.is_done:
            refuse_resumed(checkpoint["global_step"], "ckpt_path")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies knobs to the model, which is complete by now."""
        self._run.prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Registers model and optimiser, and starts the clock."""
        if not trainer.optimizers:
            raise WorkloadError("configure_optimizers of the LightningModule returned no optimiser")
        trainer.fit_loop.epoch_loop.max_steps = -1  # the run ends by its samples, not by steps
        for schedule in trainer.lr_scheduler_configs:  # ReduceLROnPlateau has no metric while no report is due
            schedule.strict = False
        self._run.shows(pl_module, *trainer.optimizers)
        samples, self._usual = self._epoch_size(trainer)
        self._run.begin(trainer.train_dataloader, samples)
        if pl_module.automatic_optimization:  # set again: `accumulation` depends on the loader, made by now
            trainer.accumulate_grad_batches = self._run.accumulation

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forgets metrics of an earlier epoch, as a schedule would act on them again; counts with the new loader."""
        trainer.callback_metrics.clear()
        self._counts = batches.SampleCounts(trainer.train_dataloader, self._usual)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Adds an epoch if epochs were shorter than expected: the run ends by its samples."""
        self._run.next_pass()
        if not self._run.is_done:
            trainer.fit_loop.max_epochs = max(trainer.max_epochs, trainer.current_epoch + 2)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Reports the arrival of a micro-batch."""
        self._run.took(self._counts.of(batch, batch_idx * self._usual))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Reports the end of forward and backward passes."""
        self._run.before_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reports the loss, a step if the optimiser has stepped, and the end of the micro-batch."""
        run, loss = self._run, outputs if isinstance(outputs, Tensor) else (outputs or {}).get("loss")
        if loss is not None:
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            run.saw_loss(loss if parts == 1 else loss * parts)
        if (steps := trainer.global_step) > self._steps:
            self._steps = steps
            run.step()
        if not run.evaluate_now:  # otherwise the micro-batch ends with the report
            run.passed()
        if run.evaluate_now and not trainer.enable_validation:
            raise WorkloadError(
                f"there is no validation that logs {', '.join(run.objectives)}: give validation_step and val_dataloader"
            )
        trainer.val_check_batch = 1 if run.evaluate_now else _NEVER
        if run.is_done:
            trainer.should_stop = True
            if not run.evaluate_now:
                trainer.limit_val_batches = 0  # otherwise the Trainer would validate at its end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports the logged objectives, if a report is due."""
        if not self._run.evaluate_now:
            return
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if missing := [name for name in self._run.objectives if name not in logged]:
            what = f"validation logged {sorted(logged)}, without {', '.join(missing)} of OBJECTIVES"
            raise WorkloadError(f"{what}: self.log({missing[0]!r}, ...) in validation_step")
        self._run.report(**{name: logged[name] for name in self._run.objectives})

    def _epoch_size(self, trainer: Any) -> tuple[int, int]:
        """Returns the samples of an epoch and of a micro-batch."""
        loader, count = trainer.train_dataloader, trainer.num_training_batches
        micro = int(getattr(loader, "batch_size", None) or self._run.loader()["batch_size"])
        if math.isinf(count) and self._given is None:
            what = f"a {type(loader).__name__} over data without a length"
            raise WorkloadError(f"{what}: trainer_kwargs(run, pass_samples=N) says how many samples one pass has")
        if math.isinf(count) or self._given is not None:
            return int(self._given or 0), micro
        try:
            return min(len(loader.sampler), count * micro), micro
        except (AttributeError, TypeError, NotImplementedError):
            return count * micro, micro
