"""The discovery file: the endpoint of a job's controller, for processes that may outlive it.

A controller that takes over may have to listen elsewhere. Agents and the platform therefore ask a `Lookup` for its
present endpoint. On one machine that is a file in the run directory; nothing else here depends on this.
"""

from collections.abc import Callable
from pathlib import Path

from .errors import ConfigurationError

ENDPOINT_NAME = "controller.endpoint"
LOOKUP_S = 1.0  # a controller that has been silent for this long is looked up,
LOOKUP_EVERY_S = 0.2  # again and again
FOUND_S = 5.0  # by then every living agent has found a controller that has just started
GIVE_UP_S = 7 * 24 * 3600.0  # what is to be said to a controller is kept for so long: training continues without one
_TCP = "tcp://"

Lookup = Callable[[], str | None]
"""Return where the controller listens or last listened; None if that is not known. May raise ConfigurationError."""


def read_endpoint(run_directory: Path) -> str | None:
    """Return where the controller listens or last listened; None if none ever did.

    Raises ConfigurationError when the file cannot be read or holds no endpoint.
    """
    path = run_directory / ENDPOINT_NAME
    try:
        endpoint = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}. The next controller writes it again.") from error
    if not endpoint.startswith(_TCP):
        raise ConfigurationError(
            f"{path}: {endpoint[:80]!r} is no endpoint, one begins with {_TCP}. The next controller writes it again."
        )
    return endpoint
