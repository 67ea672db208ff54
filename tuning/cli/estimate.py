"""python -m tuning estimate: what a training step needs of a card's memory, before there is a card, and what fits.

Nothing is trained. The step is traced in a process of its own (`tuning.memory.predictor`), once for each memory group;
every micro-batch size follows from that.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from trainables.knobs import Knobs, Options, Scalar
from tuning.cli import replies
from tuning.cli.estimate_model import is_model, model_question, solved
from tuning.config.complete import Declared, with_declared
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.config.resolve import option_fault
from tuning.config.schema import StudyConfig
from tuning.memory.fitting import Fit, fit
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, default_cache, interrupt, predict_all
from tuning.report import estimate_lines
from tuning.report.estimate_lines import Estimated, Remedy
from tuning.report.estimate_request import CAPABILITY, Question, question
from tuning.workers import machine, nvml
from tuning.workers.doctor import choose_devices
from tuning.workers.own_workload import UserFile

DESCRIPTION = """\
Predicts what fits a card, without the card: the peak memory of a training step, by micro-batch, AMP dtype, activation
checkpointing and adapter.

  python -m tuning estimate workload=nli card=rtx4060
  python -m tuning estimate workload=mine.py card=rtx3090 'knobs.micro_batch_size=[1,2,4,8]'

A model without a workload, by its name in timm or by its configuration alone; 'batch_size=?', 'max_length=?' or
'card=?' finds the largest value, or the smallest card, that fits:

  python -m tuning estimate timm:resnet50 card=rtx3090
  python -m tuning estimate hf:FOLDER adapter=lora base_dtype=bf16 dtype=bf16 max_length=2048 'card=?'

