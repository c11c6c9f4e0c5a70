"""Fault injection: injection points, fault actions, and faults that are armed. For tests, demo and `midstep inject`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import MOST_OF_A_RANK, Count, Name, Rank, Share
from .enums import StrEnum


class InjectionPoint(StrEnum):
    """A place in a step or in a recovery at which a fault can be armed (`midstep inject --at`)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    REDUCTION = "reduction"  # of the gradients, where the framework has a place for it (Megatron)
    BARRIER = "barrier"
    UPDATE = "update"
    GATHER = "gather"  # of parameters after the update, where the framework has a place for it
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    CLEAN = "clean"
    JOIN = "join"
    REBUILD = "rebuild"
    REPAIR = "repair"
    ROLLBACK = "rollback"


class FaultAction(StrEnum):
    """What an armed fault does when its injection point is reached."""

    KILL = "kill"  # SIGKILL to the own process
    STOP = "stop"  # SIGSTOP to the own process
    RAISE = "raise"
    EXIT = "exit"  # exit status 1, without a word
    HANG = "hang"  # sleep in Python for ever
    KILL_NODE = "kill_node"  # agent and processes of the node, at once
    # The rest is for a device that can be harmed, which is the fake one.
    MEMORY_TEMPORARY = "memory_temporary"  # an uncorrectable error in memory that nothing lasting uses
    MEMORY_PERSISTENT = "memory_persistent"  # in a parameter
    MEMORY_OUTSIDE = "memory_outside"  # in memory that is not the framework's
    SUSPECT_MEMORY = "suspect_memory"  # an alarm, and nothing is found
    MULTI_BIT = "multi_bit"  # several bits of a parameter, noticed at once
    MULTI_BIT_LATE = "multi_bit_late"  # noticed after an update that may have used them
    UNSAFE_TENSOR = "unsafe_tensor"  # a tensor is used that no repair has overwritten
    OUT_OF_MEMORY = "out_of_memory"
    LINK_DOWN = "link_down"  # a collective's own retries failed; the link is up again afterwards
    LINK_BROKEN = "link_broken"  # the same, and the link is up again only when the communicators are rebuilt
    LINK_UP_FAILS = "link_up_fails"  # the next communicator that is built does not come up
    REMOTE = "remote"  # this device suspects another
    HANG_COLLECTIVE = "hang_collective"  # the next collective never ends
    TASK_QUEUE_DEAD = "task_queue_dead"  # the queue ends with the next collective, and no restart starts another
    DROP_DEVICE = "drop_device"  # the device is gone until it is reset


DEVICE_FAULT_ACTIONS = frozenset(list(FaultAction)[list(FaultAction).index(FaultAction.MEMORY_TEMPORARY) :])


class ArmedFault(msgspec.Struct, frozen=True):
    """A fault to be injected into one rank, at an injection point."""

    rank: Rank
    action: FaultAction = msgspec.field(name="injury")  # the name that journals and requests have
    point: InjectionPoint | None = msgspec.field(default=None, name="moment")  # None: now
    step: Count | None = None  # index of the step, 0-based; None: any
    incarnation: Count | None = None  # only this incarnation of the rank; None: any
    operation: Name = ""  # only this collective, as torch's process groups name it; "": any. Then `point` is COLLECTIVE
    group: Annotated[
        tuple[Rank, ...], Meta(max_length=MOST_OF_A_RANK)
    ] = ()  # only in the process group of these ranks; (): any
    rate: Share = 0.0  # above 0: each time that it fits, with this probability, again and again; 0: once
