"""Finds a workload or a custom loop by name, module or file, and reports what its module lacks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from trainables import near_names
from trainables.knob_columns import Kind, Knob
from trainables.knobs import OF_THE_LOOP, KnobTable, Scalar
from trainables.our_knobs import BUILT_IN
from trainables.workload import REPLACING, OwnLoop, Workload, WorkloadError, table_of

_FILE_PREFIX = "cardtune_workload_"
_imports = 0


class ImportEnds(BaseException):
    """Raised when a script starts a study at its top level, while that study imports it as its workload's file."""


def load(ref: str) -> Workload | OwnLoop:
    """Returns the workload `ref` names: one of ours ("nli"), a dotted module, or a path to a .py file.

    The module must have a `WORKLOAD`, an instance or a class of the contract, or a function `train(run)` with a SPACE
    and OBJECTIVES. It may have a `BEFORE`, a dict of knobs that gains are measured against. Raises WorkloadError if
    something is missing, or a name is never read (`near_names`). A file is imported once a process, under a name made
    of its stem.
    """
    module = _module(ref)
    epochs_of(ref)
    declared = getattr(module, "WORKLOAD", None)
    if declared is None and callable(getattr(module, "train", None)):
        return load_own_loop(ref, module)
    if declared is None:
        raise WorkloadError(
            f"{ref} has no module-level WORKLOAD, and no def train(run); add one, such as WORKLOAD = MyWorkload()"
        )
    workload = declared() if isinstance(declared, type) else declared
    missing = [n for n in ("model", "dataset", "loss", "evaluate") if not callable(getattr(workload, n, None))]
    attributes = ("objectives",) if ref in BUILT_IN else ("objectives", "default_space")
    missing += [n for n in attributes if getattr(workload, n, None) is None]
    if missing:
        raise WorkloadError(f"{ref}: WORKLOAD lacks {', '.join(missing)}; the contract is in docs/workload.md")
    _check_objectives(f"{ref}: objectives", workload.objectives)
    if fault := near_names.fault_of_class(workload, module):
        raise WorkloadError(f"{ref}: {fault}")
    table_of(cast(Workload, workload))
    return cast(Workload, workload)


def load_own_loop(ref: str, module: Any) -> OwnLoop:
    """Returns the custom loop of a module; raises WorkloadError if a part is missing or a knob is wrong."""
    space, objectives = getattr(module, "SPACE", None), getattr(module, "OBJECTIVES", None)
    try:
        inspect.signature(module.train).bind(None)
    except TypeError:
        given = f"train{inspect.signature(module.train)}"
        raise WorkloadError(f"{ref} has a {given}, and needs a train(run): give that one another name") from None
    if not isinstance(space, Mapping) or not space:
        raise WorkloadError(f"{ref} has a train(run) and no SPACE; add one, such as SPACE = {{'batch_size': [16, 32]}}")
    if not isinstance(objectives, Mapping):
        raise WorkloadError(f"{ref} has a train(run) and no OBJECTIVES; add OBJECTIVES = {{'accuracy': 'max'}}")
    _check_objectives(f"{ref}: OBJECTIVES", objectives)
    if fault := near_names.fault_of_loop(module):
        raise WorkloadError(f"{ref}: {fault}")
    before = getattr(module, "BEFORE", None) or {}
    of_the_loop = KnobTable(hooks=REPLACING)
    # Settings of BEFORE that are neither searched nor knobs of the loop.
    space = {**space, **{name: [before[name]] for name in before if name not in space and name not in of_the_loop}}
    own = [name for name in space if name not in of_the_loop]
    try:
        knobs = {name: _own_knob(name, space[name], before) for name in own}
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{ref}: SPACE or BEFORE: {error}") from None
    searched = {name: _values_or_range(given) if name in own else given for name, given in space.items()}
    sizes = space.get("batch_size")
    if sizes is not None and "micro_batch_size" not in space:
        searched["micro_batch_size"] = max(sizes) if isinstance(sizes, list | tuple) else _end(sizes, "high")
    rules, options = getattr(module, "BASELINES", {}), getattr(module, "OPTIONS", {})
    loop = OwnLoop(module.train, objectives, searched, knobs, options, rules, str(module.__file__))
    table_of(loop)
    return loop


def _own_knob(name: str, given: Any, before: Mapping[str, Scalar]) -> Knob:
    """Returns the row of the user's own knob in SPACE; a learning knob, unless SPACE gives {"kind": "both", ...}.

    A system knob of the loop that the user's own optimiser replaces, such as fused_optimizer, stays a system knob: a
    study measures that it does not change what is learned.
    """
    searched = _values_or_range(given)
    values = tuple(searched) if isinstance(searched, list | tuple) else ()
    low, high = _end(searched, "low"), _end(searched, "high")
    default = before.get(name, values[0] if values else low)
    if isinstance(searched, Mapping) and "low" not in searched:
        raise ValueError(f"{name}={given!r}: give a list of values, or low and high")
    if not values and isinstance(searched, Mapping) and name not in before:
        is_whole = isinstance(low, int) and isinstance(high, int)
        middle = math.sqrt(low * high) if searched.get("log") else (low + high) / 2
        default = round(middle) if is_whole else middle
    if any(isinstance(value, float) for value in values) and not isinstance(default, str | bool):
        default = float(default)
    known = OF_THE_LOOP.get(name)
    if known is not None and known.kind == "system" and not isinstance(given, Mapping):
        return Knob(default, "system", known.domain, memory=known.memory, span=known.span, by_hand=known.by_hand)
    kind = given.get("kind", "learning") if isinstance(given, Mapping) else "learning"
    texts = tuple(dict.fromkeys((default, *values))) if isinstance(default, str) else ()
    return Knob(default, cast("Kind", kind), values=texts, shapes_model=kind == "both")


