"""Variables of launchers: several processes are refused, those of one are kept from the workers."""

import pytest

from tuning.config.environment import of_one_process, require_one_process
from tuning.config.errors import ConfigError


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_launched_processes_are_refused(name):
    require_one_process({name: "1", "PATH": "/bin"})
    with pytest.raises(ConfigError, match=f"{name}=2") as caught:
        require_one_process({name: "2"})
    assert caught.value.exit_code == 2
    assert f"unset {name}" in caught.value.remedy


def test_workers_see_no_launcher():
    job = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "RANK": "0", "MASTER_ADDR": "node1", "SLURM_JOB_ID": "7"}
    assert of_one_process(job) == {"SLURM_JOB_ID": "7"}
