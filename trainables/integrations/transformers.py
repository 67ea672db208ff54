"""transformers' Trainer as a custom loop: its loop trains, a callback counts, times, reports and ends it.

    def train(run):
        arguments = training_arguments(run, train_set, output_dir="trained", learning_rate=run["learning_rate"])
        trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=val_set, compute_metrics=metrics)
        trainer.add_callback(StudyCallback(run))
        trainer.train()

`metrics` returns the OBJECTIVES by their names; the Trainer evaluates whenever a report is due.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainables.batches import length_of
from trainables.integrations import SECOND, expect_callback, refuse_resumed, refuse_twice
from trainables.knobs import asked_by
from trainables.own_run import Run
from trainables.plan import steps_to
from trainables.reports import Ended
from trainables.workload import LoopError, WorkloadError

_ARGUMENTS_OFF = {"report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True}
"""Off by default: a Trainer's own reports and checkpoints would be part of every probe."""

_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"
"""Later versions of transformers 5 use the first name, and warn about the second."""


def training_arguments(
    run: Run,
    train_set: Any,
    *,
    pass_samples: int | None = None,
    cls: type[TrainingArguments] = TrainingArguments,
    **own: Any,
) -> Any:
    """Returns the arguments of a Trainer, as knobs set them; `own` are your further arguments.

    `cls` is their class, such as Seq2SeqTrainingArguments; `pass_samples` is the size of an epoch of a stream. An epoch
    drops its last, smaller micro-batch; `StudyCallback` ensures that an evaluation drops nothing. Raises WorkloadError
    for an own argument that a knob sets, and if a micro-batch is larger than the training set.
    """
    knobs = {name: run[name] for name in ("amp_dtype", "activation_checkpointing", "compile", "tf32")}
    for name in asked_by("around"):
        run[name]
    loader, accumulation = run.loader(), run.accumulation
    micro = int(loader.pop("batch_size"))
    size = pass_samples or length_of(train_set)
    if size is None:
        what = f"a {type(train_set).__name__} has no length"
        raise WorkloadError(f"{what}: training_arguments(run, train_set, pass_samples=N) says how many samples it has")
    if size < micro:
        raise WorkloadError(f"a micro-batch of {micro} is more than the {size} training samples")
    run.says_epoch(pass_samples)
    arguments: dict[str, Any] = {
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
        "max_steps": steps_to(run.samples, size // micro * micro, micro, accumulation),
        "seed": run.seed,
        "use_cpu": run.device.type == "cpu",
    }
    if knobs["compile"] != "off":
        arguments["torch_compile_mode"] = knobs["compile"]
    if run.device.type == "cuda":
        arguments["tf32"] = knobs["tf32"]
    refuse_twice("training_arguments", own, arguments)
    result = cls(**{**_ARGUMENTS_OFF, **own, **arguments})
    if result.n_gpu > 1:  # a Trainer would use all visible devices, each with a whole micro-batch
        result._n_gpu = 1
    expect_callback(run, "give Trainer callbacks=[StudyCallback(run)]", "training_arguments(run, train_set)")
    return result


class StudyCallback(TrainerCallback):
    """Reports the Trainer's progress to `run`, and tells the Trainer when to evaluate and when to end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._objectives: dict[str, float] = {}
        """Objectives of the current evaluation; with several data sets they arrive one set after the other."""
        self._metrics: set[str] = set()
        """The names of all metrics of the current evaluation."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Registers model and optimiser, and starts the clock. All loaders made later are for evaluation."""
        if self._run.is_done:
            raise Ended(SECOND)
        refuse_resumed(state.global_step, "resume_from_checkpoint")
        size = length_of(own["train_dataloader"].dataset) or 0  # 0 of a stream
        if not args.dataloader_drop_last and size % args.per_device_train_batch_size:
            raise WorkloadError(
                "train() began a second time with the same arguments, whose last, smaller micro-batch is not dropped "
                "any more: make new ones by training_arguments(run, train_set) for each train()"
            )
        args.dataloader_drop_last = False
        optimizer = own["optimizer"]
        self._run.shows(own["model"], getattr(optimizer, "optimizer", optimizer))
        self._run.begin(own["train_dataloader"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports the arrival of a batch, and so of its first micro-batch."""
        self._check_report()
        self._run.took(args.per_device_train_batch_size)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports the end of a micro-batch and the start of the next."""
        self._run.passed()
        self._run.took(args.per_device_train_batch_size)

    def on_pre_optimizer_step(self, *_: Any, **own: Any) -> None:
        """Reports the end of forward and backward passes."""
        self._run.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports an optimiser step; asks for an evaluation if a report is due, and ends the training after its end."""
        self._run.step()
        if self._run.evaluate_now:  # the micro-batch ends with the report
            control.should_evaluate = True
        else:
            self._run.passed()
            self._pause_clock(control)
        control.should_training_stop = control.should_training_stop or self._run.is_over

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports the end of an epoch."""
        self._run.next_pass()
        if not self._run.evaluate_now:
            self._pause_clock(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Checks that the last evaluation was complete."""
        self._check_report()

    def _check_report(self) -> None:
        """Raises LoopError if a report is still due, so that the last evaluation lacked an objective."""
        if not self._run.evaluate_now:
            return
        missing = [name for name in self._run.objectives if name not in self._objectives]
        what = f"Trainer's evaluation gave {sorted(self._metrics)}, without {', '.join(missing)} of OBJECTIVES"
        if any(name.startswith("eval_") for name in missing):
            raise LoopError(f"{what}: leave out eval_ of a name in OBJECTIVES, which Trainer puts before each")
        raise LoopError(f"{what}: give Trainer compute_metrics=..., which returns {{{missing[0]!r}: ...}}")

    def _pause_clock(self, control: TrainerControl) -> None:
        """Pauses the clock for evaluations and checkpoints that the script itself asks for."""
        if control.should_evaluate or control.should_save:
            self._run.rests()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **own: Any) -> None:
        """Reports the objectives once all have arrived; metrics of a test set (prefix test_) are ignored."""
        if args.dataloader_drop_last and args.dataloader_persistent_workers:  # train() will use this loader again
            sampler: Any = getattr(own["eval_dataloader"], "batch_sampler", None)
            if hasattr(sampler, "drop_last"):
                sampler.drop_last = False
        values = {name.removeprefix("eval_"): value for name, value in own["metrics"].items()}
        self._metrics |= values.keys()
        self._objectives |= {name: values[name] for name in self._run.objectives if name in values}
        if len(self._objectives) == len(self._run.objectives):
            reported, self._objectives, self._metrics = self._objectives, {}, set()
            self._run.report(**reported)
        if control.should_save:
            self._run.rests()
