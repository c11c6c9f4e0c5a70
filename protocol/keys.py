"""The CURVE keys of one job: which processes may connect to its controller, and as which identity.

Made once per job by the launcher. A key stands for one identity, so a node cannot report for another one::

    <directory>/server/server.json          the controller's key pair
    <directory>/server/clients/<hex key>    one file per admitted public key, holding its identity
    <directory>/<identity>/client.json      a client's key pair and the controller's public key

A client's folder can be copied to another host; the server's stays where the controller runs. A client that is
added or removed later counts from its next connection on, without a word to the running controller. Whatever others
could read is refused.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
import zmq
from zmq.utils import z85

from .errors import ConfigurationError
from .private_files import DIRECTORY_MODE, FILE_MODE, replace_file

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SERVER = "server"
_KEY_BYTES = 40  # a CURVE key in Z85

_T = TypeVar("_T", bound=msgspec.Struct)


class ServerKeys(msgspec.Struct, frozen=True):
    """The controller's key pair, and where the admitted clients are listed. Keys are Z85 text."""

    public: str
    secret: str
    clients: str

    def __repr__(self) -> str:
        return f"ServerKeys(public={self.public!r}, clients={self.clients!r})"

    def identity_of(self, public_key: bytes) -> str | None:
        """Return the identity to which a key of 32 raw bytes belongs; None: not admitted. Reads one small file."""
        try:
            return (Path(self.clients) / public_key.hex()).read_text("utf-8") or None
        except FileNotFoundError:
            return None


class ClientKeys(msgspec.Struct, frozen=True):
    """A client's key pair, its identity, and the public key of the controller. Z85 text."""

    identity: str
    public: str
    secret: str
    server_public: str

    def __repr__(self) -> str:
        return f"ClientKeys(identity={self.identity!r}, public={self.public!r})"


class _KeyPair(msgspec.Struct, frozen=True):
    public: str
    secret: str


class JobKeys:
    """Makes and reads the keys of a job. Each method raises ConfigurationError with the path and the remedy."""

    @staticmethod
    def create(directory: str | Path, identities: Iterable[str]) -> None:
        """Make the keys of the controller and of `identities`. What exists is kept: a restart changes no key."""
        root = Path(directory)
        _make_private(root)
        _make_private(root / _SERVER)
        _make_private(root / _SERVER / "clients")
        path = root / _SERVER / "server.json"
        if not path.exists():
            _write(path, msgspec.json.encode(_new_pair()))
        for identity in identities:
            JobKeys.add(root, identity)

    @staticmethod
    def add(directory: str | Path, identity: str) -> None:
        """Admit one more client and make its folder, unless it is there. For a node that is created later."""
        root = Path(directory)
        server = JobKeys.load_server(root)
        folder = _client_folder(root, identity)
        _make_private(folder)
        path = folder / "client.json"
        if not path.exists():
            pair = _new_pair()
            keys = ClientKeys(identity, pair.public, pair.secret, server.public)
            _write(path, msgspec.json.encode(keys))
        keys = JobKeys.load_client(root, identity)
        _write(Path(server.clients) / z85.decode(keys.public).hex(), identity.encode())

    @staticmethod
    def remove(directory: str | Path, identity: str) -> None:
        """Admit a client no longer, and delete its folder. For a node that was given back.

        A connection that is up stays up; what comes over it is not believed any more (`controller/admission.py`).
        """
        root = Path(directory)
        server = JobKeys.load_server(root)
        folder = _client_folder(root, identity)
        if not folder.exists():
            return
        keys = JobKeys.load_client(root, identity)
        (Path(server.clients) / z85.decode(keys.public).hex()).unlink(missing_ok=True)
        (folder / "client.json").unlink(missing_ok=True)
        folder.rmdir()

    @staticmethod
    def folder(directory: str | Path, identity: str) -> Path:
        """Return the folder of a client's keys: what is copied to its host."""
        return _client_folder(Path(directory), identity)

    @staticmethod
    def load_server(directory: str | Path) -> ServerKeys:
        """Read the controller's keys."""
        folder = Path(directory) / _SERVER
        pair = _read(folder / "server.json", _KeyPair)
        _check_keys(folder / "server.json", pair.public, pair.secret)
        clients = folder / "clients"
        _check_private(clients)
        return ServerKeys(pair.public, pair.secret, str(clients))

    @staticmethod
    def load_client(directory: str | Path, identity: str) -> ClientKeys:
        """Read the keys of one client."""
        path = _client_folder(Path(directory), identity) / "client.json"
        keys = _read(path, ClientKeys)
        _check_keys(path, keys.public, keys.secret, keys.server_public)
        if keys.identity != identity:
            raise ConfigurationError(
                f"{path} holds the keys of {keys.identity}, not of {identity}. Copy the folder that was made for it."
            )
        return keys


def _client_folder(root: Path, identity: str) -> Path:
    if not identity or identity == _SERVER:
        raise ConfigurationError(f"{identity!r} is no name for a client.")
    return root / quote(identity, safe="").replace(".", "%2E")


def _new_pair() -> _KeyPair:
    public, secret = zmq.curve_keypair()
    return _KeyPair(public.decode(), secret.decode())


def _check_keys(path: Path, *keys: str) -> None:
    for key in keys:
        try:
            raw = z85.decode(key.encode("ascii"))
        except (ValueError, KeyError, OverflowError, ArithmeticError) as error:
            raise ConfigurationError(f"{path} holds no Z85 key: {error}. Create the job's keys again.") from error
        if len(key) != _KEY_BYTES or len(raw) != 32:
            raise ConfigurationError(f"{path} holds a key of the wrong length. Create the job's keys again.")


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the key directory {folder} cannot be made: {error}.") from error
    _check_private(folder)


def _check_private(path: Path) -> None:
    """Refuse a file that is missing, of another owner, or open to others."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path} is missing. `midstep run` makes the keys of a job; copy the client's folder to its host."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be examined: {error}.") from error
    if status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to user {status.st_uid}, not to {os.getuid()}: chown it.")
    if status.st_mode & _OTHERS:
        wanted = DIRECTORY_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
        raise ConfigurationError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): chmod {wanted:o} it; "
            "if others may have read it, delete the keys and restart the job."
        )


def _read(path: Path, kind: type[_T]) -> _T:
    _check_private(path.parent)
    _check_private(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as keys: {error}. Create the job's keys again.") from error


def _write(path: Path, data: bytes) -> None:
    """Write a private file whole or not at all."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise ConfigurationError(f"the key file {path} cannot be written: {error}.") from error
