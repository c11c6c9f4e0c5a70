"""CURVE key pairs: random ones, and ones that follow from a secret.

Machines that have the same secret have the same pairs without a word to each other.
"""

import hashlib
import hmac

import msgspec
import zmq
from zmq.utils import z85

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
