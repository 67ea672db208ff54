"""Reads the settings of a user's workload file: its knobs, search space, options, BEFORE and EPOCHS.

The worker process that trains it later imports the file, so that an import which hangs, exits or crashes is one error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from trainables.knobs import KnobTable
from tuning.config.complete import Declared, check_plain
from tuning.config.errors import ConfigError
from tuning.config.schema import StudyConfig
from tuning.workers import doctor, user_code
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from trainables.workload import OwnLoop, OwnWorkload


class UserFile:
    """Reads a user's file in a worker process; `with` ends a process that no study has taken over."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._declared: Declared | None = None

    def begin(self, config: StudyConfig, started: float) -> None:
        """Starts the process for a study's workload of the user, which began at `started`, and does not wait for it.

        The import may take until the study's time is over, and idle as long as a worker that loads.
        """
        if self._worker is None and not config.workload.is_packaged and config.resume is None:
            doctor.choose_devices(config)
            self._worker = Worker(WorkerConfig(config.workload.ref, hang_s=config.search.hang_time_s))
            self._worker.deadline = started + (config.search.max_time_s or math.inf)
            self._worker.spawn()

    def declared(self, ref: str) -> Declared:
        """Returns what the file declares; raises ConfigError for what it lacks, and for whatever its import does."""
        if self._declared is None:
            self._worker = self._worker or Worker(WorkerConfig(ref))
            self._declared = self._worker.declared()
        return self._declared

    def table(self, ref: str) -> KnobTable:
        """Returns the knobs of the workload; raises ConfigError as `declared` does."""
        return self.declared(ref).table

    def worker(self, config: WorkerConfig) -> Worker:
        """Returns a worker of the process that has imported the file, if one has, else a new one."""
        worker, self._worker = self._worker, None
        if worker is None or worker.config.workload != config.workload:
            return Worker(config)
        if config.ranks > 1:  # its environment is another
            worker.end()
        worker.config = config
        return worker

    def __enter__(self) -> UserFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.__exit__()


def declared(ref: str) -> Declared:
    """Returns what the file of a user's workload declares, imported into this process; raises ConfigError for what it
    lacks, and for whatever it raises.
    """
    from trainables import workload, workload_files

    own = _imported(ref)
    before, epochs = workload_files.before_of(ref), workload_files.epochs_of(ref)
    options = dict(getattr(own, "options", {}))
    check_plain(ref, options)  # which another process could not read
    has_loop = isinstance(own, workload.OwnLoop)
    return Declared(workload.table_of(own), own.default_space, options, before, epochs, has_loop)


def _imported(ref: str) -> OwnWorkload | OwnLoop:
    from trainables import workload, workload_files  # here and above: a study's own process does without torch

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
