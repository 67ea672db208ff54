"""Parts of cardtune for a Ray Tune script of your own: `docs/ray_tune.md` has a whole one.

    from tuning.ray import KnownSpeedSearcher, OomAwareScheduler, measured, report

They work in a plain `tune.Tuner` with a function trainable, in your Ray, and set nothing in its environment.
"""

from tuning.ray.scheduler import OomAwareScheduler
from tuning.ray.searcher import KnownSpeedSearcher, RayPick
from tuning.ray.training import measured, report

__all__ = ["KnownSpeedSearcher", "OomAwareScheduler", "RayPick", "measured", "report"]
