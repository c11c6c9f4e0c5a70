"""Where in which etcd a job is kept: the address that users give, and the names of the keys."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from ...protocol.errors import ConfigurationError

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "midstep"
_SCHEMES = {"etcd": "http", "etcds": "https"}
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_FORM = "etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds:// for TLS"
_NUMBER_DIGITS = 16  # so that keys in their order are numbers in theirs


class Access(msgspec.Struct, frozen=True):
    """The credentials for etcd, as etcdctl takes them: TLS files (authority, client certificate, its key), a user."""

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = ""

    def __repr__(self) -> str:
        return f"Access(authority={self.authority!r}, certificate={self.certificate!r}, user={self.user!r})"


class EtcdPlace(msgspec.Struct, frozen=True):
    """One job in one etcd. `endpoints`: its members, as (host, port)."""

    endpoints: tuple[tuple[str, int], ...]
    protocol: str
    prefix: str
    job: str
    access: Access = Access()

    def __str__(self) -> str:
        scheme = next(name for name, protocol in _SCHEMES.items() if protocol == self.protocol)
        return f"{scheme}://{','.join(f'{host}:{port}' for host, port in self.endpoints)}/{self.prefix}/{self.job}"

    @property
    def root(self) -> str:
        """The prefix of all keys of the job."""
        return f"/{self.prefix}/{self.job}/"

    @property
    def founding(self) -> str:
        """The key of the job's founding."""
        return f"{self.root}founding"

    @property
    def term(self) -> str:
        """The term that holds; every write compares it."""
        return f"{self.root}term"

    @property
    def leader(self) -> str:
        """The key of the leader, for as long as it lives."""
        return f"{self.root}leader"

    @property
    def clock(self) -> str:
        """The key of the leader's last clock reading, for as long as it lives."""
        return f"{self.root}clock"

    @property
    def terms(self) -> str:
        """How each term began."""
        return f"{self.root}terms/"

    @property
    def batches(self) -> str:
        """The events, some at a time, by the number of the first one."""
        return f"{self.root}events/"

    @property
    def snapshots(self) -> str:
        """States, by the number of the last event in them."""
        return f"{self.root}snapshots/"

    @property
    def preferred(self) -> str:
        """The controller that was promoted, until it leads."""
        return f"{self.root}preferred"

    @property
    def pause(self) -> str:
        """While it is there, no standby takes over."""
        return f"{self.root}pause"

    @property
    def controllers(self) -> str:
        """The controllers that live, by name."""
        return f"{self.root}controllers/"


def numbered(folder: str, number: int) -> str:
    """Return the key of something that has a number."""
    return f"{folder}{number:0{_NUMBER_DIGITS}d}"


def number_of(key: str, folder: str) -> int:
    """Return the number in a key. Raises ValueError."""
    return int(key.removeprefix(folder).partition("/")[0])


def access_of(environ: Mapping[str, str]) -> Access:
    """Return what etcdctl's variables say. ETCDCTL_USER is USER:PASSWORD, or USER with ETCDCTL_PASSWORD.

    Raises ConfigurationError for a user without a password.
    """
    authority, certificate, key = (environ.get(f"ETCDCTL_{name}") or None for name in ("CACERT", "CERT", "KEY"))
    user, separator, password = environ.get("ETCDCTL_USER", "").partition(":")
    password = password if separator else environ.get("ETCDCTL_PASSWORD", "")
    if not user:
        return Access(authority, certificate, key)
    if not password:
        raise ConfigurationError(
            f"ETCDCTL_USER={user} names no password: write ETCDCTL_USER=USER:PASSWORD, or give ETCDCTL_PASSWORD, too."
        )
    return Access(authority, certificate, key, user, password)


def parse_place(url: str, job: str, access: Access | None = None) -> EtcdPlace:
    """Return the place that `--store` names. Raises ConfigurationError."""
    scheme, _, rest = url.partition("://")
    addresses, _, prefix = rest.partition("/")
    prefix = prefix.strip("/") or DEFAULT_PREFIX
    try:
        endpoints = tuple(_endpoint(each) for each in addresses.split(","))
    except ValueError:
        endpoints = ()
    if scheme not in _SCHEMES or not endpoints or _PREFIX.fullmatch(prefix) is None:
        raise ConfigurationError(f"--store {url}: not the address of an etcd. Write {_FORM}.")
    return EtcdPlace(endpoints, _SCHEMES[scheme], prefix, job, access or Access())


def _endpoint(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError(address)
    return parts.hostname, parts.port or DEFAULT_PORT
