"""Answer for names of pods and services, as CoreDNS does, from the endpoints that the API has: ADDRESS API TOKEN.

`HOST.SERVICE.NAMESPACE.svc.cluster.local` is the pod of that hostname, and without HOST all pods of the service. For
tests only: addresses of version 4, over UDP, and the API is asked for each question. While it is away the last answer
stands, as CoreDNS's does.
"""

import json
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request
from typing import Any

_SUFFIX = ("svc", "cluster", "local")
_PORT = 53
_HEADER = struct.Struct("!6H")
_OF_QUESTION = struct.Struct("!2H")
_ADDRESS, _INTERNET = 1, 1
_ANSWER, _NO_SUCH_NAME, _FAILED = 0x8580, 3, 2
_TO_THE_NAME = 0xC00C  # where the question has it
_LONGEST_BYTES = 512
_API_S = 5.0


def find(name: tuple[str, ...], api: str, token: str) -> list[str] | None:
    """Return the addresses of a name; None when there is no such name."""
    if name[-3:] != _SUFFIX or len(name) not in (5, 6):
        return None
    *host, service, namespace = name[:-3]
    request = urllib.request.Request(
        f"{api}/api/v1/namespaces/{namespace}/endpoints/{service}", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_API_S, context=ssl._create_unverified_context()) as reply:
            endpoints: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    found = [each for subset in endpoints.get("subsets", ()) for each in subset.get("addresses", ())]
    chosen = [each["ip"] for each in found if not host or each.get("hostname") == host[0]]
    return chosen or (None if host else [])


def answer(asked: bytes, api: str, token: str, last: dict[tuple[str, ...], list[str] | None]) -> bytes:
    """Return the answer to one question. `last`: the answers before it, by name; this one is added."""
    number, *_ = _HEADER.unpack_from(asked)
    name: list[str] = []
    at = _HEADER.size
    while asked[at]:
        name.append(asked[at + 1 : at + 1 + asked[at]].decode().lower())
        at += 1 + asked[at]
    at += 1
    kind, _ = _OF_QUESTION.unpack_from(asked, at)
    question = asked[_HEADER.size : at + _OF_QUESTION.size]
    code = 0
    try:
        found = last[tuple(name)] = find(tuple(name), api, token)
        code = _NO_SUCH_NAME if found is None else 0
    except OSError as error:
        print(f"{'.'.join(name)}: {error}", flush=True)
        found = last.get(tuple(name))
        code = _FAILED if found is None else 0
    addresses = found if found and kind == _ADDRESS else []
    records = b"".join(
        struct.pack("!3HIH", _TO_THE_NAME, _ADDRESS, _INTERNET, 0, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return _HEADER.pack(number, _ANSWER | code, 1, len(addresses), 0, 0) + question + records


def main(address: str, api: str, token: str) -> None:
    """Answer, for ever."""
    last: dict[tuple[str, ...], list[str] | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((address, _PORT))
        while True:
            asked, asker = listening.recvfrom(_LONGEST_BYTES)
            try:
                listening.sendto(answer(asked, api, token, last), asker)
            except (IndexError, struct.error, UnicodeDecodeError) as error:
                print(f"not a question: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
