"""An exception in the user's own code: its last lines there, the hook that would help, a traceback of their files.

Their files are those that are neither ours nor installed.
"""

from __future__ import annotations

import itertools
import re
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

from tuning.config.errors import PreflightError, TuningError, UserCodeError
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.workers.worker_config import Failed

LAST_FRAMES = 2
"""The frames of their traceback that stand in the error; -v shows all."""

_HINTS = (
    (r"stack expects each tensor to be equal size|storage that is not resizable|equal size", "shapes"),
    (r"default_collate: batch must contain|each element in list of batch should be of equal", "types"),
    (r"grad can be implicitly created only for scalar outputs", "mean"),
    (r"does not require grad and does not have a grad_fn", "graph"),
    (r"backward through the graph a second time", "twice"),
    (r"does not tell how many samples it has", "samples"),
    (r"optimizer got an empty parameter list", "parameters"),
    (r"Torch not compiled with CUDA|No CUDA GPUs|on the same device|same device type", "device"),
    (r"cuda\.\w+Tensor.* should be the same", "device"),
    (r"device-side assert triggered", "assert"),
    (r"no terminal here", "terminal"),
    (r"calls sys\.exit", "exit"),
    (r"must be map-style", "iterable"),
    (r"\b(?:model|dataset|loss|evaluate)\(\) takes \d+ positional arguments? but", "signature"),
    (r"^Undefined: ", "metric"),
    (r"Tried to step \d+ times. The specified number of total steps", "schedule"),
)
_REMEDIES = {
    "shapes": "samples differ in shape: give `collate(samples)`, which pads them, and `length(sample)` for bucketing; "
    "in a loop of your own, DataLoader(collate_fn=...)",
    "types": "torch cannot stack such samples: give `collate(samples)`, which makes a batch of a list of them; "
    "in a loop of your own, DataLoader(collate_fn=...)",
    "mean": "`loss` must be a mean, shape (): loss.mean()",
    "graph": "`loss` must come from the model's output, without .detach(), .item() or no_grad()",
    "twice": "give weights with one loss to one optimiser, in two groups; `.detach()` what goes on to the next batch",
    "samples": "give the DataLoader a batch_size, or a batch a tensor first that has a row for each sample",
    "parameters": "`model` must return a module with a parameter that requires grad",
    "device": "the loop moves model and batches to the device: leave out .cuda() and .to(), and make new tensors with "
    "device=batch.device",
    "assert": "an index is out of its range, most often a label >= the number of classes; card=cpu says where",
    "terminal": "leave it out; python -m tuning train --from best.yaml runs in your terminal",
    "iterable": "give it __len__ and __getitem__; a stream of samples cannot be drawn from by index",
    "signature": "is `self` missing? model(self, config), dataset(self, config, split), loss(self, model, batch), "
    "evaluate(self, model, batches)",
    "schedule": "a scheduler is stepped once an optimiser step, not once a micro-batch: give it to run.prepare(model, "
    "optimizer, scheduler), or step it where run.backward(...) returned True; run.steps is its length",
    "metric": "mend how the value is made that `evaluate` returns, or run.report is given: a mean of nothing?",
    "exit": 'what is run belongs behind `if __name__ == "__main__":`',
}
_OURS = [str(Path(__file__).resolve().parents[2] / name) for name in ("tuning", "trainables")]
_INSTALLED = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
_WRAPPED = re.compile(r"(?:\b\w{1,80}: )?\bCaught \w+ in [^\n]*\nOriginal Traceback")
"""How torch begins what it makes of an exception in a loader's process, or in its thread that pins."""
_LAST_LINES = re.compile(r"(?:[\w.]*\.)?(\w+(?:: .*|\s*))", re.DOTALL)
"""Type and text at a traceback's end, the type without its module."""
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>[^\n]+)\n +(?P<text>[^\n]+)')


def failed(error: BaseException) -> Failed:
    """Returns the exception in words."""
    kind = type(error).__name__
    return Failed(
        kind=kind,
        text="it calls sys.exit" if isinstance(error, SystemExit) else in_words(error).removeprefix(kind).lstrip(": "),
        traceback=their_traceback(error),
        hook=_hook(error),
        last_lines=last_lines(error),
        remedy=remedy(error),
        outcome=str(oom.classify(error)),
        elsewhere=_is_of_machine(error),
    )


