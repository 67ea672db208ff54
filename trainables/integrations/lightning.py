"""Lightning's Trainer as a loop of one's own: its loop runs, a callback counts, times, reports and ends it.

    def train(run):
        trainer = Trainer(**trainer_kwargs(run))
        trainer.fit(Net(run["learning_rate"]), Data(**run.loader()))

The module logs the OBJECTIVES by their names while it validates; a validation runs whenever a report is due. The file
may import `lightning.pytorch` or `pytorch_lightning`: which of the two it has imported when it imports this is used.
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
from trainables.own_count import Ended
from trainables.own_run import Run
from trainables.plan import steps_to
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
"""What `run` does in their place: a Trainer's own reports and checkpoints would be in every probe."""

_NEEDING = {
    "logger": (LearningRateMonitor, DeviceStatsMonitor),
    "enable_checkpointing": (Checkpoint,),
    "enable_progress_bar": (ProgressBar,),
}
"""Callbacks that a Trainer refuses where this is off."""

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_NEVER = 2**62
"""Micro-batches until a validation that none of ours asks for."""


def trainer_kwargs(run: Run, *, pass_samples: int | None = None, **own: Any) -> dict[str, Any]:
    """Returns the arguments of a Trainer, those of knobs set; `own` are yours, and win where `run` sets none of them.

    `pass_samples` are those of one pass, for data that do not know them. Raises WorkloadError for an own argument that
    a knob or the study sets, and for a callback that needs what is off.
    """
    precision = _PRECISION[run["amp_dtype"]]
    for name in asked_by("around"):
        run[name]
    on_card = run.device.type == "cuda"
    found = {
        "accelerator": "gpu" if on_card else "cpu",
        "devices": [run.device.index or 0] if on_card else 1,
        "precision": precision,
        "max_epochs": -1,
        "val_check_interval": _NEVER,
        "check_val_every_n_epoch": None,
    }
    told = (*found, "max_steps", "max_time", "min_epochs", "min_steps", "accumulate_grad_batches", "fast_dev_run")
    refuse_twice("trainer_kwargs", own, told)
    callbacks = own.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    made = {**_TRAINER_OFF, **own, **found, "callbacks": [*callbacks, _StudyCallback(run, pass_samples)]}
    for one, (needed, kinds) in itertools.product(callbacks, _NEEDING.items()):
        if made[needed] is False and isinstance(one, kinds):
            raise WorkloadError(
                f"trainer_kwargs(run, callbacks=[{type(one).__name__}(...)]): it needs {needed}, which is off in a "
                f"study: leave the callback out, or give trainer_kwargs(run, {needed}=True), for every probe and trial"
            )
    expect_callback(run, "keep the callbacks of trainer_kwargs(run, callbacks=[yours])", "trainer_kwargs(run)")
    return made


class _StudyCallback(Callback):  # type: ignore[misc]  # what a check may lack
    """Tells `run` what a Trainer does, and the Trainer when to validate and when to end."""

    def __init__(self, run: Run, pass_samples: int | None) -> None:
        self._run, self._given, self._steps = run, pass_samples, 0
        self._usual = 1
        self._counts = batches.SampleCounts(None)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Says the run's length; with a module's own loader, which may need what its `setup` makes, behind that."""
        if stage != "fit":
            return
        if self._run.is_done:
            raise Ended(SECOND)
        self._run.ends_with_pass = True
        if trainer.datamodule is not None or type(pl_module).train_dataloader is LightningModule.train_dataloader:
            self._say_length(trainer)
            return
        theirs = pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            del pl_module.configure_optimizers
            self._say_length(trainer)
            return theirs()

        pl_module.configure_optimizers = configure_optimizers

    def _say_length(self, trainer: Any) -> None:
        """Says how many steps and passes there will be, for a schedule."""
        trainer.fit_loop.setup_data()
        trainer.accumulate_grad_batches = self._run.accumulation
        samples, micro = self._pass(trainer)
        steps = steps_to(self._run.samples, samples, micro, trainer.accumulate_grad_batches)
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit_loop.max_epochs = math.ceil(self._run.samples / min(samples, trainer.num_training_batches * micro))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is there to go on from; behind the end of the run one may be evaluated."""
        if not self._run.is_done:
            refuse_resumed(checkpoint["global_step"], "ckpt_path")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets what knobs change in the model, which is whole by now."""
        self._run.prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Shows model and optimiser; what came before is set-up."""
        if not trainer.optimizers:
            raise WorkloadError("configure_optimizers of the LightningModule returned no optimiser")
        trainer.fit_loop.epoch_loop.max_steps = -1  # it ends by the samples that were seen
        for schedule in trainer.lr_scheduler_configs:  # one on a plateau has no metric where no report is due
            schedule.strict = False
        self._run.shows(pl_module, *trainer.optimizers)
        samples, self._usual = self._pass(trainer)
        self._run.begin(trainer.train_dataloader, samples)
        if pl_module.automatic_optimization:  # once more: a loader asks for it when it is made
            trainer.accumulate_grad_batches = self._run.accumulation

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forgets what an earlier pass has logged, on which a schedule would move again; takes the pass's loader."""
        trainer.callback_metrics.clear()
        self._counts = batches.SampleCounts(trainer.train_dataloader, self._usual)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Goes on where the passes were shorter than was said: the run ends by its samples."""
        self._run.next_pass()
        if not self._run.is_done:
            trainer.fit_loop.max_epochs = max(trainer.max_epochs, trainer.current_epoch + 2)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch is there."""
        self._run.took(self._counts.of(batch, batch_idx * self._usual))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The passes are over."""
        self._run.before_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The micro-batch is over, and the optimiser may have stepped."""
        run, loss = self._run, outputs if isinstance(outputs, Tensor) else (outputs or {}).get("loss")
        if loss is not None:
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            run.saw_loss(loss if parts == 1 else loss * parts)
        if (steps := trainer.global_step) > self._steps:
            self._steps = steps
            run.step()
        if not run.evaluate_now:  # the micro-batch has passed once that is reported
            run.passed()
        if run.evaluate_now and not trainer.enable_validation:
            raise WorkloadError(
                f"there is no validation that logs {', '.join(run.objectives)}: give validation_step and val_dataloader"
            )
        trainer.val_check_batch = 1 if run.evaluate_now else _NEVER
        if run.is_done:
            trainer.should_stop = True
            if not run.evaluate_now:
                trainer.limit_val_batches = 0  # or it would validate because it ends

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports what was logged."""
        if not self._run.evaluate_now:
            return
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if missing := [name for name in self._run.objectives if name not in found]:
            said = f"validation logged {sorted(found)}, without {', '.join(missing)} of OBJECTIVES"
            raise WorkloadError(f"{said}: self.log({missing[0]!r}, ...) in validation_step")
        self._run.report(**{name: found[name] for name in self._run.objectives})

    def _pass(self, trainer: Any) -> tuple[int, int]:
        """Returns the samples of a pass and of a micro-batch of it."""
        loader, count = trainer.train_dataloader, trainer.num_training_batches
        micro = int(getattr(loader, "batch_size", None) or self._run.loader()["batch_size"])
        if math.isinf(count) and self._given is None:
            said = f"a {type(loader).__name__} over data without a length"
            raise WorkloadError(f"{said}: trainer_kwargs(run, pass_samples=N) says how many samples one pass has")
        if math.isinf(count) or self._given is not None:
            return int(self._given or 0), micro
        try:
            return min(len(loader.sampler), count * micro), micro
        except (AttributeError, TypeError, NotImplementedError):
            return count * micro, micro
