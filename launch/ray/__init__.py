"""A job on Ray: `midstep.ray.run`, and the actor that has its controller."""

from .job import RayResult, run

__all__ = ["RayResult", "run"]
