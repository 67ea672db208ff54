"""What the environment of a process that trains on a CPU holds, here and wherever a configuration is taken.

And how the process that decides loads numpy.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

ON_A_CPU: Mapping[str, str] = {
    # How long OpenMP's threads spin before they sleep. By default so long that any other load on the cores makes a
    # 2-thread step take 10 to 40 times its time; never spinning (OMP_WAIT_POLICY=PASSIVE) costs a quarter of the speed.
    # With 5,000 temporal and headpose train 1.27 and 1.09 times as fast as with 1,000, which in turn is 1.7 to
    # 1.8 times as fast beside a busy process (docs/log/two_cores.md).
    "GOMP_SPINCOUNT": "5000",
}
"""Read when torch is loaded; a value that the user has set stays."""

_ALGEBRA = "OPENBLAS_NUM_THREADS"


def algebra_on_one_thread() -> None:
    """Loads numpy with one thread for its linear algebra, unless it was loaded before or the user has set how many.

    The model of the search has small matrices, whose threads wait for each other while trials keep the cores busy: of
    100 slots a choice took up to 3 s, and takes 0.1 s with one. OpenBLAS reads the variable as it is loaded, so that
    what is started later does not inherit it.
    """
    if _ALGEBRA in os.environ:
        return
    os.environ[_ALGEBRA] = "1"
    try:
        importlib.import_module("numpy")
    finally:
        del os.environ[_ALGEBRA]
