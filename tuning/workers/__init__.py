"""Workers, and the executors that run trials on them. Only `ray_*` modules may import Ray.

They find its environment set by this package.

Ray reads these at import and passes them to every process it starts. Measurements are in
docs/log/workers_ray.md; a value that the user has set stays.
"""

import os
import sys

from tuning.config.environment import ON_A_CPU

_RAY_ENVIRONMENT = {
    # The one switch found that makes every port of Ray listen on 127.0.0.1; tests/golden/test_ray.py holds it to that.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Ray's own loggers double the wall time of a short trial; trials.jsonl is the record.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # Ray's memory monitor ends the whole run where we classify one trial.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default of 15 lets any other process of the machine distort the throughput.
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    # The titles of Ray's agents would be written over their environment, by which they are found (leftovers.py).
    "SPT_NOENV": "1",
    **ON_A_CPU,
    "TOKENIZERS_PARALLELISM": "false",
    # Cards as NVML counts them. By default CUDA's first is the fastest, and what was read of a card was another's.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}

SHIPPED_ENVIRONMENT = ("GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM", "CUDA_DEVICE_ORDER")
"""Workers on the nodes of a user's cluster are given these too; the rest is for the one who starts Ray."""

_SET_HERE = {name for name in _RAY_ENVIRONMENT if name not in os.environ}
UNREAD_BY_RAY = (
    _SET_HERE & {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE"} if "ray" in sys.modules else set[str]()
)
"""The settings of listening and authentication that Ray did not read, as it was imported before this package."""
for _name, _value in _RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def join_another(*, insecure: bool) -> None:
    """Takes back what is for a Ray of our own alone, before Ray is imported to join a user's; what they set stays."""
    if "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in _SET_HERE:
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    if "RAY_AUTH_MODE" in _SET_HERE:
        os.environ["RAY_AUTH_MODE"] = "disabled" if insecure else "token"
