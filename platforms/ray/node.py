"""A node of a job on Ray, as the platform knows it."""

from typing import Any

from .agent_actor import Placed


class RayNode:
    """Its actor, where that is, and whether the controller wants it gone. `bundle`: its place in the job's group."""

    def __init__(self, name: str, actor: Any = None, bundle: int | None = None) -> None:
        self.name = name
        self.actor = actor
        self.placed: Placed | None = None
        self.bundle = bundle
        self.deleted = False

    @property
    def is_searching(self) -> bool:
        """Whether Ray looks for a machine for it outside of the group."""
        return self.actor is not None and self.placed is None and self.bundle is None
