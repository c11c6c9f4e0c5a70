"""A vote of all ranks on what they hold: who says what, and what follows from it. Pure.

Each rank hashes its shards. With a commit barrier the hashes go round, and when it is passed every rank has heard the
same and draws the same conclusion, before the update of the step. Ranks with one hash of a shard hold the same bytes.
So of three copies or more the odd one is wrong; two that differ name no rank; one is not checked.

What is said is united in any order, and hearing it twice changes nothing. Of each hash the lowest ranks that have it
are named, and no more than are needed to count: in a large world the message stays small.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from ..communicators.base import Gathering

MOST_RANKS = 8  # that are named for one hash of a shard
MOST_HASHES = 8  # of one shard
MOST_SHARDS = 100_000

Hash = Annotated[int, Meta(ge=0)]


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """The copies of one shard, as far as they are known. `proven`: they have been equal once."""

    proven: bool
    ranks: Annotated[dict[Hash, list[int]], Meta(max_length=MOST_HASHES)]  # of each hash, the lowest that have it

    def united(self, other: "Copies") -> "Copies":
        """Return what is known together."""
        ranks = {each: list(held) for each, held in self.ranks.items()}
        for each, held in other.ranks.items():
            ranks[each] = sorted({*ranks.get(each, ()), *held})[:MOST_RANKS]
        kept = sorted(ranks, key=lambda each: (ranks[each][0], each))[:MOST_HASHES]
        return Copies(self.proven or other.proven, {each: ranks[each] for each in kept})

    def odd_ones(self) -> tuple[int, ...] | None:
        """Return the ranks that differ from a strict majority; None where there is none that is known to be one."""
        first, *others = sorted(self.ranks.values(), key=len, reverse=True)
        odd = [rank for held in others for rank in held]
        counted = len(self.ranks) < MOST_HASHES and all(len(held) < MOST_RANKS for held in others)
        return tuple(sorted(odd)) if counted and len(first) > len(odd) else None


class _Said(msgspec.Struct, frozen=True, array_like=True):
    agreed: int  # the newest state that passed a vote; 0: none has
    copies: Annotated[dict[str, Copies], Meta(max_length=MOST_SHARDS)]
    changed: dict[int, list[str]]  # of each rank, the shards whose memory has changed between two updates


class VoteResult(msgspec.Struct, frozen=True):
    """The result of a vote, the same on all ranks.

    `odd`: of each rank that differs from a majority, the shards. `changed`: of each rank, the shards whose memory has
    changed where nothing may. `undecided`: the ranks that hold a shard of which no rank can be blamed. `never_equal`:
    shards whose copies were not equal in the first vote on them either. `single`: those that one rank alone holds.
    `agreed`: the newest state that had passed a vote before.
    """

    agreed: int
    odd: dict[int, tuple[str, ...]]
    changed: dict[int, tuple[str, ...]]
    undecided: dict[str, tuple[int, ...]]
    never_equal: tuple[str, ...]
    voted: bool  # some rank has said what it holds
    single: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if nothing is wrong with any rank."""
        return not (self.odd or self.changed or self.undecided)

    @property
    def to_blame(self) -> dict[int, tuple[str, ...]]:
        """The ranks that are wrong, and in which shards."""
        ranks = sorted({*self.odd, *self.changed})
        return {rank: tuple(sorted({*self.odd.get(rank, ()), *self.changed.get(rank, ())})) for rank in ranks}

    def is_exact(self, state: int) -> bool:
        """Return whether a copy of those who are not to blame is what an undisturbed run has. `state`: of this vote.

        It is where nothing that is wrong has been in a gradient: the state before has passed a vote, too, so the odd
        one went wrong in the last update. Memory that has changed since this state was equal everywhere has spoilt
        gradients that are not applied.
        """
        return not self.undecided and (not self.odd or self.agreed >= state - 1)


class Ballot:
    """One rank's part of a vote: it goes through a commit barrier, and gathers what all ranks say."""

    def __init__(
        self,
        rank: int,
        hashes: Mapping[str, int],
        *,
        agreed: int = 0,
        proven: frozenset[str] = frozenset(),
        changed: tuple[str, ...] = (),
    ) -> None:
        """`hashes`: of the shards here. `changed`: those whose memory has changed since they were hashed."""
        self.changed = changed
        copies = {shard_id: Copies(shard_id in proven, {each: [rank]}) for shard_id, each in hashes.items()}
        self._known = _Said(agreed, copies, {rank: list(changed)} if changed else {})
        self._encoded: bytes | None = None

    def said(self) -> bytes:
        """Return what this rank knows by now."""
        if self._encoded is None:
            self._encoded = _encode(self._known)
        return self._encoded

    def heard(self, said: bytes) -> None:
        """Take in what another rank knows. Raises ConnectionError for what no rank says."""
        try:
            theirs, ours = _decode(said), self._known
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"a rank says in a vote what cannot be understood: {error}") from error
        if theirs == ours:
            return
        copies = dict(ours.copies)
        for shard_id, each in theirs.copies.items():
            copies[shard_id] = each if shard_id not in copies else copies[shard_id].united(each)
        changed = {**ours.changed, **theirs.changed}
        self._known, self._encoded = _Said(max(ours.agreed, theirs.agreed), copies, changed), None

    def result(self, world_size: int) -> VoteResult:
        """Return what follows, once the barrier is passed.

        Where the memory of most ranks has changed the script has changed it.
        """
        by_script = 2 * len(self._known.changed) > world_size
        changed = {} if by_script else self._known.changed
        odd: dict[int, list[str]] = {}
        undecided: dict[str, tuple[int, ...]] = {}
        never_equal, single = list[str](), list[str]()
        for shard_id, copies in sorted(self._known.copies.items()):
            holders = [rank for held in copies.ranks.values() for rank in held]
            if len(copies.ranks) == 1:
                single += [shard_id] if len(holders) == 1 else []
            elif not copies.proven:
                never_equal.append(shard_id)
            elif (wrong := copies.odd_ones()) is None:
                undecided[shard_id] = tuple(sorted(holders))
            else:
                for rank in wrong:
                    odd.setdefault(rank, []).append(shard_id)
        return VoteResult(
            agreed=self._known.agreed,
            odd={rank: tuple(shards) for rank, shards in sorted(odd.items())},
            changed={rank: tuple(shards) for rank, shards in sorted(changed.items())},
            undecided=undecided,
            never_equal=tuple(never_equal),
            voted=bool(self._known.copies),
            single=tuple(single),
        )


class Together:
    """Two things that ranks tell each other in one barrier."""

    def __init__(self, *parts: "Gathering | None") -> None:
        """`parts`: in the same order on all ranks; None for what this rank takes no part in."""
        self._parts = parts

    def said(self) -> bytes:
        """Return what this rank knows by now of each."""
        return _encode([b"" if part is None else part.said() for part in self._parts])

    def heard(self, said: bytes) -> None:
        """Take in what another rank knows of each. Raises ConnectionError for what no rank says."""
        try:
            heard = _decode_parts(said)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"what a rank says in a barrier cannot be understood: {error}") from error
        for part, each in zip(self._parts, heard, strict=False):
            if part is not None and each:
                part.heard(each)


_encode = msgspec.msgpack.Encoder().encode
_decode_parts = msgspec.msgpack.Decoder(list[bytes]).decode
_decode = msgspec.msgpack.Decoder(_Said).decode
