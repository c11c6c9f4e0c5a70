"""The store that the roles of a job share, in the launcher of the whole job: it outlives every training process."""

import os
import socket
from pathlib import Path
from types import TracebackType

from ...communicators.key_value_store import KeyValueServer
from ...protocol.errors import ConfigurationError
from ...protocol.role_store import write_role_store
from ...protocol.types import Rendezvous
from ..joining.own_addresses import address_towards
from .group_files import GroupFounding, store_file

LIMIT_BYTES = 1 << 30  # of all keys and values; what is read has to be deleted
BACKLOG = 1024
LOOPBACK = "127.0.0.1"


class SharedStore:
    """Serves while it is entered."""

    def __init__(self, founding: GroupFounding, directory: Path) -> None:
        """Listen, and say where. Raises ConfigurationError."""
        host = _host(founding)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
            place = Rendezvous(host=host, port=self._listener.getsockname()[1], secret=founding.secret)
            write_role_store(store_file(directory), place)
        except OSError as error:
            raise ConfigurationError(f"the store of the roles cannot be opened on {host}: {error}.") from error
        self._server = KeyValueServer(self._listener, LIMIT_BYTES)
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        """Empty the store when all roles begin again: what lies there was for the steps before."""
        if self._attempt not in {0, attempt}:
            self._server.clear()
        self._attempt = attempt

    def __enter__(self) -> "SharedStore":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, and all connections to it."""
        self._server.close()


def _host(founding: GroupFounding) -> str:
    """Return the address of this machine for those of the roles' nodes. Raises ConfigurationError."""
    if founding.platform == "kubernetes":
        from ...platforms.kubernetes.names import POD_IP

        return os.environ[POD_IP]
    if founding.platform != "ray":
        return LOOPBACK
    cluster, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if cluster and port.isdigit() and "://" not in cluster:
        return address_towards(cluster, int(port))
    from ...platforms.ray.library import library

    return str(library().util.get_node_ip_address())
