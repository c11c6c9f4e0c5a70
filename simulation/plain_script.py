"""A script that knows nothing of midstep: it meets its peers, works, and ends. Restarted as a whole, as by torchrun."""

from typing import TYPE_CHECKING

from ..protocol.errors import CommunicatorFailed
from .played_thread import Thread

if TYPE_CHECKING:
    from .process import Process

ROUND_S = 0.2
COLLECTIVE_S = 1800.0  # torch's own limit
EXIT_RAISED = 1


class PlainScript:
    """One life of it. It starts from nothing, and any broken collective ends it."""

    def __init__(self, process: "Process") -> None:
        self._process = process

    def run(self) -> Thread[None]:
        """Work for a round, then meet the others, until all is done. Raises CommunicatorError."""
        process, world = self._process, self._process.world
        for done in range(world.setting.total_steps):
            if process.raising:
                process.end(EXIT_RAISED)
                return
            yield process.sleep(world.chance.uniform(0.0, ROUND_S) * process.slowness)
            if process.failed is not None:
                process.end(EXIT_RAISED)
                return
            yield from self._meet(done + 1)
        if process.raising:
            process.end(EXIT_RAISED)
            return
        world.watch.finished_plainly(process)
        process.end(0)

    def _meet(self, number: int) -> Thread[None]:
        process, group = self._process, self._process.group
        assert group is not None
        process.in_collective = True
        error = CommunicatorFailed(f"not over within {COLLECTIVE_S} s")
        yield process.within(COLLECTIVE_S, lambda go: group.enter(("round", number), process, lambda: go(None)), error)
        process.in_collective = False
