"""Post once to a server, within a deadline, and say what came of it in words without its address.

Only http.client of the standard library is used. It follows no redirect and knows no proxy, so that nothing is asked
but the address itself.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from urllib.parse import SplitResult, urlsplit

import msgspec

TRY_S = 10.0  # from the connection to the answer
_REDIRECTS = range(300, 400)
_LATE = f"it did not answer within {TRY_S:g} s"
_TAKEN = range(200, 300)


class PostFailed(Exception):
    """A server has not taken what was posted; says why, without its address."""


class Address(msgspec.Struct, frozen=True):
    """Where a server takes posts. Never printed."""

    secure: bool
    host: str
    port: int | None
    target: str


def address_of(url: str, path: str) -> Address:
    """Return where a URL leads. `path`: what it is from. Raises PostFailed: it is no https URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = SplitResult("", "", "", "", ""), None, None
    if parts.scheme not in {"https", "http"} or not host or not url.isprintable() or " " in url:
        raise PostFailed(f"{path}: it has no URL in one line, as https://host/path")
    if parts.username is not None or parts.password is not None:
        raise PostFailed(f"{path}: its URL has a user in it; put `Authorization: ...` into header_file")
    if parts.scheme == "http" and not _is_this_machine(host):
        raise PostFailed(f"{path}: its URL is http, which others can read on the way; only https leaves this machine")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", host, port, target)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def utc_text(at_s: float, timespec: str = "seconds") -> str:
    """Return a moment as `2026-01-23T10:30:45Z`."""
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def post_to(address: Address, body: bytes, headers: Mapping[str, str], ca_file: str | None = None) -> None:
    """Hand it over once, within TRY_S. `ca_file`: whom to trust; None: the machine's CAs. Raises PostFailed."""
    made: http.client.HTTPConnection
    if address.secure:
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError):
            raise PostFailed(f"{ca_file}: no certificate of a CA can be read from it") from None
        made = http.client.HTTPSConnection(address.host, address.port, timeout=TRY_S, context=context)
    else:
        made = http.client.HTTPConnection(address.host, address.port, timeout=TRY_S)
    late = threading.Timer(TRY_S, _cut, (made,))
    late.daemon = True
    late.start()
    try:
        made.request("POST", address.target, body, dict(headers))
        status = made.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PostFailed(_why(error)) from None
    finally:
        late.cancel()
        made.close()
    if status in _REDIRECTS:
        raise PostFailed(f"it answers {status}, which leads elsewhere, and that is not followed")
    if status not in _TAKEN:
        raise PostFailed(f"it answers {status}")


def _cut(connection: http.client.HTTPConnection) -> None:
    """End what takes too long: each byte alone would be in time."""
    if isinstance(connection.sock, socket.socket):
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _why(error: Exception) -> str:
    """Say what went wrong, in words that have neither the address nor what was sent."""
    words = {
        ssl.SSLCertVerificationError: "its certificate is not trusted here, or is another host's",
        TimeoutError: _LATE,
        socket.gaierror: "its host is not known",
        ssl.SSLError: "no TLS connection could be made",
        http.client.HTTPException: f"it gave no answer in HTTP within {TRY_S:g} s",
        ValueError: "its address, or the header, cannot be sent",
    }
    known = next((said for kind, said in words.items() if isinstance(error, kind)), "")
    return known or (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
