"""Copies in host memory of simulated ranks: taken as the product's cadence says, and watched.

A copy is one number, the step that it is of. It is whole after a while, unless its process is gone by then. The files
are in the rank's place on its node, as they outlive its processes. With copies on two nodes it then goes to the rank
that keeps it, which sometimes does not answer.
"""

from typing import TYPE_CHECKING

import msgspec

from ...processor.copy_cadence import CopyCadence, file_to_write, stays
from ...protocol.errors import HostCopyError
from ...protocol.host_copies import Disk
from ...protocol.types import GuestCopy, RepairPart, RestoreSource, StepReport
from ..invariants import Invariant
from .network import Thread

if TYPE_CHECKING:
    from ..played_agent import HostedRank
    from .node import SimulatedAgent
    from .process import Process
    from .world import SimulatedWorld

LATE = 0.1  # how often a copy that is due finds the last one not whole
LONGEST_COPY_S = 0.3
DEAF = 0.01  # how often a rank that keeps copies does not answer
COPY_BYTES = 100


class PlayedCopies:
    """One process's view of the copies of its rank."""

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        self.rank = process.rank
        policy = self._world.policy
        self._on = RestoreSource.HOST_COPY in policy.restore
        self._twice = self._on and policy.host_copy.copies > 1
        self._cadence = CopyCadence(0 if policy.host_copy.every_steps == "auto" else policy.host_copy.every_steps)
        self._under_way: tuple[int, int] | None = None  # file and step
        self._agreed = self._open = False
        self._sound: int | None = None  # copies of later steps are of something that was found to be wrong
        self.part: RepairPart | None = None  # of the last plan
        self.keeper: int | None = None  # the rank that keeps its copies, as long as that answers

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which a whole copy is here."""
        self._finish(self._under_way)
        size = self._process.world_size
        return tuple(sorted(step for step, of_size in self._process.place.host_copies if step and of_size == size))

    def reported(self, report: StepReport) -> StepReport:
        """Return a report for barrier one with the copies that are here. They change no more until `resumed`."""
        self._open = False
        self._drop_doubtful()
        size = self._process.world_size
        kept = (each for each in self._process.place.guest_copies if each[1] and each[2] == size)
        guests = tuple(GuestCopy(rank, step, COPY_BYTES) for rank, step, _ in kept)
        return msgspec.structs.replace(report, host_copies=self.steps(), guest_copies=guests)

    def resumed(self) -> None:
        """Keep the copies of the step of which there is one of every rank."""
        process, world, part = self._process, self._world, self.part
        common = 0 if part is None else part.host_copy
        place, before = process.place, common_copy(world)
        voting = process.integrity.agreed is not None
        stay = [stays(step, Disk.NO, common, goes_back=voting) for step, _ in place.host_copies]
        place.host_copies[:] = [each if kept else (0, 0) for each, kept in zip(place.host_copies, stay, strict=True)]
        place.guest_copies[:] = [each if each[1] == common else (0, 0, 0) for each in place.guest_copies]
        if 0 < before <= process.standing.count and not common_copy(world):
            world.fail(Invariant.NOTHING_LOST, f"rank {process.rank} drops its copy of step {before}, which all have")
        self._under_way, self._agreed, self._open, self._sound = None, False, True, None
        self.keeper = part.copy_holder if part is not None and self._twice else None
        self._cadence.resumed(0 if self._twice else common)

    def doubt(self, sound: int) -> None:
        """Use no copy of a later step. Those that are here go at once, in which nothing takes time, and again later."""
        self._sound, self._under_way = sound, None
        self._drop_doubtful()

    def _drop_doubtful(self) -> None:
        place, sound = self._process.place, self._sound
        if sound is not None:
            place.host_copies[:] = [each if each[0] <= sound else (0, 0) for each in place.host_copies]
            place.guest_copies[:] = [each if each[1] <= sound else (0, 0, 0) for each in place.guest_copies]

    def says(self, votes: dict[int, list[bool]], step: int) -> None:
        """Say at the commit barrier whether this rank is for a copy."""
        if self._on:
            if self._world.chance.random() >= LATE:
                self._finish(self._under_way)
            votes.setdefault(step, []).append(self._cadence.agrees(step))

    def hears(self, votes: dict[int, list[bool]], step: int) -> None:
        """Hear at its end whether all were."""
        self._agreed = self._on and all(votes[step])

    def take(self, step: int) -> None:
        """Begin the copy of a step."""
        if not self._agreed:
            return
        process, world = self._process, self._world
        self._agreed = False
        self._cadence.began(step)
        if not process.memory.is_of(step):
            world.fail(Invariant.SAME_NUMBERS, f"rank {process.rank} copies {process.memory.shards} as of step {step}")
        files, before, twofold = process.place.host_copies, common_copy(world), twofold_copy(world)
        file = file_to_write([each for each, _ in files], process.integrity.agreed)
        files[file] = (0, 0)
        process.integrity.copies(step)
        process.place.damaged.discard(step)
        self._under_way = under_way = (file, step)
        self._check_left(step, before, twofold)
        world.timeline.after(world.chance.uniform(0.0, LONGEST_COPY_S), lambda: self._finish(under_way))

    def bring(self, part: RepairPart) -> Thread[None]:
        """Get the copy of this rank from the one that keeps it, and send those that are kept here."""
        process, group, step = self._process, self._process.group, part.target_step
        assert group is not None
        for move in part.copy_transfers:
            if move.source == process.rank:
                mine = (move.destination, step, process.world_size)
                if mine not in process.place.guest_copies:
                    what = f"rank {process.rank} is told to send the copy of step {step} of rank {move.destination}"
                    self._world.fail(Invariant.NOTHING_LOST, f"{what}, and has {process.place.guest_copies}")
                group.post(("copy", move.destination), step)
        for move in part.copy_transfers:
            if move.destination == process.rank:
                yield lambda go: group.receive(("copy", process.rank), lambda _: go(None))
                files = process.place.host_copies
                files[file_to_write([each for each, _ in files])] = (step, process.world_size)

    def load(self, step: int) -> None:
        """Go back to a copy. Raises HostCopyError where it turns out to be damaged."""
        process, world = self._process, self._world
        if step not in self.steps():
            what = f"rank {process.rank} is told to load its copy of step {step}, and has {process.place.host_copies}"
            world.fail(Invariant.NOTHING_LOST, what)
        if step in process.place.damaged:
            process.place.damaged.discard(step)
            files = process.place.host_copies
            files[:] = [(0, 0) if each[0] == step else each for each in files]
            raise HostCopyError(f"the copy of step {step} is damaged")
        process.memory.load(step)

    def _finish(self, under_way: tuple[int, int] | None) -> None:
        if under_way is None or under_way is not self._under_way or not self._process.alive:
            return
        file, step = under_way
        files = self._process.place.host_copies
        if files[file] == (0, 0):
            files[file] = (step, self._process.world_size)
            if self.keeper is not None and self._open:
                self._hand_over(under_way, self.keeper)
        if self.keeper is None or self._is_kept(step):
            self._under_way = None
            self._cadence.became_whole(waited_s=0.0, took_s=0.01, step_s=0.1)

    def _hand_over(self, under_way: tuple[int, int], keeper: int) -> None:
        """Have the copy written at the rank that keeps it, after a while; it may not answer."""
        process, world, step = self._process, self._world, under_way[1]
        holder = next(
            (each for each in world.living() if each.rank == keeper and each.copies.takes_from(process)), None
        )
        if holder is None or world.chance.random() < DEAF:
            self.keeper = None
            return
        files, before, twofold = holder.place.guest_copies, common_copy(world), twofold_copy(world)
        file = file_to_write([each for _, each, _ in files])
        files[file] = (0, 0, 0)
        self._check_left(step, before, twofold)

        def arrive() -> None:
            if process.alive and self._open and self._under_way is under_way and holder.copies.takes_from(process):
                files[file] = (process.rank, step, process.world_size)
                self._finish(under_way)

        world.timeline.after(world.chance.uniform(0.0, LONGEST_COPY_S), arrive)

    def takes_from(self, guest: "Process") -> bool:
        """Return whether copies of that process are taken in here now."""
        mine = self._process
        same = mine.session.generation == guest.session.generation
        return mine.alive and self._open and same and self.part is not None and self.part.copy_guest == guest.rank

    def _is_kept(self, step: int) -> bool:
        mine = (self._process.rank, step, self._process.world_size)
        return any(mine in place.guest_copies for place in _places(self._world))

    def _check_left(self, step: int, before: int, twofold: int) -> None:
        """From the first on there is a step of which there is a copy of every rank, and one of which there are two."""
        world, rank = self._world, self._process.rank
        if before and not common_copy(world):
            what = f"rank {rank} begins a copy of step {step} over that of {before}, the last that all had"
            world.fail(Invariant.NOTHING_LOST, what)
        if twofold and not twofold_copy(world):
            what = f"rank {rank} begins a copy of step {step} over that of {twofold}, the last that all had twice"
            world.fail(Invariant.NOTHING_LOST, what)


def _current(world: "SimulatedWorld") -> "list[Process]":
    """Return the processes of the world as it is now; none if one is missing."""
    current = [each for each in world.living() if world.rank_watch.is_current(each)]
    return current if len({each.rank for each in current}) == world.size else []


def _places(world: "SimulatedWorld") -> "list[HostedRank[Process]]":
    return [each.place for each in world.living() if world.rank_watch.is_current(each)]


def _copies(world: "SimulatedWorld", *, both: bool) -> int:
    """Return the newest step of which every rank has a copy of its own or at another; `both`: and at another."""
    current = _current(world)
    kept: dict[int, set[int]] = {}
    for each in current:
        for rank, step, size in each.place.guest_copies:
            if size == each.world_size:
                kept.setdefault(rank, set()).add(step)
    found = []
    for each in current:
        own = {step for step, size in each.place.host_copies if size == each.world_size}
        others = kept.get(each.rank, set())
        found.append(own | others if not both else own & others if each.copies.keeper is not None else own)
    return max(set.intersection(*found) - {0}, default=0) if found else 0


def common_copy(world: "SimulatedWorld") -> int:
    """Return the newest step of which every rank has a whole copy where it is now, or at another; 0: of none."""
    return _copies(world, both=False)


def twofold_copy(world: "SimulatedWorld") -> int:
    """Return the newest step of which every rank that has a keeper has a whole copy here and there; 0: of none."""
    return _copies(world, both=True)


class LostNode(msgspec.Struct, frozen=True):
    """The loss of a node, before which there were two copies of every rank: another node has one of each still."""

    node: str
    step: int  # of which there were
    nodes: dict[int, str]  # of the ranks


def note_loss(world: "SimulatedWorld", agent: "SimulatedAgent") -> LostNode | None:
    """Return what has to be left when a node dies; None where not every rank of it had a copy elsewhere."""
    current = _current(world)
    step = twofold_copy(world)
    if not step or any(each.copies.keeper is None for each in current if each.agent is agent):
        return None
    return LostNode(agent.name, step, {each.rank: each.agent.name for each in current})


def check_target(world: "SimulatedWorld", target: int) -> None:
    """Nothing lost: where all ranks have a copy of one step, none goes back further; but after a vote that was lost."""
    loss, world.lost_node = world.lost_node, None
    if RestoreSource.HOST_COPY not in world.policy.restore or world.machine.state.incident.trusted_step is not None:
        return
    common = common_copy(world)
    if target < common:
        world.fail(Invariant.NOTHING_LOST, f"all go back to step {target}, and have copies of step {common}")
    if loss is None or any(place.damaged for place in _places(world)):
        return
    nodes = {each.rank: each.agent.name for each in _current(world)}
    stayed = all(nodes.get(rank) == node for rank, node in loss.nodes.items() if node != loss.node)
    if stayed and len(nodes) == len(loss.nodes) and target < loss.step:
        what = f"{loss.node} alone was lost, and all go back to step {target}: of {loss.step} each rank had two copies"
        world.fail(Invariant.NOTHING_LOST, what)
