"""The `hosts` platform: machines that the user's own launcher has brought, and that join the job by themselves.

It can make no node. What has to be done to one is ordered from the node's own agent, over the connection that it has
with the controller. So this platform has nothing to run: it only says who is to be told what.
"""

import msgspec

from ..protocol.exits import ANOTHER_NODE
from ..protocol.messages import ArmFault, Command, DeleteNode, EndJob, KillNode
from ..protocol.types import ArmedFault, FaultAction, node_address

GIVEN_BACK = "this node is not to be used any more: start the agent on another one"


class Order(msgspec.Struct, frozen=True):
    """A command for an agent, by its address."""

    receiver: str
    body: Command


def agent_order(command: Command) -> Order | None:
    """Return the order for an agent that a command to the platform comes to; None where no agent has to do anything.

    Each agent gets the end of the job by itself.
    """
    match command:
        case DeleteNode(node=node):
            return Order(node_address(node), EndJob(exit_code=ANOTHER_NODE, reason=GIVEN_BACK))
        case KillNode(node=node):
            return Order(node_address(node), ArmFault(ArmedFault(rank=0, action=FaultAction.KILL_NODE)))
        case _:
            return None
