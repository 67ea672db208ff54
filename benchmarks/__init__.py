"""Measurements: each program writes the `.jsonl` its table was drawn from. Imports what sets Ray's environment first."""

import tuning.backends  # noqa: F401
