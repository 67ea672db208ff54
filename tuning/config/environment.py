"""The environment of a process that trains on a CPU, here and on any machine that takes a configuration."""

from __future__ import annotations

from collections.abc import Mapping

ON_A_CPU: Mapping[str, str] = {
    # How long OpenMP's threads spin before they sleep. By default so long that any other load on the cores makes a
    # 2-thread step take 10 to 40 times its time; never spinning (OMP_WAIT_POLICY=PASSIVE) costs a quarter of the speed.
    # With 5,000 temporal and headpose train 1.27 and 1.09 times as fast as with 1,000, which in turn is 1.7 to
    # 1.8 times as fast beside a busy process (docs/log/two_cores.md).
    "GOMP_SPINCOUNT": "5000",
}
"""Read when torch is loaded; a value that the user has set stays."""
