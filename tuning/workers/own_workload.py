"""The file of a user's workload, imported, as whoever reads a command line asks for it; torch comes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from trainables.knobs import KnobTable
from tuning.config.complete import Declared
from tuning.config.errors import ConfigError
from tuning.workers import user_code

if TYPE_CHECKING:
    from trainables.workload import OwnLoop, OwnWorkload


def imported(ref: str) -> OwnWorkload | OwnLoop:
    """Returns a user's workload; raises ConfigError for what it lacks, and for whatever its file raises."""
    from trainables import workload, workload_files  # here and below: `estimate` of one of ours does without torch

    try:
        return cast("OwnWorkload | OwnLoop", workload_files.load(ref))
    except workload.WorkloadError as error:
        said = str(error) if str(error).startswith(ref) else f"{ref}: {error}"
        raise ConfigError(
            f"workload={said}", remedy="python -m tuning init FOLDER writes two that are right"
        ) from error
    except Exception as error:  # whatever a user's file raises when it is imported
        lines = [f"{type(error).__name__}: {error}", *user_code.last_lines(error).splitlines()]
        said = "\n  ".join(lines)
        remedy = user_code.remedy(error) or "mend it; -v shows the whole traceback"
        raise ConfigError(f"workload={ref} cannot be imported: {said}", remedy=remedy) from error


def has_own_loop(ref: str) -> bool:
    """Returns whether the file has a `train(run)` in place of the contract; raises ConfigError as `imported` does."""
    from trainables import workload

    return isinstance(imported(ref), workload.OwnLoop)


def own_table(ref: str) -> KnobTable:
    """Returns the knobs of a user's workload; raises ConfigError as `imported` does."""
    from trainables import workload

    return workload.table_of(imported(ref))


def declared(ref: str) -> Declared:
    """Returns what the file of a user's workload declares; raises ConfigError as `imported` does."""
    from trainables import workload, workload_files

    own = imported(ref)
    before, epochs = workload_files.before_of(ref), workload_files.epochs_of(ref)
    return Declared(workload.table_of(own), own.default_space, dict(getattr(own, "options", {})), before, epochs)
