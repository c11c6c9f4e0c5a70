"""The state that is kept beside what ranks train on: copies in host memory, and what the last vote has passed. Pure.

These are figures, which a terminal and a page each put into a line of their own, with the same words.
"""

from collections.abc import Collection, Sequence

import msgspec

from ...protocol.incidents import JobStatus, RankStatus
from ...protocol.wording import ranks_text
from .wording import cell, count_text

MOST_NAMED = 3  # shards


class KeptCopies(msgspec.Struct, frozen=True):
    """The copies in host memory. `step`: the newest of which all ranks have one; 0: of none. `age_steps`: its age."""

    step: int
    age_steps: int
    memory_bytes: int

    def in_words(self) -> str:
        """Say of which step they are."""
        if not self.step:
            return "no step of which all ranks have one"
        return f"of step {self.step}, {count_text(self.age_steps, 'step')} ago"


class Vote(msgspec.Struct, frozen=True):
    """The last vote that all ranks have passed. `step`: 0: not all have. `unchecked`: ranks with state of no vote.

    `single`: shards of these ranks of which there is no other copy, the first ones, and `more` there are. `unequal`:
    the ranks have shards, too, whose copies have not been equal in any vote.
    """

    step: int
    age_steps: int
    unchecked: tuple[int, ...]
    single: tuple[str, ...] = ()
    more: int = 0
    unequal: bool = False

    def in_words(self) -> str:
        """Say what is equal, and what no vote checks."""
        passed = "not yet on all ranks"
        if self.step:
            passed = f"the copies of step {self.step} are equal, {count_text(self.age_steps, 'step')} ago"
        return f"{passed}; not checked: {self._not_checked()}" if self.unchecked else passed

    def _not_checked(self) -> str:
        """Say which shards no vote compares, by the names that their ranks have for them."""
        ranks = ranks_text(self.unchecked)
        unequal = f"shards of {ranks} whose copies have not been equal in any vote"
        if not self.single:
            return unequal
        named = ", ".join(cell(shard) for shard in self.single)
        more = f" and {self.more} more" if self.more else ""
        shards = "shard" if len(self.single) + self.more == 1 else "shards"
        told = f"{shards} {named}{more} of {ranks}, of which there is no other copy"
        return f"{told}, and {unequal}" if self.unequal else told


def host_copies(status: JobStatus) -> KeptCopies | None:
    """Return how old the copies in host memory are; None where there is none."""
    memory_bytes = sum(rank.copied_bytes for rank in status.ranks)
    if not memory_bytes:
        return None
    step = copy_left(status.ranks)
    return KeptCopies(step, max(0, status.committed - step), memory_bytes)


def last_vote(status: JobStatus) -> Vote | None:
    """Return the last vote of the ranks; None where none is held."""
    agreed = [rank.agreed_step for rank in status.ranks]
    if not any(agreed):
        return None
    step = min(agreed)
    alone = len(status.single_copies) + status.single_copies_left_out
    return Vote(
        step,
        max(0, status.committed - step),
        tuple(rank.rank for rank in status.ranks if rank.unchecked),
        status.single_copies[:MOST_NAMED],
        alone - len(status.single_copies[:MOST_NAMED]),
        unequal=alone < sum(rank.unchecked for rank in status.ranks),
    )


def copy_left(ranks: Sequence[RankStatus], lost: Collection[str] = ()) -> int:
    """Return the newest step of which host memory has a copy of every rank once these nodes are lost; 0: of none."""
    left: dict[int, set[int]] = {rank.rank: set() for rank in ranks}
    for rank in ranks:
        if rank.node not in lost:
            left[rank.rank].update(rank.copied_steps)
            for kept in rank.guest_copies:
                left.setdefault(kept.rank, set()).add(kept.step)
    return max(set.intersection(*left.values()), default=0) if left else 0
