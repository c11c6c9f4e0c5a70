"""Silent corruption of a simulated job: bits that flip with nothing raised, and the ranks' votes on what they hold.

What is wrong in a shard is a set of marks. A flip puts one there; who computes with it spoils the gradients, and these
go into all copies alike. The hash of a shard is one of its step and its marks. The votes are the product's own
(`processor/votes.py`), and so is what follows from them. It is held against the marks: a state that passes a vote has
none, and a rank is blamed only for what has flipped there.

A flip is over at the next vote, but for one on a device that is wrong in every update: then the rank has to be moved.
"""

import random
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import xxhash

from ...processor.ballot import VOTES_OF_A_STEP, Ballot
from ...processor.framework import ShardDigest
from ...processor.votes import Votes
from ...protocol.errors import Interrupted
from ...protocol.types import FaultKind, RepairPart, RestoreSource
from ..invariants import Invariant

if TYPE_CHECKING:
    from .network import Group, Key
    from .process import Process
    from .process_faults import Inject
    from .world import SimulatedWorld

STEP_S = 0.1
HASHING_S = 0.25 * VOTES_OF_A_STEP * STEP_S  # of the quickest process; a vote takes it twice
UNEVEN = 5
LEAST_VOICES = 2  # that say the same: one rank alone is compared with no other
OF_VOTES = frozenset({FaultKind.ODD_COPY, FaultKind.COPIES_DIFFER})
Marks = frozenset[str]
CLEAN: Marks = frozenset()


class Corruption:
    """All that is wrong in one job, and what has been saved of it."""

    def __init__(self, world: "SimulatedWorld") -> None:
        integrity = world.setting.policy.integrity
        self.is_on = integrity.every_steps != 0 and not world.setting.plain
        self.in_each_step = integrity.every_steps == 1
        self.flips = 0
        self.found = 0  # times that a vote was lost, or memory was found to have changed
        self.struck: set[tuple[int, str]] = set()  # ranks, with their nodes, where something has flipped
        self.beyond_votes: set[str] = set()  # marks that no vote can see: nothing was left to compare them with
        self.written: dict[tuple[int, str], Marks] = {}  # of a checkpoint of that step: what was written of a shard
        self.copies: dict[tuple[int, int], dict[str, Marks]] = {}  # of the copy of a rank of that step

    def mark(self, what: str) -> str:
        """Return the name of one more flip."""
        self.flips += 1
        return f"{what} {self.flips}"


