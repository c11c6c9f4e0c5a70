"""The own state of each rank, kept where it outlives the process: in its black box, and at a buddy on another node."""

from typing import TYPE_CHECKING

from ..protocol.blackbox import BlackBox

if TYPE_CHECKING:
    from ..communicators.base import Communicator


class OwnStates:
    """Writes this rank's own state to its black box, and swaps copies around the ring of buddies.

    The buddy of a rank is the rank one node further, so that no single node holds both copies. Used by the train
    thread.
    """

    def __init__(
        self, *, rank: int, world_size: int, ranks_per_node: int, black_box: BlackBox, communicator: "Communicator"
    ) -> None:
        shift = ranks_per_node % world_size or 1
        self._alone = world_size == 1
        self._buddy = (rank + shift) % world_size
        self._ward = (rank - shift) % world_size
        self._black_box = black_box
        self._communicator = communicator
        self._rank = rank

    def keep(self, step: int, blob: bytes) -> None:
        """Write the own state as of `step` committed updates to the black box."""
        self._black_box.write_own(step, blob)

    def swap(self, step: int, blob: bytes) -> None:
        """Send the own state to the buddy and keep the ward's; returns when the ward's is here.

        Raises CommunicatorAborted or CommunicatorFailed.
        """
        if self._alone:
            return
        self._black_box.write_ward(self._ward, step, self._communicator.swap(blob, self._buddy, self._ward))

    def read(self, rank: int, step: int) -> bytes | None:
        """Return the copy of a rank's own state as of `step` that is kept here, if there is one."""
        return self._black_box.read_own(step) if rank == self._rank else self._black_box.read_ward(rank, step)
