"""Endpoints of sockets: TCP anywhere, unix sockets only where no other user can reach them.

A unix socket has no keys: the permissions of its directory and file are what keeps others out.
"""

import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

MAX_IPC_PATH_BYTES = 100
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DIRECTORY_MODE = 0o700
_PROBE_S = 1.0
_IPC = "ipc://"
_TCP = "tcp://"
_ANY = "*"
_EVERY_ADDRESS = "0.0.0.0"
_FILE_MODE = 0o600


def ipc_path(endpoint: str) -> Path | None:
    """Return the path of a unix socket; None for TCP."""
    if endpoint.startswith(_TCP):
        return None
    path = endpoint.removeprefix(_IPC)
    if not endpoint.startswith(_IPC) or not path.startswith("/"):
        raise ConfigurationError(f"{endpoint} is no endpoint: write tcp://host:port or ipc:///absolute/path.")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigurationError(
            f"the path {path} is longer than the {MAX_IPC_PATH_BYTES} bytes that fit a unix socket: "
            "choose a shorter run directory."
        )
    return Path(path)


def require_keys(endpoint: str, keys: object | None) -> None:
    """Raise ConfigurationError for what is no endpoint, and for TCP without keys."""
    if ipc_path(endpoint) is None and keys is None:
        raise ConfigurationError(f"{endpoint} needs CURVE keys: only unix sockets go without.")


def prepare_ipc(path: Path) -> None:
    """Check that no other user can reach a socket file: its directory is the owner's alone."""
    folder = path.parent
    try:
        folder.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(f"the directory {folder} of a socket cannot be made: {error}.") from error
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        raise ConfigurationError(
            f"{folder} is open to others (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}): "
            "a socket in it would be too. chmod 700 it, or choose another run directory."
        )
    # Binding takes the path from the process that has it: only that of a dead process may be taken.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be examined: {error}. Remove it.") from error
    raise ConfigurationError(f"another process listens at {path}: is the job running already?")


def bound(endpoint: str) -> socket.socket:
    """Return a socket that is bound to an endpoint, and does not listen yet. Port 0 or `*`: any that is free.

    Raises OSError or ConfigurationError.
    """
    path = ipc_path(endpoint)
    family: socket.AddressFamily
    address: Any
    if path is None:
        host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
        if not port.isdigit() and port != _ANY:
            raise ConfigurationError(f"{endpoint} is no endpoint: write tcp://host:port or ipc:///absolute/path.")
        number = 0 if port == _ANY else int(port)
        name = _EVERY_ADDRESS if host == _ANY else host.removeprefix("[").removesuffix("]")
        family, _, _, _, address = socket.getaddrinfo(name, number, type=socket.SOCK_STREAM)[0]
    else:
        family, address = socket.AF_UNIX, str(path)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if path is None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            path.unlink(missing_ok=True)  # a dead process's leftover: see prepare_ipc
        made.bind(address)
        if path is not None:
            path.chmod(_FILE_MODE)
    except BaseException:
        made.close()
        raise
    return made


def file_at(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file of that name; None when there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def name_of(listener: socket.socket) -> str:
    """Return the endpoint that a socket is bound to."""
    if listener.family == socket.AF_UNIX:
        return f"{_IPC}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{_TCP}[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{_TCP}{host}:{port}"


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may: every client takes one, and zmq spins without."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
