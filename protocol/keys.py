"""The CURVE keys of one job: which processes may connect to its controller, and as which identity.

Made once per job by the launcher. A key stands for one identity, so a node cannot report for another one::

    <directory>/server/server.json          the controller's key pair
    <directory>/server/clients/<hex key>    one file per admitted public key, holding its identity
    <directory>/server/joining.json         on which terms nodes may join by themselves, and operators connect
    <directory>/<identity>/client.json      a client's key pair and the controller's public key

A client's folder can be copied to another host; the server's stays where the controller runs. A client that is
added or removed later counts from its next connection on, without a word to the running controller. Whatever others
could read is refused.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from zmq.utils import z85

from .errors import ConfigurationError, KeyExpired, KeyReplaced
from .messages import JOINING_FAMILY
from .private_files import DIRECTORY_MODE, replace_file
from .token import KEY_BYTES, KeyPair, random_pair, require_private
from .types import CONTROLLER

_SERVER = "server"
_JOINING = "joining.json"
_KEY_CHARACTERS = 40  # a CURVE key in Z85
_EXPIRES = "\n"  # between an identity and when it is not admitted any more
_REPLACED = "replaced"  # in place of that time
MOST_REPLACED = 256  # keys of earlier tokens that are known as such
_MISSING = "`midstep run` makes the keys of a job; copy the client's folder to its host."

_T = TypeVar("_T", bound=msgspec.Struct)


class ServerKeys(msgspec.Struct, frozen=True):
    """The controller's key pair, and where the admitted clients are listed. Keys are Z85 text."""

    public: str
    secret: str
    clients: str

    def __repr__(self) -> str:
        return f"ServerKeys(public={self.public!r}, clients={self.clients!r})"

    def identity_of(self, public_key: bytes) -> str | None:
        """Return the identity to which a key of 32 raw bytes belongs; None: not admitted. Reads one small file.

        Raises KeyExpired or KeyReplaced for one that is not admitted any more.
        """
        try:
            listed = (Path(self.clients) / public_key.hex()).read_text("utf-8")
        except FileNotFoundError:
            return None
        identity, _, expires_s = listed.partition(_EXPIRES)
        if expires_s == _REPLACED:
            raise KeyReplaced(f"the key of {identity} is that of a token that was replaced.")
        if expires_s and time.time() >= int(expires_s):
            raise KeyExpired(f"the key of {identity} has expired.")
        return identity or None


class ClientKeys(msgspec.Struct, frozen=True):
    """A client's key pair, its identity, and the public key of the controller. Z85 text."""

    identity: str
    public: str
    secret: str
    server_public: str

    def __repr__(self) -> str:
        return f"ClientKeys(identity={self.identity!r}, public={self.public!r})"


class JoiningTerms(msgspec.Struct, frozen=True):
    """On which terms others may come by themselves. `public`: the key of nodes that ask; `expires_s`: 0: never.

    `families`: the public keys of operators and their detectors, by the identities that those of their connections
    begin with. `replaced`: the public keys of tokens that the job had before, the newest last.
    """

    public: str
    expires_s: int = 0
    families: dict[str, str] = {}
    replaced: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, str]:
        """The identity that each public key stands for."""
        return {self.public: JOINING_FAMILY, **{public: family for family, public in self.families.items()}}


