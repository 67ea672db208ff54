"""transformers' Trainer as a loop of one's own: its loop runs, a callback counts, times, reports and ends it.

    def train(run):
        arguments = training_arguments(run, train_set, output_dir="trained", learning_rate=run["learning_rate"])
        trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=val_set, compute_metrics=metrics)
        trainer.add_callback(StudyCallback(run))
        trainer.train()

`metrics` returns the OBJECTIVES by their names; Trainer is asked for an evaluation whenever a report is due.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainables.integrations import SECOND, expect_callback, refuse_resumed, refuse_twice
from trainables.knobs import asked_by
from trainables.own_count import Ended
from trainables.own_run import Run
from trainables.plan import steps_to
from trainables.workload import LoopError, WorkloadError

_ARGUMENTS_OFF = {"report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True}
"""What `run` does in their place: a Trainer's own reports and checkpoints would be in every probe."""

_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"
"""The former is its name in later versions of transformers 5, which warn of the latter."""


def training_arguments(run: Run, train_set: Any, **own: Any) -> TrainingArguments:
    """Returns the arguments of a Trainer, those of knobs set; `own` are yours, and win where `run` sets none of them.

    A pass drops its last, smaller micro-batch; `StudyCallback` sees to it that an evaluation does not. Raises
    WorkloadError for an own argument that a knob sets, and for fewer samples than a micro-batch has.
    """
    knobs = {name: run[name] for name in ("amp_dtype", "activation_checkpointing", "compile", "tf32")}
    for name in asked_by("around"):
        run[name]
    loader, accumulation = run.loader(), run.accumulation
    micro = int(loader.pop("batch_size"))
    if len(train_set) < micro:
        raise WorkloadError(f"a micro-batch of {micro} is more than the {len(train_set)} training samples")
    found: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "auto_find_batch_size": False,
        "gradient_accumulation_steps": accumulation,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
        **{f"dataloader_{name}": value for name, value in loader.items()},
        "dataloader_drop_last": True,
        "bf16": knobs["amp_dtype"] == "bf16",
        "fp16": knobs["amp_dtype"] == "fp16",
        _CHECKPOINTING: knobs["activation_checkpointing"],
        "torch_compile": knobs["compile"] != "off",
        "max_steps": steps_to(run.samples, len(train_set) // micro * micro, micro, accumulation),
        "seed": run.seed,
        "use_cpu": run.device.type == "cpu",
    }
    if knobs["compile"] != "off":
        found["torch_compile_mode"] = knobs["compile"]
    if run.device.type == "cuda":
        found["tf32"] = knobs["tf32"]
    refuse_twice("training_arguments", own, found)
    made = TrainingArguments(**{**_ARGUMENTS_OFF, **own, **found})
    if made.n_gpu > 1:  # where several are visible a Trainer takes all, each with a micro-batch of its own
        made._n_gpu = 1
    expect_callback(run, "give Trainer callbacks=[StudyCallback(run)]", "training_arguments(run, train_set)")
    return made


class StudyCallback(TrainerCallback):
    """Tells `run` what a Trainer does, and the Trainer when to evaluate and when to end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: dict[str, float] = {}
        """Objectives of the evaluation at hand: of several data sets one comes after the other."""
        self._metrics: set[str] = set()
        """The names of all its metrics."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Shows model and optimiser; what came before is set-up. The loaders made from here on are to evaluate."""
        if self._run.is_done:
            raise Ended(SECOND)
        refuse_resumed(state.global_step, "resume_from_checkpoint")
        if not args.dataloader_drop_last and len(own["train_dataloader"].dataset) % args.per_device_train_batch_size:
            raise WorkloadError(
                "train() began a second time with the same arguments, whose last, smaller micro-batch is not dropped "
                "any more: make new ones by training_arguments(run, train_set) for each train()"
            )
        args.dataloader_drop_last = False
        optimizer = own["optimizer"]
        self._run.shows(own["model"], getattr(optimizer, "optimizer", optimizer))
        self._run.begin(own["train_dataloader"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """The micro-batches of a batch are there."""
        self._reported()
        self._run.took(args.per_device_train_batch_size)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """One of them is over, and the next begins."""
        self._run.passed()
        self._run.took(args.per_device_train_batch_size)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any
    ) -> None:
        """The passes are over."""
        self._run.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """The optimiser has stepped."""
        self._run.step()
        if self._run.evaluate_now:  # the micro-batch has passed once that is reported
            control.should_evaluate = True
        else:
            self._run.passed()
            self._rests(control)
        control.should_training_stop = control.should_training_stop or self._run.is_over

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """A pass is over."""
        self._run.next_pass()
        if not self._run.evaluate_now:
            self._rests(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """The last evaluation is over."""
        self._reported()

    def _reported(self) -> None:
        """Raises LoopError where the evaluation that was asked for lacked an objective."""
        if not self._run.evaluate_now:
            return
        missing = [name for name in self._run.objectives if name not in self._found]
        said = f"Trainer's evaluation gave {sorted(self._metrics)}, without {', '.join(missing)} of OBJECTIVES"
        if any(name.startswith("eval_") for name in missing):
            raise LoopError(f"{said}: leave out eval_ of a name in OBJECTIVES, which Trainer puts before each")
        raise LoopError(f"{said}: give Trainer compute_metrics=..., which returns {{{missing[0]!r}: ...}}")

    def _rests(self, control: TrainerControl) -> None:
        """Leaves out of what is timed what the script asks for itself."""
        if control.should_evaluate or control.should_save:
            self._run.rests()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports what `compute_metrics` returned, once each objective is there; those of a test set are none."""
        if args.dataloader_drop_last and args.dataloader_persistent_workers:  # before train(), which takes it again
            sampler: Any = getattr(own["eval_dataloader"], "batch_sampler", None)
            if hasattr(sampler, "drop_last"):
                sampler.drop_last = False
        found = {name.removeprefix("eval_"): value for name, value in own["metrics"].items()}
        self._metrics |= found.keys()
        self._found |= {name: found[name] for name in self._run.objectives if name in found}
        if len(self._found) == len(self._run.objectives):
            reported, self._found, self._metrics = self._found, {}, set()
            self._run.report(**reported)
        if control.should_save:
            self._run.rests()
