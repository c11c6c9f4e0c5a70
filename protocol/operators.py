"""Who operates a job from other machines: roles, and the identities of connections that have them.

A role's key is had by all who have a token of that role. It is a family: each connection adds a name of its own.
"""

from .enums import StrEnum

OPERATOR_PREFIX = "operator/"


class Role(StrEnum):
    """What an operator may do. Each may do what those before it may."""

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
