"""Training: the one loop, its knobs, and the workloads. Needs torch; knows nothing of Ray, Optuna or `tuning`."""
