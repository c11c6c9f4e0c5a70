"""A vote of all ranks on what they hold: who says what, and what follows from it. Pure.

Each rank hashes its shards. With a commit barrier the hashes go round, and when it is passed every rank has heard the
same and draws the same conclusion, before the update of the step. Ranks with one hash of a shard hold the same bytes.
So of three copies or more the odd one is wrong; two that differ name no rank; one is not checked. A copy that a repair
has just brought from another rank has no voice: it says again what its sender says.

What is said is united in any order, and hearing it twice changes nothing. Of each hash the lowest ranks that have it
are named, and no more than are needed to count: in a large world the message stays small.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from .gathered import Gathered, Hash

VOTES_OF_A_STEP = 0.004  # that `auto` lets a rank hash. With what others wait for it, it is less than half a percent
MOST_RANKS = 8  # that are named for one hash of a shard
MOST_HASHES = 8  # of one shard
MOST_SHARDS = 100_000

Held = Annotated[dict[Hash, list[int]], Meta(max_length=MOST_HASHES)]
Before = Annotated[dict[str, tuple[Hash, ...]], Meta(max_length=MOST_SHARDS)]


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """The copies of one shard, as far as they are known. `proven`: they have been equal once.

    `ranks`: of each hash, the lowest that have it. `received`: those that have it from another rank, since the last
    vote that passed.
    """

    proven: bool
    ranks: Held
    received: Held

    def united(self, other: "Copies") -> "Copies":
        """Return what is known together."""
        ranks, received = _united(self.ranks, other.ranks), _united(self.received, other.received)
        return Copies(self.proven or other.proven, ranks, received)

    @property
    def hashes(self) -> set[int]:
        """All that some rank has."""
        return {*self.ranks, *self.received}

    @property
    def holders(self) -> list[int]:
        """The ranks that are known to hold the shard."""
        return sorted(rank for by_hash in (self.ranks, self.received) for held in by_hash.values() for rank in held)

    def judged(self) -> "_Odd | None":
        """Return the ranks that differ from a strict majority; None where there is none that is known to be one."""
        voices = self.ranks or self.received
        (right, first), *others = sorted(voices.items(), key=lambda each: len(each[1]), reverse=True)
        odd = [rank for _, held in others for rank in held]
        copied = [held for each, held in self.received.items() if each != right and voices is self.ranks]
        all_named = all(len(held) < MOST_RANKS for held in (*(held for _, held in others), *copied))
        if len(voices) == MOST_HASHES or not all_named or len(first) <= len(odd):
            return None
        if copied and len(first) == 1 and len(self.holders) > 2:
            return None  # one voice against what others were sent: it may have gone wrong since it sent that
        return _Odd(odd, [rank for held in copied for rank in held], alone=not odd and all(len(h) == 1 for h in copied))


class _Odd(msgspec.Struct, frozen=True):
    """The ranks that differ in a shard: by themselves, and in a copy that they have been sent.

    `alone`: no rank has what one of the latter has, so none can have sent it.
    """

    themselves: list[int]
    received: list[int]
    alone: bool


def _united(ours: Held, theirs: Held) -> Held:
    ranks = {each: list(held) for each, held in ours.items()}
    for each, held in theirs.items():
        ranks[each] = sorted({*ranks.get(each, ()), *held})[:MOST_RANKS]
    kept = sorted(ranks, key=lambda each: (ranks[each][0], each))[:MOST_HASHES]
    return {each: ranks[each] for each in kept}


class _Said(msgspec.Struct, frozen=True, array_like=True):
    agreed: int  # the newest state that passed a vote; 0: none has
    copies: Annotated[dict[str, Copies], Meta(max_length=MOST_SHARDS)]
    changed: dict[int, list[str]]  # of each rank, the shards whose memory has changed between two updates
    steady: bool  # no rank knows that the script changes them there
    left_out: Annotated[list[str], Meta(max_length=MOST_SHARDS)]  # shards whose copies never were equal
    apart: Annotated[int, Meta(ge=1)]  # steps to the next vote, that some rank asks for
    before: Before  # what was anywhere at an earlier vote on this state, which blamed no rank


class VoteResult(msgspec.Struct, frozen=True):
    """The result of a vote, the same on all ranks.

    `odd`: of each rank that differs from a majority, the shards. `misled`: those of them that may have been sent their
    copy by another odd one, and `arrived`: those whose copy was right when it was sent.
    `changed`: of each rank, the shards whose memory has changed where nothing may. `steady`: not where the script
    changes it. `undecided`: the ranks that hold a
    shard of which no rank can be blamed, and `hashes`: all that they have of it. `never_equal`:
    shards whose copies were not equal in the first vote on them either. `single`: those that one rank alone holds.
    `first`: no rank has seen copies that are equal before.
    `agreed`: the newest state that had passed a vote before. `apart`: the most steps to the next vote that a rank has
    asked for. `before`: all that ranks had of a shard at a vote on the same state that blamed no rank.
    """

    agreed: int
    odd: dict[int, tuple[str, ...]]
    changed: dict[int, tuple[str, ...]]
    steady: bool
    undecided: dict[str, tuple[int, ...]]
    never_equal: tuple[str, ...]
    voted: bool  # some rank has said what it holds
    single: tuple[str, ...]
    first: bool
    misled: tuple[int, ...] = ()
    arrived: tuple[int, ...] = ()
    hashes: dict[str, tuple[int, ...]] = {}
    apart: int = 1
    before: dict[str, tuple[int, ...]] = {}

    @property
    def passed(self) -> bool:
        """True if nothing is wrong with any rank."""
        return not (self.odd or self.changed or self.undecided)

    @property
    def wrong(self) -> dict[int, tuple[str, ...]]:
        """The ranks whose copies are wrong, and which."""
        ranks = sorted({*self.odd, *self.changed})
        return {rank: tuple(sorted({*self.odd.get(rank, ()), *self.changed.get(rank, ())})) for rank in ranks}

    @property
    def to_blame(self) -> dict[int, tuple[str, ...]]:
        """Those of them that have made it wrong."""
        return {rank: shards for rank, shards in self.wrong.items() if rank not in self.misled}

    @property
    def speaker(self) -> int:
        """The rank that speaks for all where none is to blame."""
        return min((*self.wrong, *(rank for ranks in self.undecided.values() for rank in ranks)))

    def is_exact(self, state: int) -> bool:
        """Return whether a copy of those who are not to blame is what an undisturbed run has. `state`: of this vote.

        It is where nothing that is wrong has been in a gradient: the state before has passed a vote, too, so the odd
        one went wrong in the last update. Memory that has changed since this state was equal everywhere, and a copy
        that was changed on its way, have spoilt gradients that are not applied.
        """
        earlier = set(self.odd).difference(self.arrived)
        return not self.undecided and (not earlier or 0 < self.agreed >= state - 1)


class Ballot(Gathered[_Said]):
    """One rank's part of a vote: it goes through a commit barrier, and gathers what all ranks say."""

    about = "in a vote"

    def __init__(
        self,
        rank: int,
        hashes: Mapping[str, int],
        *,
        agreed: int = 0,
        proven: frozenset[str] = frozenset(),
        changed: tuple[str, ...] = (),
        steady: bool = True,
        received: frozenset[str] = frozenset(),
        left_out: frozenset[str] = frozenset(),
        apart: int = 1,
        before: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """`hashes`: of the shards here. `changed`: those whose memory has changed since they were hashed.

        `steady`: not where the script is known to change them. `received`: those that came from another rank after the
        last vote that passed. `left_out`: those that are voted on no more: a new process has not heard it.
        `apart`: the steps to the next vote that this rank asks for. `before`: as in the result.
        """
        self.changed = changed
        copies: dict[str, Copies] = {}
        for shard_id, each in hashes.items():
            voices: list[Held] = [{each: [rank]}, {}]
            copies[shard_id] = Copies(shard_id in proven, *(reversed(voices) if shard_id in received else voices))
        mine = {rank: list(changed)} if changed else {}
        super().__init__(_Said(agreed, copies, mine, steady, sorted(left_out), apart, dict(before)))

    def _united(self, theirs: _Said) -> _Said:
        ours = self._known
        copies = dict(ours.copies)
        for shard_id, each in theirs.copies.items():
            copies[shard_id] = each if shard_id not in copies else copies[shard_id].united(each)
        changed, steady = {**ours.changed, **theirs.changed}, ours.steady and theirs.steady
        left_out = sorted({*ours.left_out, *theirs.left_out})
        apart = max(ours.apart, theirs.apart)
        before = {**ours.before, **theirs.before}  # who heard that vote has heard the same
        return _Said(max(ours.agreed, theirs.agreed), copies, changed, steady, left_out, apart, before)

    def result(self, world_size: int) -> VoteResult:
        """Return what follows, once the barrier is passed.

        Where the memory of most ranks has changed the script has changed it. So it is taken in the first vote of a job,
        before which no rank has seen copies that are equal.
        """
        changed = self._known.changed
        first = not any(each.proven for each in self._known.copies.values())
        steady = self._known.steady and not (changed and (first or 2 * len(changed) > world_size))
        changed = changed if steady else {}
        odd: dict[int, list[str]] = {}
        undecided: dict[str, tuple[int, ...]] = {}
        never_equal, single = list[str](), list[str]()
        themselves, misled, arrived = set[int](), set[int](), set[int]()
        for shard_id, copies in sorted(self._known.copies.items()):
            if shard_id in self._known.left_out:
                never_equal.append(shard_id)
            elif len(copies.hashes) == 1:
                single += [shard_id] if len(copies.holders) == 1 else []
            elif not copies.proven:
                never_equal.append(shard_id)
            elif (wrong := copies.judged()) is None:
                undecided[shard_id] = tuple(copies.holders)
            else:
                themselves.update(wrong.themselves)
                (arrived if wrong.alone else misled).update(wrong.received)
                for rank in (*wrong.themselves, *wrong.received):
                    odd.setdefault(rank, []).append(shard_id)
        return VoteResult(
            agreed=self._known.agreed,
            odd={rank: tuple(shards) for rank, shards in sorted(odd.items())},
            changed={rank: tuple(shards) for rank, shards in sorted(changed.items())},
            steady=steady,
            undecided=undecided,
            never_equal=tuple(never_equal),
            voted=bool(self._known.copies),
            single=tuple(single),
            first=first,
            hashes={shard_id: tuple(sorted(self._known.copies[shard_id].hashes)) for shard_id in undecided},
            misled=tuple(sorted(misled - themselves - arrived - set(changed))),
            arrived=tuple(sorted(arrived - themselves - misled)),
            apart=self._known.apart,
            before=self._known.before,
        )
