"""The folders of clusters whose runs were killed are removed; those of the living and of others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tuning.workers.ray_cluster import sweep


def test_folders_of_dead_runs_are_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = {"dead": f"ct-{ended.pid}-abc", "ours": f"ct-{os.getpid()}-abc", "other": "ct-x-abc", "plain": "ct-abc"}
    for name in names.values():
        (tmp_path / name / "ray").mkdir(parents=True)
    assert sweep(tmp_path) == [tmp_path / names["dead"]]
    assert {p.name for p in tmp_path.iterdir()} == set(names.values()) - {names["dead"]}
