"""Measurements; each program writes the `.jsonl` its table was drawn from. Sets Ray's environment before Ray is."""

import tuning.workers  # noqa: F401
