"""Roles: named parts of the world that recover by a ladder of their own.

Every rank is of one party: its role, or the ranks without a role, which go by the job's ladder. A role that names no
ladder fails over with the job: a fault of one of its ranks restarts the whole world, by the job's ladder.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from ..protocol.types import Rung
from .schema import Policy, RungPolicy, entry_for

# Rungs after which every process has been restarted.
WORLD_RESTARTS = (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class Party(msgspec.Struct, frozen=True):
    """Those that recover by one ladder. `role` is empty for the ranks without a role.

    `with_job`: a role without a ladder. It has the job's, of which it can only take the rungs that restart the world.
    """

    role: str
    ladder: tuple[RungPolicy, ...]
    with_job: bool = False

    @property
    def charged(self) -> str:
        """The owner of the budgets that it spends: its role, or (empty) the job."""
        return "" if self.with_job else self.role

    @property
    def prefix(self) -> str:
        """What is put before a reason that is this party's own."""
        return f"role {self.role}: " if self.role else ""

    def entry(self, rung: Rung) -> RungPolicy | None:
        """Return the ladder's entry for `rung`, None where the party does without it."""
        return None if self.with_job and rung not in {*WORLD_RESTARTS, Rung.STOP} else entry_for(rung, self.ladder)

    def missing(self, rung: Rung) -> str:
        """Say why the party has no entry for `rung`."""
        if self.with_job and entry_for(rung, self.ladder) is not None:
            return f"role {self.role} has no ladder of its own, so it fails over with the job"
        return f"{self.prefix}{rung} is not on the ladder"


def parse_ranks(text: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges, first and last rank, of text like `0-5,8`. Raises ValueError, in words, when it is not one."""
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()[:32]!r} is no rank and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards")
        ranges.append((first, last))
    return tuple(sorted(ranges))


class Roles:
    """Which rank is of which role, and the party of each role. The policy has been checked."""

    def __init__(self, policy: Policy) -> None:
        spans = [(first, last, name) for name, role in policy.roles.items() for first, last in parse_ranks(role.ranks)]
        self._spans = sorted(spans)
        self._firsts = [first for first, _, _ in self._spans]
        self._job = Party("", policy.ladder)
        self._parties = {
            name: Party(name, policy.ladder if role.ladder is None else role.ladder, with_job=role.ladder is None)
            for name, role in policy.roles.items()
        }

    @property
    def job(self) -> Party:
        """The ranks without a role, and faults of no rank."""
        return self._job

    @property
    def named(self) -> tuple[Party, ...]:
        """The roles, as the policy lists them."""
        return tuple(self._parties.values())

    @property
    def highest_rank(self) -> int:
        """The highest rank that has a role; -1 without roles."""
        return max((last for _, last, _ in self._spans), default=-1)

    def role_of(self, rank: int) -> str:
        """Return the role of a rank; empty for a rank without one."""
        index = bisect_right(self._firsts, rank) - 1
        return self._spans[index][2] if index >= 0 and rank <= self._spans[index][1] else ""

    def divide(self, ranks: Iterable[int]) -> tuple[tuple[Party, list[int]], ...]:
        """Return the parties of `ranks`, each with its ranks: those without a role first, then as the policy lists."""
        members: dict[str, list[int]] = {}
        for rank in ranks:
            members.setdefault(self.role_of(rank), []).append(rank)
        return tuple(
            (party, members[party.role]) for party in (self._job, *self._parties.values()) if party.role in members
        )

    def parties(self, ranks: Iterable[int]) -> tuple[Party, ...]:
        """Return the parties of `ranks`. A fault of no rank is the job's."""
        return tuple(party for party, _ in self.divide(ranks)) or (self._job,)


def beyond(policy: Policy, world_size: int) -> str | None:
    """Say which role names a rank that a world of `world_size` does not have; None when all are in it."""
    for name, role in policy.roles.items():
        last = max(last for _, last in parse_ranks(role.ranks))
        if last >= world_size:
            return f"roles.{name}.ranks: there is no rank {last} in this job; allowed: 0 to {world_size - 1}"
    return None
