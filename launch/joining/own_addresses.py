"""Which addresses this machine has, and where a controller listens so that all can reach it."""

import ipaddress
import socket
from typing import Any

import psutil

from ...protocol.controller_addresses import endpoint, resolved
from ...protocol.errors import ConfigurationError

_EVERYWHERE = "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what listens at a host: a name counts by what it means here."""
    addresses = resolved(host)
    return bool(addresses) and all(ipaddress.ip_address(each).is_loopback for each in addresses)


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
        return endpoint(_EVERYWHERE, port)
    if is_loopback(host) and not _is_address(host) and host != "localhost":
        return endpoint(_EVERYWHERE, port)
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
