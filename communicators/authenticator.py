"""How the members of a generation know each other's words.

Anybody who reaches a rendezvous store can list, read and replace all that it holds, and anybody who reaches a listening
port can send to it. The members share a secret, which came by the controller's authenticated line. With it they name
and sign what they leave in the store, and greet each other.
"""

import hashlib
import hmac

from ..protocol.types import Rendezvous

TAG_BYTES = 16
_STORE, _GREETING = b"store", b"greeting"  # what is made for one purpose is of no use for another


class Authenticator:
    """The secret of one generation. What another generation has signed does not pass."""

    def __init__(self, rendezvous: Rendezvous, generation: int) -> None:
        secret = rendezvous.secret.encode(errors="surrogatepass")
        self._key = hashlib.blake2b(b"midstep/%d/" % generation + secret).digest()

    def hashed_key(self, key: str) -> str:
        """Return under which name in the store the members find `key`: one that others cannot work out."""
        return self._tag(_STORE, key.encode()).hex()

    def sign(self, key: str, value: bytes) -> bytes:
        """Return what to leave in the store as the value of `key`."""
        return self._tag(_STORE, key.encode(), value) + value

    def verify(self, key: str, sealed: bytes) -> bytes | None:
        """Return the value that a member left for `key`; None if no member wrote these bytes there."""
        tag, value = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        return value if hmac.compare_digest(tag, self._tag(_STORE, key.encode(), value)) else None

    def handshake_tag(self, nonce: bytes, rank: int) -> bytes:
        """Return with what `rank` shows who it is to the member that has made up `nonce`."""
        return self._tag(_GREETING, nonce, b"%d" % rank)

    def verify_handshake(self, proof: bytes, nonce: bytes, rank: int) -> bool:
        """Say whether `proof` is that greeting."""
        return hmac.compare_digest(proof, self.handshake_tag(nonce, rank))

    def _tag(self, purpose: bytes, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._key, person=purpose, digest_size=TAG_BYTES)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()
