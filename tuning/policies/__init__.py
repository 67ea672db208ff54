"""Pure decisions: plain values in, a plain value out. Nothing here knows Ray, Optuna or torch."""
