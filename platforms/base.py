"""Interface of a platform: provides nodes when the controller asks for them, and reports when they are lost.

A platform is a peer of the controller, at the address "platform". It decides nothing.
"""

from typing import Protocol

from ..protocol.messages import CreateNode, DeleteNode, EndJob, KillNode


class Platform(Protocol):
    """Provides nodes. Each command may come twice; the second must change nothing.

    The loss of a node that the controller has not deleted is reported as NodeLost, once, whatever caused it.
    """

    def create_node(self, command: CreateNode) -> None:
        """Make a node and start its agent, which then joins by itself. Answers with NodeRefused if it cannot.

        Called while a recovery waits for a replacement, or ahead of time, for spare nodes.
        """
        ...

    def delete_node(self, command: DeleteNode) -> None:
        """End the node's agent and everything on it, and forget it. Called when a rung leaves a node."""
        ...

    def kill_node(self, command: KillNode) -> None:
        """Kill the node's agent and processes at once, as a power cut would, to inject a fault. NodeLost follows."""
        ...

    def end_job(self, command: EndJob) -> None:
        """Take note that the job has ended: agents exit by themselves, and are no longer reported as lost."""
        ...
