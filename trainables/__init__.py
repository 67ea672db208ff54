"""Training: the one loop, its knobs, and the workloads. Needs torch; knows nothing of Ray, Optuna or `tuning`."""

BUILT_IN = ("nli", "pointer", "headpose", "temporal", "signals")
"""The workloads that come with it, each a module of that name."""
