"""The folder that Python finds first in a program of the user's, whose steps are counted from outside. No torch.

`sitecustomize.py` in it is imported by that program's Python alone, and imports nothing of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "DISABLED",
    "MLFLOW_TRACKING_URI": "",
}
"""Variables that keep trackers from writing a run for each of ours; MLflow's is set to a folder that is deleted."""

HOOKED = {
    **{name: name for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")},
    **{name: name for name in ("channels_last", "cudnn_benchmark", "tf32")},
    "fused_optimizer": "fused",
}
"""Knobs that are set from outside where they are no arguments of a command, and what the hook calls them."""
OF_THE_LOADER = frozenset(["num_workers", "prefetch_factor", "persistent_workers", "pin_memory"])
GIVEN = ("seed", "epochs", "folder")
"""Placeholders of a command that are no knobs: the training's seed, how many epochs it lasts, and a folder that is
deleted."""


OUT_FOLDER = "CARDTUNE_FOLDER"
"""The variable with the folder of a training that is kept: `python -m tuning train`. It has its trackers, too."""


def environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the environment of a program that is counted: the hook first, trackers off; `folder` is deleted later."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), env.get("PYTHONPATH", "")]))
    off = {} if OUT_FOLDER in env else {**TRACKERS_OFF, "MLFLOW_TRACKING_URI": str(folder)}
    return {**env, **off, "PYTHONPATH": path}
