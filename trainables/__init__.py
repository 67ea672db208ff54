"""Training: the one loop, its knobs, and the workloads. Needs torch; knows nothing of Ray, Optuna or `tuning`."""

from trainables.knob_columns import Knob

__all__ = ["Knob"]
