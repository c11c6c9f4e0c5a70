"""Where controllers listen, as users write it, and which addresses this machine has."""

import ipaddress
import socket
from typing import Any

import psutil

from ...protocol.errors import ConfigurationError

DEFAULT_PORT = 29_400  # torchrun's, with the c10d backend
_TCP = "tcp://"
_EVERYWHERE = ("0.0.0.0", "::")
_LARGEST_PORT = 65_535


def split(text: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port` or `[address]:port`, also after tcp://. Raises ConfigurationError."""
    rest = text.strip().removeprefix(_TCP)
    host, separator, port = rest.rpartition(":")
    if not separator or (host.count(":") and not host.endswith("]")) or rest.endswith("]"):
        host, port = rest, str(DEFAULT_PORT)  # no port: a name, or an address of IPv6 as it is
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= _LARGEST_PORT:
        raise ConfigurationError(f"{text!r} is no endpoint: write HOST:PORT, or [ADDRESS]:PORT for IPv6.")
    return host, int(port)


def endpoint(host: str, port: int) -> str:
    """Return the endpoint of a host and a port."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a list with commas. Raises ConfigurationError."""
    return tuple(dict.fromkeys(endpoint(*split(each)) for each in text.split(",")))


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what listens at a host: a name counts by what it means here."""
    addresses = resolved(host)
    return bool(addresses) and all(ipaddress.ip_address(each).is_loopback for each in addresses)


def resolved(host: str) -> tuple[str, ...]:
    """Return the addresses of a host; none if it is not known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine."""
    return tuple(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
    )


def is_own(host: str, own: tuple[str, ...]) -> bool:
    """Say whether a host is this machine, whose addresses are `own`. All of 127.0.0.0/8 is."""
    addresses = [ipaddress.ip_address(each) for each in resolved(host)]
    mine = {ipaddress.ip_address(each) for each in own}
    return any(address in mine or address.is_loopback for address in addresses)


def listening_at(host: str, port: int) -> str:
    """Return where the controller listens so that all can reach it at `host`.

    That is the address itself; all addresses where a name means only this machine here (as Debian's /etc/hosts has it
    for a machine's own name), or is no address of this machine (that of a load balancer).
    """
    if not is_own(host, own_addresses()):
        return endpoint(_EVERYWHERE[0], port)
    if is_loopback(host) and not _is_address(host) and host != "localhost":
        return endpoint(_EVERYWHERE[0], port)
    return endpoint(host, port)


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine under which those at `host` reach it. Raises ConfigurationError."""
    for family, kind, _, _, address in _datagram(host, port):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: it chooses a route
            except OSError:
                continue
            own = str(probe.getsockname()[0]).partition("%")[0]
        if not ipaddress.ip_address(own).is_loopback or _is_address(host) or host == "localhost":
            return own
        return _first_outside() or own
    raise ConfigurationError(f"{host} is not known to this machine, or there is no way to it: check its name.")


def _datagram(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except OSError:
        return []


def _first_outside() -> str | None:
    """Return an address of this machine that others can reach."""
    usable = (ipaddress.ip_address(each) for each in own_addresses())
    return next((str(each) for each in usable if not each.is_loopback and not each.is_link_local), None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
