"""This rank's part in the votes on what all ranks hold, and what it does when one is lost.

In a step with a vote the shards are hashed twice: where the step begins, and before its commit barrier, when all of its
gradients are final. The first hashes are compared with those of the other holders: they travel with the barrier. The
second must be the first again where shards change in update blocks alone (`Steady`): if not, the memory of this very
rank has changed by itself, and no other copy is needed to know that. So an update is only applied where nothing wrong
has been in its gradients, as far as a vote can see (`ballot.py` says what follows from what all have said).

Where something is wrong all ranks leave the step together. A rank that is to blame says so; its shards come from the
others, or all go back to a state that passed a vote before. No process is ended for that.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..protocol.errors import Interrupted
from ..protocol.types import Activity, Assertion, FaultKind, FaultLevel, IntegrityAction
from ..protocol.wording import ranks_text
from .ballot import Ballot, VoteResult
from .framework import Comparable, Steady

if TYPE_CHECKING:
    from .framework import Framework, ShardDigest
    from .runtime import Runtime
    from .step_order import StepState

FIRST_VOTE = 2  # updates: before the second one all ranks have compared what they hold (`shard.py`)
MOST_NAMED = 3  # shards, in a text
MOST_REMEMBERED = 8  # votes without a majority, until the step is repeated
_log = logging.getLogger("midstep")


class Votes:
    """The votes of one rank. Used by the train thread; without `integrity.every_steps` it does nothing."""

    def __init__(self, runtime: "Runtime", framework: "Framework", step_state: "StepState") -> None:
        self._runtime = runtime
        self._framework = framework
        self._step_state = step_state
        self._every_steps = runtime.settings.integrity_every_steps
        self._then = runtime.settings.integrity_then
        self._on = self._every_steps > 0 and isinstance(framework, Comparable)
        self._steady = isinstance(framework, Steady) and framework.changes_in_updates_alone
        self.agreed = 0  # the newest state that passed a vote; all before it are right, too
        self._resumed = -1
        self._proven: frozenset[str] = frozenset()  # shards whose copies have been equal
        self._left_out: frozenset[str] = frozenset()  # those that never were
        self._found: Mapping[str, ShardDigest] | None = None  # where the step began; None: no vote in this step
        self._doubtful: dict[int, dict[str, int]] = {}  # what was here at a vote that could not tell who is wrong
        self._reported: set[FaultKind] = set()  # that stand, where training goes on all the same

    @property
    def is_on(self) -> bool:
        """True if ranks vote."""
        return self._on

    def resumed(self, step: int) -> None:
        """Begin to train from a state: at the start, and after each recovery, whose first step has a vote."""
        self.agreed, self._resumed, self._found = min(self.agreed, step), step, None

    def begins(self, step: int, *, wanted: bool) -> None:
        """Hash what is here, if this step has a vote. `wanted`: by a checkpoint of this state, or an audit."""
        self._found = None
        if self._on and step >= FIRST_VOTE and (wanted or self._is_due(step)):
            self._found = self._digests()

    def ballot(self) -> Ballot | None:
        """Return what this rank says in the commit barrier of this step; None where ranks do not vote.

        It says nothing where it knows of no vote, and hears of one that others hold all the same.
        """
        if not self._on:
            return None
        found = self._found or {}
        changed: tuple[str, ...] = ()
        if self._steady:
            now = self._digests()
            changed = tuple(name for name, each in found.items() if name in now and now[name].tensors != each.tensors)
        if changed and not self._proven:
            self._changes_by_right(changed)
            changed = ()
        hashes = {name: each.whole for name, each in found.items() if name not in self._left_out}
        return Ballot(self._runtime.rank, hashes, agreed=self.agreed, proven=self._proven, changed=changed)

    def counted(self, step: int, ballot: Ballot) -> None:
        """Follow from the vote that all ranks have taken part in. After the barrier, before the update.

        Raises Interrupted on all ranks if the step has to be repeated.
        """
        result = ballot.result(self._runtime.world_size)
        if not result.voted:
            return
        mine, self._found = {name: each.whole for name, each in (self._found or {}).items()}, None
        if result.never_equal:
            self._leave_out(result.never_equal)
        if ballot.changed and self._runtime.rank not in result.changed:
            self._changes_by_right(ballot.changed)
        if result.passed:
            self._passed(step, mine, unchecked=len(self._left_out.union(result.single).intersection(mine)))
        elif self._then is IntegrityAction.REPORT:
            self._report_only(step, result)
        else:
            self._lost(step, mine, result)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_due(self, step: int) -> bool:
        repeats = step == self._resumed or step in self._doubtful
        return repeats or step % self._every_steps == 0 or not self._proven

    def _digests(self) -> "Mapping[str, ShardDigest]":
        assert isinstance(self._framework, Comparable)
        with self._no_stall():
            return self._framework.digests()

    @contextmanager
    def _no_stall(self) -> Iterator[None]:
        clock = self._runtime.step_clock
        before = clock.activity
        clock.doing(Activity.PAUSED)
        yield
        clock.doing(before)

    def _passed(self, step: int, mine: dict[str, int], *, unchecked: int) -> None:
        self.agreed = step
        self._proven = self._proven.union(mine) - self._left_out
        self._runtime.black_box.set_votes(step, unchecked)
        was = self._doubtful.get(step)
        if was is not None and was != mine:
            shards = tuple(name for name in mine if was.get(name) != mine[name])
            detail = (
                f"rank {self._runtime.rank} was wrong at step {step}: the repetition, in which all copies are equal, "
                f"has another {_named(shards)}"
            )
            _log.error("%s", detail)
            found, occurred = f"wrong at step {step}", Assertion.OCCUR
            self._runtime.report_fault(
                FaultKind.ODD_COPY, detail, FaultLevel.NOT_HANDLE, fault_id=found, assertion=occurred
            )
        self._doubtful = {each: found for each, found in self._doubtful.items() if each > step}
        for kind in self._reported:
            self._note(kind, "copies are equal again", Assertion.RECOVER)
        self._reported.clear()

    def _lost(self, step: int, mine: dict[str, int], result: VoteResult) -> None:
        """Leave the step with all other ranks, and say why if that is for this rank to say."""
        rank, exact = self._runtime.rank, result.is_exact(step)
        as_it_is = exact or (self._then is IntegrityAction.REPAIR and not result.undecided)
        trusted_step = None if as_it_is else result.agreed
        if result.undecided:
            self._doubtful[step] = mine
            for oldest in sorted(self._doubtful)[:-MOST_REMEMBERED]:
                del self._doubtful[oldest]
        shards, report = result.to_blame.get(rank, ()), self._runtime.report_fault
        if shards:
            if as_it_is:
                self._step_state.mark_corrupted(shards)
            way = "" if exact or not as_it_is else _inexact(step, result.agreed)
            detail = f"{_what(rank, step, result)}{way}"
            report(FaultKind.ODD_COPY, detail, mendable=True, trusted_step=trusted_step)
        elif not result.to_blame and rank == _speaker(result):
            report(FaultKind.COPIES_DIFFER, _undecided(step, result), mendable=True, trusted_step=trusted_step)
        raise Interrupted

    def _report_only(self, step: int, result: VoteResult) -> None:
        rank = self._runtime.rank
        if rank in result.to_blame:
            self._note(FaultKind.ODD_COPY, _what(rank, step, result), Assertion.OCCUR)
        elif not result.to_blame and rank == _speaker(result):
            self._note(FaultKind.COPIES_DIFFER, _undecided(step, result), Assertion.OCCUR)

    def _note(self, kind: FaultKind, detail: str, assertion: Assertion) -> None:
        """Have something shown, for as long as it stands."""
        self._reported.add(kind) if assertion is Assertion.OCCUR else None
        fault_id = f"{kind} {self._runtime.rank}"
        self._runtime.report_fault(kind, detail, FaultLevel.NOT_HANDLE, fault_id=fault_id, assertion=assertion)

    def _leave_out(self, shards: tuple[str, ...]) -> None:
        """Vote no more on what is not the same on its holders, as the first vote on it has shown."""
        self._left_out |= frozenset(shards)
        mine = {hold.shard_id for hold in self._framework.shards()}.intersection(shards)
        if mine:
            _log.warning(
                "the holders of %s do not hold the same, and have not in any vote: it is not voted on. Something in "
                "the training is not deterministic, or is not synchronised",
                _named(tuple(sorted(mine))),
            )
        if {hold.shard_id for hold in self._framework.shards()} <= self._left_out:
            self._on = False

    def _changes_by_right(self, shards: tuple[str, ...]) -> None:
        self._steady = False
        _log.warning(
            "%s changes between the updates of this script: memory that changes by itself is found only where it "
            "differs from other copies",
            _named(shards),
        )


def _speaker(result: VoteResult) -> int:
    """Return the rank that speaks for all where no rank is to blame."""
    return min(rank for ranks in result.undecided.values() for rank in ranks)


def _what(rank: int, step: int, result: VoteResult) -> str:
    if rank in result.changed:
        return f"{_named(result.changed[rank])} of rank {rank} has changed in memory during step {step}, by itself"
    return f"rank {rank} holds another {_named(result.odd[rank])} than the majority of its holders, before step {step}"


def _undecided(step: int, result: VoteResult) -> str:
    ranks = next(iter(result.undecided.values()))
    return (
        f"{ranks_text(ranks)} hold different copies of {_named(tuple(result.undecided))} before step {step}, and none "
        "has a majority: the repetition of the steps since the last vote tells who was wrong"
    )


def _inexact(step: int, agreed: int) -> str:
    return (
        f"; the copy of the majority is taken, and is not exact: what was wrong may have been in gradients since the "
        f"last vote, of step {agreed}"
    )


def _named(shards: tuple[str, ...]) -> str:
    more = len(shards) - MOST_NAMED
    return f"shard {', '.join(shards[:MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"