class JobKeys:
    """Makes and reads the keys of a job. Each method raises ConfigurationError with the path and the remedy."""

    @staticmethod
    def create(directory: str | Path, identities: Iterable[str], *, server: KeyPair | None = None) -> None:
        """Make the keys of the controller and of `identities`. What exists is kept: a restart changes no key.

        `server`: the controller's keys, where they follow from a token.
        """
        root = Path(directory)
        _make_private(root)
        _make_private(root / _SERVER)
        _make_private(root / _SERVER / "clients")
        path = root / _SERVER / "server.json"
        if not path.exists():
            _write(path, msgspec.json.encode(server or random_pair()))
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
            JobKeys.save_client(root, identity, random_pair(), server.public)
        keys = JobKeys.load_client(root, identity)
        _write(Path(server.clients) / z85.decode(keys.public).hex(), identity.encode())

    @staticmethod
    def save_client(directory: str | Path, identity: str, pair: KeyPair, server_public: str) -> None:
        """Write the keys of a client on its own machine. The controller's machine lists the public one (`admit`)."""
        root = Path(directory)
        _make_private(root)
        folder = _client_folder(root, identity)
        _make_private(folder)
        keys = ClientKeys(identity, pair.public, pair.secret, server_public)
        _write(folder / "client.json", msgspec.json.encode(keys))

    @staticmethod
    def admit(directory: str | Path, identity: str, public: str, expires_s: int = 0) -> None:
        """Admit a client whose keys were made elsewhere, for connections that are made before `expires_s`. Idempotent.

        0: without an end.
        """
        clients = Path(JobKeys.load_server(directory).clients)
        _check_keys(clients, public)
        owner = JobKeys.owner_of(directory, public)
        if owner not in {None, identity}:
            raise ConfigurationError(f"the key of {identity} is that of {owner} already. Make another one for it.")
        _list(clients, public, identity, str(expires_s or ""))

    @staticmethod
    def owner_of(directory: str | Path, public: str) -> str | None:
        """Return the identity that a key (Z85 text) stands for, or stood for, in this job; None: it is not known."""
        server = JobKeys.load_server(directory)
        if public == server.public:
            return CONTROLLER
        reserved = JobKeys.reserved(directory).get(public)
        if reserved is not None:
            return reserved
        try:
            listed = (Path(server.clients) / z85.decode(public).hex()).read_text("utf-8")
        except (OSError, ValueError, KeyError, OverflowError, ArithmeticError):
            return None  # or it is no key
        return listed.partition(_EXPIRES)[0] or _REPLACED

    @staticmethod
    def reserved(directory: str | Path) -> dict[str, str]:
        """Return the keys that follow from the job's token, or followed from those before, and whom they stand for."""
        terms = JobKeys.load_joining(directory)
        return {} if terms is None else {**dict.fromkeys(terms.replaced, _REPLACED), **terms.keys}

    @staticmethod
    def listed(directory: str | Path, family: str) -> list[tuple[str, str]]:
        """Return the public keys that are listed for identities that begin with `family`, and these."""
        found = []
        for path in Path(JobKeys.load_server(directory).clients).glob("[0-9a-f]*"):  # drafts begin with a dot
            identity = path.read_text("utf-8").partition(_EXPIRES)[0]
            if identity.startswith(family):
                found.append((z85.encode(bytes.fromhex(path.name)).decode(), identity))
        return found

    @staticmethod
    def open_for_joining(directory: str | Path, terms: JoiningTerms) -> None:
        """Let those ask for admission who have the join keys, and operators in. Terms of before no longer count.

        Their keys are known as replaced ones. What has connected with one stays connected.
        The controller tells a node that its token has expired; operators are not let in then.
        """
        before = JobKeys.load_joining(directory) or terms
        clients = Path(JobKeys.load_server(directory).clients)
        replaced = [public for public in (*before.replaced, *before.keys) if public not in terms.keys]
        for public in replaced[:-MOST_REPLACED]:
            JobKeys.withdraw(directory, public)
        for public in replaced[-MOST_REPLACED:]:
            _list(clients, public, before.keys.get(public, ""), _REPLACED)
        terms = msgspec.structs.replace(terms, replaced=tuple(replaced[-MOST_REPLACED:]))
        _write(Path(directory) / _SERVER / _JOINING, msgspec.json.encode(terms))
        _check_keys(clients, *terms.keys)
        _list(clients, terms.public, JOINING_FAMILY, "")
        for family, public in terms.families.items():
            _list(clients, public, family, str(terms.expires_s or ""))

    @staticmethod
    def load_joining(directory: str | Path) -> JoiningTerms | None:
        """Return on which terms nodes may join; None: none can."""
        path = Path(directory) / _SERVER / _JOINING
        return _read(path, JoiningTerms) if path.exists() else None

    @staticmethod
    def withdraw(directory: str | Path, public: str) -> None:
        """Admit a key no longer, whose client has the rest of it. As `remove` in all else."""
        clients = Path(JobKeys.load_server(directory).clients)
        (clients / z85.decode(public).hex()).unlink(missing_ok=True)

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
        pair = _read(folder / "server.json", KeyPair)
        _check_keys(folder / "server.json", pair.public, pair.secret)
        clients = folder / "clients"
        require_private(clients, _MISSING)
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


def _check_keys(path: Path, *keys: str) -> None:
    for key in keys:
        try:
            raw = z85.decode(key.encode("ascii"))
        except (ValueError, KeyError, OverflowError, ArithmeticError) as error:
            raise ConfigurationError(f"{path} holds no Z85 key: {error}. Create the job's keys again.") from error
        if len(key) != _KEY_CHARACTERS or len(raw) != KEY_BYTES:
            raise ConfigurationError(f"{path} holds a key of the wrong length. Create the job's keys again.")


def _list(clients: Path, public: str, identity: str, until: str) -> None:
    """List a public key as one that is admitted, or was. `until`: a time in seconds, or what it is in place of one."""
    _write(clients / z85.decode(public).hex(), (f"{identity}{_EXPIRES}{until}" if until else identity).encode())


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the key directory {folder} cannot be made: {error}.") from error
    require_private(folder, _MISSING)


def _read(path: Path, kind: type[_T]) -> _T:
    require_private(path.parent, _MISSING)
    require_private(path, _MISSING)
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