def error_of(failed: Failed, workload: str) -> TuningError:
    """Returns what a person is told of an exception in the process: of the machine, or of the workload's code."""
    said = f"{failed.kind}: {failed.text}".strip()
    if failed.outcome not in (Outcome.CRASH, Outcome.DATA):
        remedy = "a smaller model, or more memory: of other programs, or by card.memory_gib if that was typed"
        remedy = "no micro-batch fits: " * (failed.outcome == Outcome.OOM) + remedy
        if failed.kind == "CacheTooLarge":
            remedy = "knobs.ram_cache=false, or a larger search.max_time"
        what = f"the workload cannot be loaded or measured: {said}"
        error: TuningError = PreflightError(what[:500], remedy=remedy)
        error.__cause__ = RuntimeError(failed.traceback)
        return error
    of = Path(workload).name
    said = f"`{failed.hook}` of {of} {failed.text}" if failed.hook else f"{of} raised {said}"
    lines = [" ".join(said.split())[:400], *failed.last_lines.splitlines()]
    remedy = failed.remedy or "mend it; -v shows the whole traceback"
    return UserCodeError("\n  ".join(lines), remedy=remedy, traceback=failed.traceback, elsewhere=failed.elsewhere)


def last_lines(error: BaseException) -> str:
    """Returns the last frames of theirs, two lines each, the innermost last; "" where no file of theirs is in it."""
    return "\n".join(
        f'File "{_short(f.filename)}", line {f.lineno}, in {f.name}\n  {f.line}' for f in frames(error)[-LAST_FRAMES:]
    )


def in_words(error: BaseException) -> str:
    """Returns type and text of the error; of one that a loader's process raised what stands at its traceback's end."""
    said = f"{type(error).__name__}: {error}"
    if (found := _WRAPPED.search(said)) is None:
        return said
    lines = said.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    own = _LAST_LINES.fullmatch("\n".join(itertools.dropwhile(lambda line: line[:1].isspace(), lines)).strip())
    return said[: found.start()] + own[1].strip() if own else said


def in_a_line(error: BaseException) -> str:
    """Returns what the error says, where in their files, and what would help."""
    where, helps = place(error), remedy(error)
    return in_words(error)[:250] + f" ({where})" * bool(where) + f": {helps}" * bool(helps)


def place(error: BaseException) -> str:
    """Returns "mine.py:33" of the innermost frame of theirs, "" where there is none."""
    found = frames(error)
    return f"{Path(found[-1].filename).name}:{found[-1].lineno}" if found else ""


def frames(error: BaseException) -> list[FrameSummary]:
    """Returns the frames of their files, the innermost last, of the error or of the first of its causes with any."""
    for link in oom.chain(error, contexts=True):
        own = [f for f in traceback.extract_tb(link.__traceback__) if _is_theirs(f.filename)]
        # What a loader process raised comes as text.
        told = [
            FrameSummary(m["file"], int(m["line"]), m["name"], line=m["text"])
            for m in _FRAME.finditer(str(link))
            if _is_theirs(m["file"])
        ]
        if (told or own) and not _hook(link):
            return told or own
    return []


def remedy(error: BaseException) -> str:
    """Returns what would help, in words of the contract; "" where nothing is known of such an error."""
    text = "\n".join(f"{type(link).__name__}: {link}" for link in oom.chain(error, contexts=True))
    return next((_REMEDIES[key] for pattern, key in _HINTS if re.search(pattern, text)), "")


def their_traceback(error: BaseException) -> str:
    """Returns the traceback of what their code raised without our frames; the whole one where it has none of theirs."""
    while _hook(error) and error.__cause__ is not None:
        error = error.__cause__
    shown = TracebackException.from_exception(error)
    if frames(error):
        _leave_out_ours(shown)
    return "".join(shown.format())


def _is_of_machine(error: BaseException) -> bool:
    """Returns whether a package, a file or what lies below failed, which another machine may have."""
    of_files = any(isinstance(link, ImportError | OSError) for link in oom.chain(error, contexts=True))
    return of_files or oom.classify(error) is not Outcome.CRASH or not frames(error)


def _hook(error: BaseException) -> str:
    """Returns the method that a `trainables.workload.HookFailed` names, known by name: no torch is imported here."""
    return str(getattr(error, "hook", "")) if type(error).__name__ == "HookFailed" else ""


def _leave_out_ours(shown: TracebackException) -> None:
    shown.stack = StackSummary.from_list([f for f in shown.stack if not _is_in(f.filename, _OURS)])
    for link in (shown.__cause__, shown.__context__):
        if link is not None:
            _leave_out_ours(link)


def _is_theirs(file: str) -> bool:
    return not file.startswith("<") and not _is_in(file, [*_OURS, *_INSTALLED]) and "-packages/" not in file


def _is_in(file: str, folders: list[str]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _short(file: str) -> str:
    """Returns the path as one would type it here."""
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file
