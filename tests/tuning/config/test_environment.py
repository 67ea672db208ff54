"""How the process that decides loads numpy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.commands import ROOT

THREADS = """
import os
from tuning.config.environment import algebra_on_one_thread

algebra_on_one_thread()
import numpy as np

np.ones((600, 600)) @ np.ones((600, 600))
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize(("set_by_the_user", "said"), [(None, "1 None"), ("2", "2 2")])
def test_linear_algebra_has_one_thread_and_what_is_started_later_as_many_as_before(
    set_by_the_user: str | None, said: str
) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core has one thread at all events")
    own = {} if set_by_the_user is None else {"OPENBLAS_NUM_THREADS": set_by_the_user}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "OMP"))} | own
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == said.split()