def _values_or_range(given: Any) -> Any:
    """Returns the values or the range of a knob in SPACE, without its kind."""
    if not isinstance(given, Mapping):
        return given
    return given["values"] if "values" in given else {n: v for n, v in given.items() if n != "kind"}


def _end(given: Any, which: str) -> Any:
    return given.get(which) if isinstance(given, Mapping) else given


def _check_objectives(what: str, objectives: Mapping[str, object]) -> None:
    if not objectives or any(v not in ("min", "max") for v in objectives.values()):
        raise WorkloadError(f"{what} must map each name to 'min' or 'max', got {dict(objectives)}")


def before_of(ref: str) -> Mapping[str, Scalar] | None:
    """Returns the `BEFORE` of a workload's module, the knobs that the user trains with today; None if it has none."""
    return cast("Mapping[str, Scalar] | None", getattr(_module(ref), "BEFORE", None))


def epochs_of(ref: str) -> float | None:
    """Returns the `EPOCHS` of a workload's module, the length of the user's training today; None if it has none.

    A command says its own (`integrations.program`). Raises WorkloadError unless it is a number above 0.
    """
    module = _module(ref)
    own = getattr(module, "train", None)
    source, name = (own, "epochs") if getattr(own, "is_outside", False) else (module, "EPOCHS")
    epochs = getattr(source, name, None)
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, numbers.Real) or not 0 < float(epochs) < math.inf:
        raise WorkloadError(f"{ref}: EPOCHS must be a number of epochs above 0, such as EPOCHS = 30, got {epochs!r}")
    return float(epochs)


def _module(ref: str) -> Any:
    if ref in BUILT_IN:
        return importlib.import_module(f"trainables.workloads.{ref}")
    if ref.endswith(".py"):
        path = Path(ref).resolve()
        if not path.is_file():
            raise WorkloadError(f"no workload file at {ref}")
        name = f"{_FILE_PREFIX}{path.stem}"
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise WorkloadError(f"{ref} cannot be imported as Python")
        module = importlib.util.module_from_spec(spec)
        _make_importable(path.parent)
        sys.modules[name] = module  # before exec, so that dataclasses and pickles in it resolve
        try:
            with _importing([str(path)]):
                spec.loader.exec_module(module)
        except ImportEnds:  # the module up to that line is the workload
            pass
        except SystemExit as error:
            del sys.modules[name]
            raise WorkloadError(
                f'{ref} calls sys.exit when it is imported; what is run belongs behind `if __name__ == "__main__":`'
            ) from error
        except BaseException:
            del sys.modules[name]
            raise
        return module
    try:
        with _importing(sys.argv):
            return importlib.import_module(ref)
    except ImportEnds:
        what = f'{ref} starts a run when it is imported; that belongs behind `if __name__ == "__main__":`'
        raise WorkloadError(what) from None
    except ModuleNotFoundError as error:
        if error.name is not None and ref.startswith(error.name):
            known_names = ", ".join(BUILT_IN)
            what = f"no workload {ref!r}; ours are {known_names}, or give a .py file"
            raise WorkloadError(f"{what}; a module is looked for from the folder in which this was started") from None
        raise


def is_importing() -> bool:
    """Returns whether a workload's module is being imported; a study started by it now would start itself again."""
    return _imports > 0


def forget_files() -> None:
    """Forgets the imported files, since they may have changed."""
    for name in [name for name in sys.modules if name.startswith(_FILE_PREFIX)]:
        del sys.modules[name]


@contextlib.contextmanager
def _importing(arguments: list[str]) -> Iterator[None]:
    """Replaces sys.argv during an import: a file that reads it must not see the study's command line."""
    global _imports
    argv_before, sys.argv = sys.argv, arguments
    _imports += 1
    try:
        yield
    finally:
        sys.argv = argv_before
        _imports -= 1


def _make_importable(folder: Path) -> None:
    """Lets a workload's file import the modules beside it, as under `python file.py`.

    They come after the standard library and before installed packages, so that its own `data.py` is imported.
    """
    if str(folder) not in sys.path:
        installed = (n for n, entry in enumerate(sys.path) if Path(entry).name in ("site-packages", "dist-packages"))
        sys.path.insert(next(installed, len(sys.path)), str(folder))
