"""The token of a job: the one line that all its machines have, and from which they know each other.

A full token is a random secret. The controller's keys follow from it, and those with which a node may ask to join; so
each machine knows the controller's public key, and no key is copied by hand. A join token has only what a node needs,
and a role token what an operator of that role needs. No key follows from another one.

A token is a secret. It is read from a file or from the environment, and is never an argument of a command.
"""

import base64
import binascii
import hashlib
import secrets
from datetime import datetime, timezone

import msgspec

from .errors import ConfigurationError
from .key_pairs import KeyPair, derived_pair
from .operators import Role

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


class Invitation(msgspec.Struct, frozen=True):
    """What a node needs to ask a job's controller for admission."""

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

    def detector_keys(self, job: str) -> KeyPair:
        """Return the key pair with which operators report faults as detectors."""
        return derived_pair(self._entry, _DETECTOR, job)

    def for_role(self, job: str, role: Role) -> "RoleToken":
        """Return a token with which a job can be operated in a role, and nothing else be done."""
        detector = self.detector_keys(job) if role.covers(Role.OPERATOR) else None
        keys = self.operator_keys(job, role)
        return RoleToken(self.controller_keys(job).public, keys, detector, role, job, self.expires_s)


class JoinToken(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """What a node needs to join one job, without the secret."""

    server_public: str
    join: KeyPair
    job: str
    expires_s: int = 0

    def invitation(self, job: str) -> Invitation:
        """Return what a node of the job needs to join."""
        return Invitation(job, self.server_public, self.join)


class RoleToken(msgspec.Struct, frozen=True, tag="role", array_like=True):
    """What an operator needs to operate one job in one role, without the secret. `detector`: to report faults."""

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
