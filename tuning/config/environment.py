"""The environment of processes that train: set for a CPU, and without the variables of a launcher."""

from __future__ import annotations

from collections.abc import Mapping

from tuning.config.errors import ConfigError

ON_A_CPU: Mapping[str, str] = {
    # How long OpenMP's threads spin before they sleep. By default so long that any other load on the cores makes a
    # 2-thread step take 10 to 40 times its time; never spinning (OMP_WAIT_POLICY=PASSIVE) costs a quarter of the speed.
    # With 5,000 temporal and headpose train 1.27 and 1.09 times as fast as with 1,000, which in turn is 1.7 to
    # 1.8 times as fast beside a busy process (docs/log/two_cores.md).
    "GOMP_SPINCOUNT": "5000",
}
"""Read when torch is loaded; a value that the user has set stays."""

PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes torchrun, srun or mpirun has started, in the environment of each."""
OF_A_LAUNCHER = (
    *PROCESSES, "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK",
)  # fmt: skip
"""Variables by which frameworks take a process for one of several, and then wait for the others."""


def require_one_process(env: Mapping[str, str]) -> None:
    """Raises ConfigError if a launcher has started several processes, each of which would begin a study of its own."""
    for name in PROCESSES:
        if env.get(name, "1") not in ("", "0", "1"):
            raise ConfigError(
                f"{name}={env[name]} is set, as by torchrun, srun or mpirun: cardtune starts the processes of a "
                "training itself",
                allowed="one process",
                remedy=f"unset {name}, or leave the launcher out; devices_per_trial=2 trains on two cards",
            )


def of_one_process(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of a launcher, such as those of a Slurm job of several tasks."""
    return {name: value for name, value in env.items() if name not in OF_A_LAUNCHER}
