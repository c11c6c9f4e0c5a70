"""What a platform must do: have nodes when the controller asks for them, and say when they are gone.

A platform is a peer of the controller, at the address "platform". It decides nothing.
"""

from typing import Protocol

from ..protocol.messages import CreateNode, DeleteNode, EndJob, KillNode


class Platform(Protocol):
    """Where nodes come from. Each command may come twice and must then change nothing more.

    Whatever ends a node that the controller has not deleted is reported as NodeLost, once.
    """

    def create_node(self, command: CreateNode) -> None:
        """Make a node and start its agent, which then joins by itself. What cannot be had is answered by
        NodeRefused.

        Runs while a recovery waits for a replacement, or ahead, for spare nodes.
        """
        ...

    def delete_node(self, command: DeleteNode) -> None:
        """End the node's agent and everything on it, and forget it. Runs when a rung leaves a node behind."""
        ...

    def kill_node(self, command: KillNode) -> None:
        """End agent and processes of the node at once, as a power cut would. NodeLost follows. For injected
        faults.
        """
        ...

    def end_job(self, command: EndJob) -> None:
        """The job is over: agents leave by themselves, and are not reported as lost any more."""
        ...
