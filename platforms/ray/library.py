"""Ray itself. It is an extra: only jobs on Ray import it, and only from here."""

from importlib import import_module
from typing import Any

from ...protocol.errors import ConfigurationError


def library() -> Any:
    """Return the package ray. Raises ConfigurationError where it is not installed."""
    try:
        ray = import_module("ray")
        for part in ("ray.exceptions", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
            import_module(part)
    except ImportError as error:
        raise ConfigurationError(
            f"a job on Ray needs the package ray: pip install 'midstep[ray]' ({error})."
        ) from error
    return ray
