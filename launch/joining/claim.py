"""Which of the processes on one machine runs the controller of an endpoint: the one that claims it."""

import contextlib
import socket

from ...protocol.endpoints import bound
from ...protocol.errors import ConfigurationError


class EndpointClaim:
    """Holds an endpoint for this process, until `close` or its end, before anything listens there.

    The claim is a name in the kernel, as far as the endpoint is seen: machines and containers with an address of their
    own do not disturb each other.
    """

    def __init__(self, name: socket.socket) -> None:
        self._name = name

    @classmethod
    def take(cls, endpoint: str) -> "EndpointClaim | None":
        """Claim an endpoint; None when another process has claimed it, or listens there. Raises ConfigurationError."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0midstep {endpoint}")
        except OSError:
            name.close()
            return None
        try:
            with contextlib.closing(bound(endpoint)) as probe:
                probe.listen()
        except OSError:
            name.close()
            return None
        except ConfigurationError:
            name.close()
            raise
        return cls(name)

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        self._name.close()