class PlayedIntegrity:
    """All that is wrong in one process, and its part in the votes. It stands for its framework and runtime, too."""

    changes_in_updates_alone = True

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        self._of_job = process.world.corruption
        self.marks: dict[str, Marks] = {}
        self._gradient: Marks = CLEAN  # in the gradients that all have
        self.own_gradient: Marks = CLEAN  # in those of this rank alone, after they were reduced
        self.rank = process.rank
        self.settings = process.world.job.settings
        self.step_clock = self.black_box = self
        self.votes: Any = None
        if self._of_job.is_on:
            self.votes = Votes(self, self, process.standing, self._hashed_s)  # type: ignore[arg-type]
        self._hashing_s = 0.0
        self._ballot: Ballot | None = None
        self.received = False  # what is here is another rank's copy, which has passed no vote here
        self._voices, self._voted_on = 0, CLEAN
        self._mends = False  # a vote was lost, and what is wrong here is replaced for that

    # --- what the votes ask for ---------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """How many ranks the world has, as this one knows."""
        return self._process.world_size

    @property
    def activity(self) -> Any:
        """The step clock's."""
        return self._process.activity

    def doing(self, activity: Any) -> None:
        """Hashing takes no time here."""

    def set_votes(self, step: int, unchecked: int) -> None:
        """A vote has passed here: what this rank held when it said so has to be right."""
        of_job, marks = self._of_job, self._voted_on
        self.received = False
        for each in self._world.living():
            if not self._world.rank_watch.is_current(each):  # cut off, and as good as gone
                each.integrity.gone()
        if self._voices < LEAST_VOICES or unchecked:
            of_job.beyond_votes |= marks
        wrong = {each for each in marks if _flip(each) not in {_flip(mark) for mark in of_job.beyond_votes}}
        if wrong:
            what = f"the vote on step {step} has passed, and rank {self.rank} holds {sorted(wrong)}"
            self._world.fail(Invariant.NO_WRONG_STATE_PASSES, what)

    def shards(self) -> list[Any]:
        """Nothing is left out of the votes."""
        return []

    def _hashed_s(self) -> float:
        return self._hashing_s

    def digests(self) -> dict[str, ShardDigest]:
        """Hash each shard. Some processes take longer than others, so that not all want equally many votes."""
        self._hashing_s += HASHING_S * (1 + (self.rank + self._process.incarnation) % UNEVEN)
        found = {}
        for shard, step in self._process.memory.shards.items():
            value = xxhash.xxh3_64_intdigest(f"{step} {sorted(self.marks.get(shard, CLEAN))}".encode())
            found[shard] = ShardDigest(value, value)
        return found

    def report_fault(self, kind: FaultKind, detail: str, *given: Any, **named: Any) -> None:
        """Report what a vote has found; it must be there."""
        of_job, world = self._of_job, self._world
        of_job.found += 1
        node = self._process.agent.name
        if kind is FaultKind.ODD_COPY and (self.rank, node) not in of_job.struck:
            what = f"rank {self.rank} on {node} is blamed, where nothing has flipped: {detail}"
            world.fail(Invariant.RIGHT_RANK_BLAMED, what)
        if not of_job.struck:
            world.fail(Invariant.RIGHT_RANK_BLAMED, f"nothing has flipped: {detail}")
        self._process.report_fault(kind, detail, *given, **named)

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def all_marks(self) -> Marks:
        """All that is wrong here."""
        return CLEAN.union(*self.marks.values())

    def repairing(self, part: RepairPart) -> "AbstractContextManager[None]":
        """Surround a repair."""
        return nullcontext() if self.votes is None else self.votes.repairing(part)

    def resumed(self) -> None:
        """Begin to train."""
        self._gradient, self.own_gradient, self._mends = CLEAN, CLEAN, False
        if self.votes is not None:
            self.votes.resumed(self._process.standing.count)

    def begins(self, step: int, *, audited: bool) -> None:
        """Begin a step: hash what is here, if it has a vote."""
        every = self._world.setting.checkpoint_every
        if self.votes is not None:
            self.votes.begins(step, wanted=audited or bool(every and step and step % every == 0))

    def computes(self, group: "Group", step: int) -> None:
        """Give gradients to the others: whatever is wrong here is in them."""
        if self.votes is not None:
            group.marks.setdefault(("gradients", step), set()).update(f"{each}, spread" for each in self.all_marks)

    def computed(self, group: "Group", step: int) -> None:
        """Have the gradients of all."""
        if self.votes is not None:
            self._gradient = frozenset(_spread_once(each) for each in group.marks.get(("gradients", step), ()))

    def says(self, group: "Group", step: int) -> None:
        """Say at the commit barrier what is held here."""
        if self.votes is not None:
            self._ballot, self._voted_on = self.votes.ballot(STEP_S), self.all_marks
            if self._ballot is not None:
                group.ballots.setdefault(step, []).append((self._ballot.said(), not self.received))

    def hears(self, group: "Group", step: int) -> None:
        """Hear it of all others, at the end of the barrier. Raises Interrupted if the vote is lost."""
        if self._ballot is None:
            return
        ballot, self._ballot = self._ballot, None
        for said, _ in group.ballots[step]:
            ballot.heard(said)
        self._voices = sum(has_voice for _, has_voice in group.ballots[step])
        self._mends = True
        try:
            self.votes.counted(step - 1, ballot)
        except Interrupted:
            self._process.copies.doubt(int(self.votes.sound))
            raise
        self._mends = False

    def held(self) -> None:
        """Apply the update though the barrier broke: others have, so its vote has passed."""
        if self._ballot is not None:
            self._ballot = None
            self.votes.passed_elsewhere(self._process.standing.count)

    def updated(self) -> None:
        """Apply the gradients, on a device that may be wrong each time."""
        process, spoilt = self._process, self._gradient | self.own_gradient
        self._gradient = self.own_gradient = CLEAN
        if process.rank in process.agent.wrong_ranks:
            self._of_job.struck.add((process.rank, process.agent.name))
            spoilt |= {self._of_job.mark("device")}
            process.faulty = True
        if spoilt or self.marks:
            self.marks = {shard: self.marks.get(shard, CLEAN) | spoilt for shard in process.memory.shards}

    def not_trusted(self, lost: list[str]) -> list[str]:
        """Return what the device has lost, and else the shards that have changed in the step that was left."""
        changed = () if self.votes is None else self.votes.changed_since_begun(readable=not lost)
        if changed:
            self._process.copies.doubt(int(self.votes.sound))
        return [*lost, *changed]

    @property
    def agreed(self) -> int | None:
        """The newest state that passed a vote; None where ranks do not vote."""
        return None if self.votes is None else int(self.votes.agreed)

    # --- copies ---------------------------------------------------------------------------------------------------

    def sends(self, group: "Group", key: "Key", shard: str) -> None:
        """Hand out a shard, with what is wrong in it."""
        group.marks[key] = set(self.marks.get(shard, CLEAN))

    def arrives(self, group: "Group", keys: "dict[str, list[Key]]") -> None:
        """Adopt the shards that have come, each in some pieces."""
        for shard, pieces in keys.items():
            if not self._mends:
                self._forget(self.marks.get(shard, CLEAN))
            self.received = True
            self.marks[shard] = CLEAN.union(*(group.marks.get(key, ()) for key in pieces))

    def gone(self) -> None:
        """The process has ended."""
        self._forget(self.all_marks)

    def _forget(self, marks: Marks) -> None:
        """These marks are here no more. Unless each step has a vote it has been in gradients, which all have alike."""
        if not self._of_job.in_each_step:
            self._of_job.beyond_votes |= marks

    def writes(self, step: int) -> None:
        """Write what this rank writes into a checkpoint."""
        for shard in self._process.memory.shards:
            if self.rank == min(r for r in range(self.world_size) if shard in self._world.shards(r, self.world_size)):
                self._of_job.written[step, shard] = self.marks.get(shard, CLEAN)

    def saves(self, step: int, shards: tuple[str, ...]) -> None:
        """Write shards before all processes end; they pass no vote before."""
        for shard in shards:
            marks = self.marks.get(shard, CLEAN)
            self._of_job.written[step, shard] = marks
            self._of_job.beyond_votes |= marks

    def copies(self, step: int) -> None:
        """Take a copy into host memory."""
        shards = self._process.memory.shards
        self._of_job.copies[self.rank, step] = {each: self.marks.get(each, CLEAN) for each in shards}

    def loads(self, step: int, source: RestoreSource) -> None:
        """Go back to a copy or a checkpoint; where a vote has been lost it must be right."""
        of_job, shards = self._of_job, self._process.memory.shards
        self.received = False
        if source is RestoreSource.HOST_COPY:
            self.marks = dict(of_job.copies.get((self.rank, step), {}))
        else:
            self.marks = {shard: of_job.written.get((step, shard), CLEAN) for shard in shards}
        trusted = self._world.machine.state.incident.trusted_step
        wrong = {each for each in self.all_marks if _flip(each) not in {_flip(mark) for mark in of_job.beyond_votes}}
        if trusted is not None and (wrong or step > trusted):
            what = f"rank {self.rank} goes back to step {step} with {sorted(wrong)}, and {trusted} is the last to trust"
            self._world.fail(Invariant.NO_WRONG_STATE_PASSES, what)


