"""How a node asks to be admitted to a job, and what it is answered.

A node that joins has no identity yet: it connects with keys that all who have the job's token have. So it may say one
thing only, and is heard from then on by the key that it has made itself.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import LONGEST_TEXT, Name, Number
from .enums import StrEnum

JOINING_FAMILY = "joining/"  # whose keys all joining nodes have; each connection adds a name of its own
LONGEST_NODE_NAME = 63  # it becomes a directory, and part of the path of a socket
Key = Annotated[str, Meta(min_length=40, max_length=40)]  # a CURVE key in Z85


class RefusedBecause(StrEnum):
    """Why a node is not admitted."""

    EXPIRED = "expired token"
    NAME_IN_USE = "node name in use"
    GIVEN_BACK = "node was given back"
    BAD_NAME = "no node name"
    BAD_KEY = "key of another identity"
    TOO_MANY = "too many nodes"
    LATER = "too many at once"  # not now: the same request is taken a little later


class EnrolmentRequested(msgspec.Struct, frozen=True, tag=True):
    """A node asks to be admitted. `exact`: under this name or not at all; else a number is added to one in use."""

    node: Name
    exact: bool
    public_key: Key
    failure_domain: Name


class NodeEnrolled(msgspec.Struct, frozen=True, tag=True):
    """A node is admitted under a name. `session`: of its agent; each one of a name is higher than those before."""

    node: Name
    session: Number
    public_key: Key
    failure_domain: Name


class EnrolmentRefused(msgspec.Struct, frozen=True, tag=True):
    """A node is not admitted. `detail` says what to do."""

    reason: RefusedBecause
    detail: Annotated[str, Meta(max_length=LONGEST_TEXT)]


Enrolment = EnrolmentRequested | NodeEnrolled | EnrolmentRefused