If nothing can be predicted it says why, and how to measure it instead, and exits with 1.
"""
LEAST_SAVING_FRAC = 0.01
"""A remedy that saves less than a hundredth is not named. Each is tried on top of those before it."""

NO_BLOCKS = (
    "activation checkpointing does nothing here: the model has no ModuleList; to use it, return the layers to "
    "recompute from the workload's `blocks`"
)

Predict = Callable[[Sequence[Request]], list[Prediction]]


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    made = argparse.ArgumentParser(
        prog="python -m tuning estimate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("settings", nargs="*", metavar="key=value", help="as for python -m tuning.run")
    made.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="most seconds of tracing, 1 to 3600  [120]"
    )
    made.add_argument("--json", action="store_true", help="JSON on stdout")
    return made


def main(argv: Sequence[str], predicts: Predict | None = None) -> int:
    """Returns the exit code, 1 where nothing could be predicted; raises ConfigError for a wrong command line.

    `predicts` stands in for the predictor's process, for tests.
    """
    asked = parser().parse_intermixed_args(argv)
    if not 1 <= asked.timeout <= 3600:
        raise ConfigError(f"--timeout {asked.timeout:g}", allowed="1 to 3600 seconds", remedy="--timeout 300")
    began = time.monotonic()
    model = model_question(asked.settings, nvml.gpus()) if is_model(asked.settings) else None
    about = _asked(asked.settings) if model is None else model.about
    limit_s: float = asked.timeout
    ask = predicts or functools.partial(predict_all, table=about.table, timeout_s=limit_s, cache=default_cache())
    said = ""
    if model is not None:
        ask = functools.partial(_alone, ask, {})
        said, about = solved(model, ask)
    answer = answered(about, ask)
    if asked.json:
        print(replies.as_line(replies.of_estimate(answer, said, time.monotonic() - began)))
    else:
        console = Console(highlight=False)
        with console.capture() as captured:
            console.print(*filter(None, [said]), *estimate_lines.shown(answer, console.width), sep="\n")
        print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n")
    return 0 if any(row.cells for row in answer.rows) else 1


def _asked(settings: Sequence[str]) -> Question:
    """Returns the question about a workload."""
    with UserFile() as file:
        config = load(settings, file.table)
        if not config.workload.is_packaged:
            config = _with_own(config, file.declared(config.workload.ref))
    choose_devices(config)
    return question(config, nvml.gpus())


def _alone(predicts: Predict, known: dict[str, Prediction], requests: Sequence[Request]) -> list[Prediction]:
    """Returns predictions of batches of one micro-step, from `known` or added to it; raises ConfigError for what the
    model refuses.
    """
    missing = [one for one in requests if repr(one) not in known]
    found = predicts(missing) if missing else []
    _refuse_what_the_workload_refuses({}, found)
    known |= {repr(one): prediction.alone() for one, prediction in zip(missing, found, strict=True)}
    return [known[repr(one)] for one in requests]


def _with_own(config: StudyConfig, declared: Declared) -> StudyConfig:
    ref = config.workload.ref
    if declared.has_loop:
        what = f"workload={ref} has a loop of its own: its memory cannot be predicted, and nothing was measured"
        remedy = f"python -m tuning.run workload={ref} search.trials=0, which measures it in probes"
        raise ConfigError(what, remedy=remedy)
    return with_declared(config, declared)


def answered(about: Question, predicts: Predict) -> Estimated:
    """Returns the answer; raises ConfigError if the workload refuses its options.

    If not one sample fits in any row, `remedies` make the smallest row smaller.
    """
    predictions = _side_by_side([_request(about, {**about.knobs, **row}) for row in about.couplings], predicts)
    _refuse_what_the_workload_refuses(about.workload.options, predictions)
    rows = list(zip(about.couplings, predictions, strict=True))
    told = rows if "activation_checkpointing" in about.typed else _without_idle_checkpointing(rows)
    fits = [fit(row, found, about.micro_batches, about.card.cap_bytes, about.kernels) for row, found in told]
    known = [one for one in fits if one.cells]
    fitting = about.card.cap_bytes is None or any(one.largest or one.cells[0].verdict != "no" for one in known)
    notes = dict.fromkeys(note for one in fits for note in one.notes)
    remedies = [] if fitting or not known else list(_remedies(about, known, predicts))
    return Estimated(about, [*notes, *[NO_BLOCKS] * (len(told) < len(rows))], fits, remedies)


def _without_idle_checkpointing(
    rows: Sequence[tuple[Mapping[str, Scalar], Prediction]],
) -> Sequence[tuple[Mapping[str, Scalar], Prediction]]:
    """Returns the rows less those with activation checkpointing, where each of them has the step of that without."""
    plain = [(row, found) for row, found in rows if not row["activation_checkpointing"]]
    for row, found in rows:
        without = next((_made(other) for own, other in plain if {**own, "activation_checkpointing": True} == row), [])
        if row["activation_checkpointing"] and not (found.traces and _made(found) == without):
            return rows
    return plain


def _made(found: Prediction) -> list[tuple[str, int]]:
    """Returns operator and bytes of all that a step makes, in order; what dies at once does so in any order."""
    made = ((trace.ops, [size for _, size in trace.events if size >= 0]) for trace in found.traces)
    return [pair for ops, sizes in made for pair in zip(ops, sizes, strict=True)]


def _remedies(about: Question, fits: Sequence[Fit], predicts: Predict) -> Iterator[Remedy]:
    """Yields changes of the smallest row that save memory at one sample, those that change least first."""
    smallest = min(fits, key=lambda one: one.cells[0].needed_bytes)
    base = {**about.knobs, **smallest.knobs}
    together: dict[str, Scalar] = {}
    least = smallest.cells[0].needed_bytes
    for changes, cost in _cheaper(Knobs.of(base, about.table), about.read):
        knobs = {**base, **together, **changes}
        cells = fit(knobs, predicts([_request(about, knobs)])[0], [1], about.card.cap_bytes, about.kernels).cells
        if cells and cells[0].needed_bytes < least * (1 - LEAST_SAVING_FRAC):
            least, together = cells[0].needed_bytes, {**together, **changes}
            yield Remedy(together, cost, least, cells[0].verdict)
            if cells[0].verdict != "no":
                return


def _cheaper(own: Knobs, read: Sequence[str]) -> Iterator[tuple[dict[str, Scalar], str]]:
    """Yields changes that need less memory with what each costs."""
    if not own.activation_checkpointing:
        yield {"activation_checkpointing": True}, "about a third more compute"
    if own.amp_dtype == "fp32":
        yield {"amp_dtype": "bf16"}, "some precision; faster where the card has bf16"
    if "base_dtype" in read and own.base_dtype == "fp32" and own.adapter != "none":
        yield {"base_dtype": "bf16"}, "frozen weights in half the bytes"
        yield {"base_dtype": "int8"}, "frozen weights of eight bits"
        yield {"base_dtype": "nf4"}, "frozen weights of four bits; needs bitsandbytes"
    if own.as_dict().get("optimizer") == "adamw":
        yield {"optimizer": "adamw8bit", "fused_optimizer": False}, "moments of 8 bits; needs bitsandbytes"
    if "adapter" in read and own.adapter != "lora":
        yield {"adapter": "lora"}, "fewer weights are trained"
    if "hidden_size" in read and own.hidden_size >= 8:
        yield {"hidden_size": own.hidden_size // 2}, "a smaller model"


def _request(about: Question, knobs: Mapping[str, Scalar]) -> Request:
    capability = about.card.capability or CAPABILITY
    return Request(about.workload.ref, about.workload.options, knobs, about.kernels, capability)


def _side_by_side(requests: Sequence[Request], predicts: Predict) -> list[Prediction]:
    """Returns the predictions, traced in as many processes as there are cores; none is started for a single one."""
    count = max(1, min(machine.cores(), len(requests) // 2))
    parts = [requests[n::count] for n in range(count)]
    with ThreadPoolExecutor(max_workers=count) as pool:
        try:
            found = list(pool.map(predicts, parts))
        except BaseException:
            interrupt()
            raise
    return [found[n % count][n // count] for n in range(len(requests))]


def _refuse_what_the_workload_refuses(options: Options, predictions: Sequence[Prediction]) -> None:
    """Raises ConfigError where the workload says that its options or its data are wrong; that is no prediction."""
    for one in predictions:
        for note in one.notes if one.confidence == "none" else ():
            if note.startswith(("WorkloadError: ", "DataError: ")):
                raise option_fault(note.partition(": ")[2], options)
