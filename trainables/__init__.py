"""Training: the one loop, its knobs, and the five workloads. Needs torch; knows nothing of Ray, Optuna, Hydra or `tuning`."""
