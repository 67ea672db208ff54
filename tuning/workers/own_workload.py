"""The file of a user's workload, imported, as whoever reads a command line asks for it; torch comes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from trainables.knobs import KnobTable, use
from tuning.config.errors import ConfigError
from tuning.config.resolve import with_workload_defaults
from tuning.config.schema import StudyConfig
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


def with_own(config: StudyConfig) -> StudyConfig:
    """Returns the configuration with what the file of a user's workload says; its knobs are in use from here on.

    Raises ConfigError as `imported` does, and for what was typed and cannot be.
    """
    from trainables import workload, workload_files

    own, before = imported(config.workload.ref), workload_files.before_of(config.workload.ref)
    use(workload.table_of(own))
    epochs, options = workload_files.epochs_of(config.workload.ref), dict(getattr(own, "options", {}))
    return with_workload_defaults(config, own.default_space, options, before, epochs)
