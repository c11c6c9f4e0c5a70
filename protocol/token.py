"""The token of a job: the one line that all its machines have, and from which they know each other.

A full token is a random secret. The controller's keys follow from it, and those with which a node may ask to join; so
each machine knows the controller's public key, and no key is copied by hand. A join token has only what a node needs,
and a role token what an operator of that role needs. No key follows from another one.

A token is a secret. `read_token` takes it from a file that others cannot read, or from the environment; it is never an
argument of a command.
"""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from .errors import ConfigurationError
from .identities import Role
from .private_files import DIRECTORY_MODE, FILE_MODE, WRITABLE_BY_OTHERS

PREFIX = "midstep1."
TOKEN_VARIABLE = "MIDSTEP_TOKEN"
SECRET_BYTES = 32
LONGEST_CHARACTERS = 2048
_CHECKSUM_BYTES = 6
_CONTROLLER = "controller"
_JOIN = "join"
_OPERATOR = "operator"
_DETECTOR = "detector"
_PLATFORM = "platform"
_PROXY = "proxy"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DATA_LINK = "..data"
_ROOT = 0
CONTROLLER_VARIABLE = "MIDSTEP_CONTROLLER"  # HOST:PORT, for what looks at a job from another machine
TOKEN_FILE_VARIABLE = "MIDSTEP_TOKEN_FILE"
HOME_TOKEN = Path("~/.midstep/token")  # of the jobs on several machines of a user whose home they share
KEY_BYTES = 32
_SALT = b"midstep key pair, version 1"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def random_pair() -> KeyPair:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def derived_pair(secret: bytes, *purpose: str) -> KeyPair:
    """Return the key pair that follows from a secret for one purpose; any other purpose gives another pair."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (text.encode() for text in purpose))
    key = z85.encode(_hkdf_sha256(secret, info))
    return KeyPair(zmq.curve_public(key).decode(), key.decode())


def is_key(text: str) -> bool:
    """Say whether a text is one half of a key pair."""
    try:
        return len(z85.decode(text.encode("ascii"))) == KEY_BYTES
    except (ValueError, KeyError, OverflowError, ArithmeticError):
        return False


def _hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """Return 32 bytes by HKDF (RFC 5869): one block of its output is all that a key takes."""
    extracted = hmac.digest(_SALT, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


# --- tokens ---------------------------------------------------------------------------------------------------------


class Invitation(msgspec.Struct, frozen=True):
    """Everything that a node needs to ask a job's controller for admission."""

    job: str
    server_public: str
    join: KeyPair


class FullToken(msgspec.Struct, frozen=True, tag="full", array_like=True):
    """The secret of a job. `job`: the only one that it is for, if any. `expires_s`: seconds since 1970, 0: never.

    `entry`: a secret of its own for those who come, where the token was renewed. The controller's keys stay, by which
    those know it who have come before.
    """

    secret: bytes
    job: str = ""
    expires_s: int = 0
    entry: bytes = b""

    def __repr__(self) -> str:
        return f"FullToken(job={self.job!r}, expires_s={self.expires_s})"

    @property
    def _entry(self) -> bytes:
        """The secret from which the keys follow of those who come."""
        return self.entry or self.secret

    def renewed(self, expires_s: int = 0) -> "FullToken":
        """Return the token that replaces this one while the job runs. Who has this one cannot enter with it."""
        return msgspec.structs.replace(self, expires_s=expires_s, entry=secrets.token_bytes(SECRET_BYTES))

    def controller_keys(self, job: str) -> KeyPair:
        """Return the key pair of the job's controller."""
        return derived_pair(self.secret, _CONTROLLER, job)

    def invitation(self, job: str) -> Invitation:
        """Return what a node of the job needs to join."""
        return Invitation(job, self.controller_keys(job).public, derived_pair(self._entry, _JOIN, job))

    def for_joining(self, job: str) -> "JoinToken":
        """Return a token with which nodes can join the job, and no process can be its controller."""
        invitation = self.invitation(job)
        return JoinToken(invitation.server_public, invitation.join, job, self.expires_s)

    def operator_keys(self, job: str, role: Role) -> KeyPair:
        """Return the key pair that all operators of a role have."""
        return derived_pair(self._entry, _OPERATOR, role.value, job)

    def platform_keys(self, job: str) -> KeyPair:
        """Return the key pair of the process that makes the job's nodes."""
        return derived_pair(self.secret, _PLATFORM, job)

    def proxy_keys(self, job: str) -> KeyPair:
        """Return the key pair with which the job's proxies connect to its controller."""
        return derived_pair(self.secret, _PROXY, job)

    def detector_keys(self, job: str) -> KeyPair:
        """Return the key pair with which operators report faults as detectors."""
        return derived_pair(self._entry, _DETECTOR, job)

    def for_role(self, job: str, role: Role) -> "RoleToken":
        """Return a token with which a job can be operated in a role, and nothing else be done."""
        detector = self.detector_keys(job) if role.covers(Role.OPERATOR) else None
        keys = self.operator_keys(job, role)
        return RoleToken(self.controller_keys(job).public, keys, detector, role, job, self.expires_s)


