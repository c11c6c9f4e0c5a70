"""What a node has prepared for a fault: processes that are imported or built ahead, and what they cost it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from . import environment as names
from .bounds import MOST_OF_A_NODE, Count, Rank, Seconds
from .types import JobSpec, StandbyDepth


class PreparedProcesses(msgspec.Struct, frozen=True):
    """The processes of one depth that a node has prepared, and what they took.

    `ranks`: for which they are built; with `imported` one process is there for whichever rank needs it. `took_s`: the
    longest of them; with `imported` the fork server's imports. `memory_bytes`: what would be free without them; with
    `imported` the share of the fork server and that process in what all that are forked have in common.
    """

    depth: StandbyDepth
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MOST_OF_A_NODE)] = ()
    took_s: Seconds = 0.0
    memory_bytes: Count = 0

    def cost_in_words(self) -> str:
        """Say what it took."""
        return f"{self.took_s:.2f} s, {self.memory_bytes / 1e6:.0f} MB"

    def in_words(self) -> str:
        """Say what is ready for a fault, and what that costs."""
        cost = f"{self.cost_in_words()} of memory"
        if self.depth is StandbyDepth.IMPORTED:
            return f"the modules of the next process are imported: {cost}"
        if not self.ranks:
            return "no process is built ahead"
        if len(self.ranks) == 1:
            return f"the next process of rank {self.ranks[0]} is built ahead: {cost}"
        ranks, memory = ", ".join(map(str, self.ranks)), f"{self.memory_bytes / 1e6:.0f} MB of memory in all"
        return f"the next processes of ranks {ranks} are built ahead: {self.took_s:.2f} s each at most, {memory}"


def builds_ahead(job: JobSpec) -> bool:
    """Say whether processes of a job can be built ahead: its program is Python, and stops at a train function."""
    wanted = job.settings.standby_depth is StandbyDepth.BUILT
    return wanted and not job.no_python and job.environment.get(names.MINDIO) != "1"
