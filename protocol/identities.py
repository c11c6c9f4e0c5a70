"""Which identity a connection may have, by the key that it used."""

import zmq

FAMILY_END = "/"  # of the identity of a key that several peers have: each adds a name of its own


def is_family(key_identity: str) -> bool:
    """Say whether several peers have the key of this identity."""
    return key_identity.endswith(FAMILY_END)


def may_be(identity: str, key_identity: str | None) -> bool:
    """Say whether a key's connection may have an identity: the key's own, or one of the family that it stands for."""
    if key_identity is None:
        return False
    return identity.startswith(key_identity) if is_family(key_identity) else identity == key_identity


def key_identity(frame: zmq.Frame) -> str | None:
    """Return the identity of the key that the connection used, as the authenticator said."""
    try:
        found = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return found if isinstance(found, str) else None
