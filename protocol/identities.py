"""Identities that a connection may have, by the key that it used; and the roles of operators on other machines.

All who have a token of one role have the same key. It stands for a family: each connection adds a name of its own.
"""

import zmq

from .compat import StrEnum

FAMILY_END = "/"  # of the identity of a key that several peers have: each adds a name of its own
OPERATOR_PREFIX = "operator/"
PROXY_FAMILY = "proxy/"  # of those that speak for many nodes (`protocol/proxied.py`); they have the job's secret


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


class Role(StrEnum):
    """The rights of an operator. Each role may do what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, least: "Role") -> bool:
        """Say whether this role may do what takes `least`."""
        ranking = list(Role)
        return ranking.index(self) >= ranking.index(least)


def family_of(role: Role) -> str:
    """Return the identity of a role's key, which those of its connections begin with."""
    return f"{OPERATOR_PREFIX}{role}/"


def role_of(identity: str) -> Role | None:
    """Return the role of a connection; None: it is no operator's."""
    return next((role for role in Role if identity.startswith(family_of(role))), None)
