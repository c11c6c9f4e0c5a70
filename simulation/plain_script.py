"""A script that knows nothing of midstep: it meets its peers, works, and ends. Restarted as a whole, as by torchrun."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process import Process

ROUND_S = 0.2
EXIT_RAISED = 1


class PlainScript:
    """One life of it. It starts from nothing, and any broken collective ends it."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._done = 0

    def run(self) -> None:
        """Work for a round, then meet the others, until all is done."""
        process, world = self._process, self._process.world
        if process.raising:
            process.end(EXIT_RAISED)
        elif self._done >= world.setting.total_steps:
            world.watch.finished_plainly(process)
            process.end(0)
        else:
            process.broken = None
            process.later(world.chance.uniform(0.0, ROUND_S) * process.slowness, self._meet)

    def _meet(self) -> None:
        process = self._process
        assert process.group is not None
        process.broken = lambda: process.end(EXIT_RAISED)
        if process.failed is not None:
            process.end(EXIT_RAISED)
            return
        self._done += 1
        process.group.enter(("round", self._done), process, process.still(self.run))
