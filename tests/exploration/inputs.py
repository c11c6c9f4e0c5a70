"""A training process of an exploration as values: its beginning, its waits, and all that can reach it."""

import enum

import msgspec

from midstep.processor.session import Order
from midstep.protocol.messages import StartProcess
from midstep.protocol.types import LocalStateCopy


class Wait(enum.Enum):
    """What a process waits for."""

    ORDERS = "orders"
    COLLECTIVES = "collectives"  # of its step
    BARRIER = "barrier"  # in front of the update
    LINKS = "links"  # to all others of its generation
    NOTHING = "nothing"  # it has ended


class What(enum.Enum):
    """What can happen to a process, apart from orders."""

    GRADIENTS = "has all gradients"
    MET = "commits"
    BREAK = "cannot reach the others"
    RAISE = "raises"
    TEAR = "is struck in the middle of its update"
    FLIP = "holds something wrong"


class Heard(msgspec.Struct, frozen=True, tag=True):
    """An order has come. `checkpoints`: what can be read then. `torn`: the update that it asks for is torn."""

    order: Order
    checkpoints: tuple[int, ...] = ()
    torn: bool = False


class Happened(msgspec.Struct, frozen=True, tag=True):
    """Something else has come."""

    what: What


class Voted(msgspec.Struct, frozen=True, tag=True):
    """All have come to the commit barrier, and this is what others hold, as they say."""

    said: tuple[bytes, ...]


class Linked(msgspec.Struct, frozen=True, tag=True):
    """All others are reached. `shards`: the steps of the shards that arrive; `own`: whether the own state does.

    `cut`: the links break in the middle of the repair.
    """

    shards: tuple[int, ...] = ()
    own: bool = False
    checkpoints: tuple[int, ...] = ()
    cut: bool = False
    wrong: bool = False  # what arrives is


Input = Heard | Happened | Voted | Linked


class Birth(msgspec.Struct, frozen=True):
    """How a process begins: by which order, with which own states in its black box, in which job."""

    order: StartProcess
    node: str
    box: tuple[LocalStateCopy, ...]
    checkpoints: tuple[int, ...]
    steps: int
    every_steps: int  # a checkpoint; 0: never
    shard: str
    votes: bool = False

    @property
    def ward(self) -> int:
        """The rank whose own state it keeps a copy of."""
        return (self.order.rank + 1) % self.order.world_size


def pid_of(order: StartProcess) -> int:
    """Return a number that no other process has."""
    return 1000 * order.incarnation + order.rank + 1