def _spread_once(mark: str) -> str:
    """Return the mark that all get: what is spread once more is no other one."""
    return f"{_flip(mark)}, spread"


def _flip(mark: str) -> str:
    return mark.partition(",")[0]


# --- what flips -------------------------------------------------------------------------------------------------------


def _victim(world: "SimulatedWorld", chance: random.Random) -> "Process | None":
    """Draw a rank of a world that has passed a vote; none while something else is wrong: each flip comes alone."""
    living = [each for each in world.living() if world.rank_watch.is_current(each)]
    if any(each.integrity.all_marks - world.corruption.beyond_votes for each in world.living()):
        return None
    if not any(each.integrity.agreed for each in living):
        return None
    ready = [each for each in living if each.standing.count and each.memory.left]
    return chance.choice(sorted(ready, key=lambda each: each.rank)) if ready else None


def _flips(what: str) -> "Inject":
    def inject(world: "SimulatedWorld", chance: random.Random) -> str:
        process = _victim(world, chance)
        if process is None:
            return "no state to flip a bit of: none has passed a vote, or one is wrong already"
        name, of_process = world.corruption.mark(what), process.integrity
        world.corruption.struck.add((process.rank, process.agent.name))
        process.faulty = True
        if what == "gradient":
            of_process.own_gradient |= {name}
        elif what == "device":
            process.agent.wrong_ranks.add(process.rank)
        else:
            shard = chance.choice(sorted(process.memory.shards))
            of_process.marks[shard] = of_process.marks.get(shard, CLEAN) | {name}
        return f"{name} of rank {process.rank} is wrong, in step {process.standing.count}, {process.activity}"

    return inject


FLIPS: "tuple[Inject, ...]" = (_flips("state"), _flips("state"), _flips("gradient"))
wrong_device: "Inject" = _flips("device")