class JoinToken(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """Everything that a node needs to join one job, without the secret."""

    server_public: str
    join: KeyPair
    job: str
    expires_s: int = 0

    def invitation(self, job: str) -> Invitation:
        """Return what a node of the job needs to join."""
        return Invitation(job, self.server_public, self.join)


class RoleToken(msgspec.Struct, frozen=True, tag="role", array_like=True):
    """Everything that an operator needs to operate one job in one role, but the secret. `detector`: report faults."""

    server_public: str
    keys: KeyPair
    detector: KeyPair | None
    role: Role
    job: str
    expires_s: int = 0


Token = FullToken | JoinToken | RoleToken


def new_token(*, job: str = "", expires_s: int = 0) -> FullToken:
    """Return a token with a new secret."""
    return FullToken(secrets.token_bytes(SECRET_BYTES), job, expires_s)


def token_text(token: Token) -> str:
    """Return the line of text that a token is."""
    content = msgspec.msgpack.encode(token)
    return PREFIX + base64.urlsafe_b64encode(content + _checksum(content)).decode().rstrip("=")


def parse_token(text: str, source: str) -> Token:
    """Return the token of a line of text. `source`: where it comes from, for the message; the text is not shown.

    Raises ConfigurationError.
    """
    remedy = "`midstep token` makes one; copy it whole."
    line = text.strip()
    if not line:
        raise ConfigurationError(f"{source} is empty, and should hold the job's token: {remedy}")
    if not line.startswith("midstep") or len(line) > LONGEST_CHARACTERS:
        raise ConfigurationError(f"{source} holds no token: {remedy}")
    if not line.startswith(PREFIX):
        raise ConfigurationError(f"{source} holds a token of another version of midstep. {remedy}")
    encoded = line.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if secrets.compare_digest(checksum, _checksum(content)):
            token: Token = msgspec.msgpack.decode(content, type=Token)
            return token
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        pass  # not all of it is there, or not as it was
    raise ConfigurationError(f"{source} holds a token that was cut short or changed: {remedy}")


def job_of(token: Token, job: str | None) -> str:
    """Return the job that is meant: `job`, or the one that the token names.

    Raises ConfigurationError when there is neither, or the token is for another one.
    """
    if job is None and not token.job:
        raise ConfigurationError(
            "the token names no job: give --rdzv-id; --job for an agent, a controller or `midstep token`."
        )
    if job is not None and token.job and job != token.job:
        raise ConfigurationError(f"the token is for the job {token.job!r}, and not for {job!r}.")
    return token.job if job is None else job


def full(token: Token) -> FullToken:
    """Return a token that a controller can be run with. Raises ConfigurationError for one that was made of it."""
    if isinstance(token, FullToken):
        return token
    if isinstance(token, RoleToken):
        raise _of_a_role(token)
    raise ConfigurationError(
        "this token was made with --join-only: with it nodes can join, and no controller can run. Give this machine "
        "the full token."
    )


def joinable(token: Token) -> FullToken | JoinToken:
    """Return a token that a node can join with. Raises ConfigurationError for one that is for operators."""
    if isinstance(token, RoleToken):
        raise _of_a_role(token)
    return token


def operating(token: Token, job: str) -> RoleToken:
    """Return what a job is operated with: the full token is an admin's.

    Raises ConfigurationError for a token that is for joining only.
    """
    if isinstance(token, FullToken):
        return token.for_role(job, Role.ADMIN)
    if isinstance(token, RoleToken):
        return token
    raise ConfigurationError(
        "this token was made with --join-only: with it nodes can join, and nobody can operate the job. Ask whoever has "
        "the full token for one of a role (`midstep token --role viewer`)."
    )


def _of_a_role(token: RoleToken) -> ConfigurationError:
    return ConfigurationError(
        f"this token was made with --role {token.role}: it is for `midstep status` and the like. Give this machine the "
        "full token, or one made with --join-only for nodes."
    )


def expiry_text(expires_s: int) -> str:
    """Say when a token expires."""
    return datetime.fromtimestamp(expires_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _checksum(content: bytes) -> bytes:
    """Return what a token is checked with for errors of copying."""
    return hashlib.sha256(PREFIX.encode() + content).digest()[:_CHECKSUM_BYTES]


# --- where a token is read ------------------------------------------------------------------------------------------


def read_token(file: Path | None, environment: Mapping[str, str]) -> Token | None:
    """Return the job's token from a file, else from MIDSTEP_TOKEN; None if there is none. Raises ConfigurationError."""
    if file is None:
        text = environment.get(TOKEN_VARIABLE, "")
        return parse_token(text, TOKEN_VARIABLE) if text else None
    require_private(file, "`midstep token` prints a token: keep it in a file of mode 600.")
    try:
        with file.open("rb") as opened:
            data = opened.read(LONGEST_CHARACTERS + 2)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}.") from error
    return parse_token(data.decode("ascii", "replace"), str(file))


def require_private(path: Path, missing: str) -> None:
    """Refuse a file or directory that is missing, of another owner, or open to others, unless it is a mounted Secret.

    `missing`: what to do where it is missing. Raises ConfigurationError.
    """
    try:
        status = path.stat()
        if _is_mounted_secret(path):
            return
    except FileNotFoundError:
        raise ConfigurationError(f"{path} is missing. {missing}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be examined: {error}.") from error
    if status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to user {status.st_uid}, not to {os.getuid()}: chown it.")
    if status.st_mode & _OTHERS:
        wanted = DIRECTORY_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
        raise ConfigurationError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): chmod {wanted:o} it; "
            "if others may have read it, make new keys and restart the job."
        )


def found_token_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file with the token that the environment names, or the one in the user's home; None without both."""
    named = environment.get(TOKEN_FILE_VARIABLE)
    if named:
        return Path(named)
    own = HOME_TOKEN.expanduser()
    return own if own.is_file() else None


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for programs of the user's, which have no use for the job's token."""
    return {name: value for name, value in environment.items() if name != TOKEN_VARIABLE}


def _is_mounted_secret(path: Path) -> bool:
    """Return whether a path is in a volume of Kubernetes, or is one, in which none but root can change anything."""
    folder = path if stat.S_ISDIR(path.stat().st_mode) else path.parent
    link = folder / _DATA_LINK
    if not link.is_symlink():
        return False
    data = link.resolve()
    within = data.parent == folder.resolve() and (path == folder or path.resolve().parent == data)
    above = folder.stat()
    fixed = not above.st_mode & stat.S_IWOTH or bool(above.st_mode & stat.S_ISVTX)
    owners = {each.st_uid for each in (above, link.lstat(), data.stat(), path.stat())}
    closed = not any(each.stat().st_mode & WRITABLE_BY_OTHERS for each in (data, path) if each != folder)
    return within and fixed and closed and owners <= {_ROOT, os.getuid()}
