"""Decoders of JSON and MessagePack that threads may ask for at the same time.

msgspec works out a type when it is first decoded, and runs Python meanwhile. A second thread that decodes the same type
just then uses what is half worked out, and the process ends by SIGSEGV (msgspec 0.22, two threads of a rank that read
each other's handshakes while links come up). Here each type is worked out once, by one thread at a time.
"""

import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_working_out = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def json_decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """Return the decoder of one type from JSON. There is one of each type, as types are those of the program."""
    with _working_out:
        if kind not in _json:
            _json[kind] = msgspec.json.Decoder(kind)
        return _json[kind]


def msgpack_decoder(kind: type[_Kind]) -> msgspec.msgpack.Decoder[_Kind]:
    """Return the decoder of one type from MessagePack, in the same way."""
    with _working_out:
        if kind not in _msgpack:
            _msgpack[kind] = msgspec.msgpack.Decoder(kind)
        return _msgpack[kind]
