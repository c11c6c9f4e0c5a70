"""Find out where controllers listen, and where the store of a job of roles is.

A controller that takes over may have to listen elsewhere. Agents and the platform therefore ask a `Lookup` for its
present endpoint. On one machine that is a file in the run directory; nothing else here depends on this. On several,
users write endpoints, and each address that a name stands for is tried.
"""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from .bounds import MOST_CONTROLLERS
from .errors import ConfigurationError
from .private_files import replace_file
from .types import Rendezvous

ENDPOINT_NAME = "controller.endpoint"
LOOKUP_S = 1.0  # a controller that has been silent for this long is looked up,
LOOKUP_EVERY_S = 0.2  # again and again
FOUND_S = 5.0  # by then every living agent has found a controller that has just started
GIVE_UP_S = 7 * 24 * 3600.0  # what is to be said to a controller is kept for so long: training continues without one
_TCP = "tcp://"
# Returns where the controller listens or last listened; None if that is not known. May raise ConfigurationError.
Lookup = Callable[[], str | None]
DEFAULT_PORT = 29_400  # torchrun's, with the c10d backend
MOST_ENDPOINTS = MOST_CONTROLLERS  # each is a connection, and a process has only so many descriptors
_LARGEST_PORT = 65_535
ROLE_STORE_NAME = "store.json"


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


def split(text: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port` or `[address]:port`, also after tcp://. Raises ConfigurationError."""
    rest = text.strip().removeprefix(_TCP)
    host, separator, port = rest.rpartition(":")
    if not separator or (host.count(":") and not host.endswith("]")) or rest.endswith("]"):
        host, port = rest, str(DEFAULT_PORT)  # no port: a name, or an address of IPv6 as it is
    host = host.removeprefix("[").removesuffix("]")
    if not _is_name(host) or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= _LARGEST_PORT:
        raise ConfigurationError(f"{text!r} is no endpoint: write HOST:PORT, or [ADDRESS]:PORT for IPv6.")
    return host, int(port)


def _is_name(host: str) -> bool:
    """Say whether a name server can be asked for a host: its labels have 1 to 63 letters. Addresses pass, too."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def endpoint(host: str, port: int) -> str:
    """Return the endpoint of a host and a port."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a list with commas. Raises ConfigurationError."""
    given = text.split(",")
    if len(given) > MOST_ENDPOINTS:
        raise ConfigurationError(f"{len(given)} endpoints of controllers: at most {MOST_ENDPOINTS} can be named.")
    return tuple(dict.fromkeys(endpoint(*split(each)) for each in given))


def resolved(host: str) -> tuple[str, ...]:
    """Return the addresses of a host; none if it is not known here. Asks the name server."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second for what is no name
        return ()
    return tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def each_address(given: Sequence[str]) -> tuple[str, ...]:
    """Return endpoints, with one for each address in the place of a name that stands for several.

    libzmq connects to the first address of a name only. Behind the name of a headless Service in Kubernetes are all
    controllers of a job, and one of them leads. A name with one address stays, and so does one that is not known.
    """
    found: dict[str, None] = {}
    for each in given:
        host, port = split(each)
        addresses = resolved(host)
        found.update(dict.fromkeys([each] if len(addresses) < 2 else [endpoint(one, port) for one in addresses]))
    return tuple(found)[:MOST_ENDPOINTS]


def write_role_store(path: Path, place: Rendezvous) -> None:
    """Say where the store is, and the secret that signs what lies there. Raises OSError."""
    replace_file(path, msgspec.json.encode(place) + b"\n")


def read_role_store(path: Path) -> Rendezvous:
    """Return where the store is. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}. `midstep run --roles` writes it.") from error
