"""This rank's part in the votes on what all ranks hold, and what it does when one is lost.

In a step with a vote the shards are hashed twice: where the step begins, and before its commit barrier, when all of its
gradients are final. The first hashes are compared with those of the other holders: they travel with the barrier. The
second must be the first again where shards change in update blocks alone (`Steady`): if not, the memory of this very
rank has changed by itself, and no other copy is needed to know that. So an update is only applied where nothing wrong
has been in its gradients, as far as a vote can see (`ballot.py` says what follows from what all have said).

With `every_steps: auto` each rank says with a vote after how many steps it wants the next one, as hashing has cost it,
and all take the greatest number. A new process votes in its first step, as all do then, and so knows it, too.

Where something is wrong all ranks leave the step together. A rank that is to blame says so; its shards come from the
others, or all go back to a state that passed a vote before. No process is ended for that.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.errors import Interrupted
from ..protocol.faults import EACH_TIME
from ..protocol.types import Activity, Assertion, FaultKind, FaultLevel, IntegrityAction
from ..protocol.wording import ranks_text
from .ballot import VOTES_OF_A_STEP, Ballot, VoteResult
from .framework import Comparable, Steady
from .step_order import STORED

if TYPE_CHECKING:
    from ..protocol.types import RepairPart
    from .framework import Framework, ShardDigest
    from .runtime import Runtime
    from .step_order import StepState

FIRST_VOTE = 2  # updates: before the second one all ranks have compared what they hold (`shard.py`)
MOST_NAMED = 3  # shards, in a text
MOST_REMEMBERED = 8  # votes without a majority, until the step is repeated
_MEASURED = 4  # votes
_log = logging.getLogger("midstep")


class VoteCadence:
    """Decides which steps have a vote: each Nth, or as many as 0.4 % of the time allows.

    What it holds is the same on all ranks once they have passed the barrier of a vote together.
    """

    def __init__(self, every_steps: int | None) -> None:
        """`every_steps`: None: as the cost allows."""
        self._every_steps = every_steps
        self._last, self._apart = 0, 1
        self._costs_s: deque[float] = deque(maxlen=_MEASURED)

    def is_due(self, step: int) -> bool:
        """Return whether a step has a vote."""
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return step - self._last >= self._apart

    def resumed(self, step: int) -> None:
        """Begin to train from a state, with all ranks."""
        self._last = min(self._last, step)

    def took(self, cost_s: float) -> None:
        """Note how long this rank has hashed for one vote."""
        self._costs_s.append(cost_s)

    def wanted(self, step_s: float) -> int:
        """Return after how many steps this rank wants the next vote. `step_s`: its median step; 0: not known yet.

        Ranks of one machine share its memory, so not the quickest of the last votes tells what the next one will cost.
        """
        if not self._costs_s or step_s <= 0:
            return 1
        return max(1, math.ceil(statistics.median_high(self._costs_s) / (VOTES_OF_A_STEP * step_s)))

    def voted(self, step: int, apart: int) -> None:
        """Take in that all have voted, and the most steps to the next vote that any of them wants."""
        self._last, self._apart = step, apart


class _Said(NamedTuple):
    """The hashes of all shards of this rank in a vote.

    `voices`: of those shards on which it had a voice in that vote. A later repair changes for which it has one.
    """

    step: int
    hashes: dict[str, int]
    voices: dict[str, int]


_NOTHING = _Said(-1, {}, {})


class Votes:
    """The votes of one rank. Used by the train thread; without `integrity.every_steps` it does nothing."""

    def __init__(
        self,
        runtime: "Runtime",
        framework: "Framework",
        step_state: "StepState",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: in seconds; it tells what hashing costs."""
        self._clock, self._hashing_s = clock, 0.0  # of this step
        self._runtime = runtime
        self._framework = framework
        self._step_state = step_state
        self._cadence = VoteCadence(runtime.settings.integrity_every_steps)
        self._then = runtime.settings.integrity_then
        self._on = runtime.settings.integrity_every_steps != 0 and isinstance(framework, Comparable)
        self._steady = isinstance(framework, Steady) and framework.changes_in_updates_alone
        self.agreed = 0  # the newest state that passed a vote; all before it are right, too
        self.sound: int | None = None  # where a vote was lost, or memory changed: what was copied later may be wrong
        self._resumed = self._begun = -1
        self._open = _NOTHING  # what this rank has said in a vote, until it has heard the others
        self._unheard = _NOTHING  # the same, where it was stopped before that
        self._received: frozenset[str] = frozenset()  # shards that came from other ranks, and have passed no vote here
        self._proven: frozenset[str] = frozenset()  # shards whose copies have been equal
        self._left_out: frozenset[str] = frozenset()  # those that never were
        self._found: Mapping[str, ShardDigest] | None = None  # where the step began; None: no vote in this step
        # What was here at a vote that blamed no rank, and all that was anywhere.
        self._doubtful: dict[int, dict[str, tuple[int, tuple[int, ...]]]] = {}
        self._reported: set[FaultKind] = set()  # that stand, where training goes on all the same

    @property
    def is_on(self) -> bool:
        """True if ranks vote."""
        return self._on

    def resumed(self, step: int) -> None:
        """Begin to train from a state: at the start, and after each recovery, whose first step has a vote."""
        self.agreed, self._resumed, self._found = min(self.agreed, step), step, None
        if self._open.voices:
            self._unheard = self._open
        self._open, self.sound = _NOTHING, None
        self._cadence.resumed(step)

    @contextmanager
    def repairing(self, part: "RepairPart") -> Iterator[None]:
        """Surround the repair of this rank: what arrives in it is another rank's copy, also in one that fails."""
        arriving = (each.shard_id for each in part.transfers if each.destination == self._runtime.rank)
        self._found, self._received = None, self._received.union(arriving)
        yield
        if part.restore in STORED:
            self._received = frozenset()

    def changed_since_begun(self, *, readable: bool = True) -> tuple[str, ...]:
        """Return the shards whose memory has changed since the step began that was left; it had a vote.

        Runs in clean, before this rank may serve others as a source: what the vote would have found must not spread.
        `readable`: not where the device says that memory is lost; what is there now is not compared then, nor later.
        """
        found, self._found, state = self._found, None, self._step_state
        same = state.clean and not state.updating and state.count == self._begun
        if found is None or not (readable and same and self._steady and self._proven):
            return ()
        changed = self._changed(found)
        if changed:
            rank, step = self._runtime.rank, self._step_state.count
            self.sound = step - 1
            detail = f"{_named(changed)} of rank {rank} has changed in memory during step {step}, by itself"
            self._report_past(detail, f"changed at step {step}")
        return changed

    def begins(self, step: int, *, wanted: bool) -> None:
        """Hash what is here, if this step has a vote. `wanted`: by a checkpoint of this state, or an audit."""
        self._found, self._begun, self._hashing_s = None, step, 0.0
        if self._on and step and (wanted or self._is_due(step)):
            self._found = self._digests()

    def ballot(self, step_s: float) -> Ballot | None:
        """Return what this rank says in the commit barrier of this step; None where ranks do not vote.

        It says nothing of its shards where it knows of no vote, and hears of one that others hold all the same.
        `step_s`: the median step.
        """
        if not self._on and not self._left_out:
            return None
        found = self._found or {}
        changed = self._changed(found) if self._steady and found else ()
        if found:
            self._cadence.took(self._hashing_s)
        mine = {name: each.whole for name, each in found.items()}
        hashes = {name: each for name, each in mine.items() if name not in self._left_out}
        voices = {name: each for name, each in hashes.items() if name not in self._received}
        self._open = _Said(self._begun, mine, voices)
        return Ballot(
            self._runtime.rank,
            hashes,
            agreed=self.agreed,
            proven=self._proven,
            changed=changed,
            steady=self._steady,
            received=self._received,
            left_out=self._left_out,
            apart=self._cadence.wanted(step_s),
            before={name: anywhere for name, (_, anywhere) in self._doubtful.get(self._begun, {}).items()},
        )

    def counted(self, step: int, ballot: Ballot) -> None:
        """Follow from the vote that all ranks have taken part in. After the barrier, before the update.

        Raises Interrupted on all ranks if the step has to be repeated.
        """
        result = ballot.result(self._runtime.world_size)
        if not result.voted:
            return
        mine, self._open, self._found = self._open.hashes, _NOTHING, None
        self._hear_late(step, result)
        self._cadence.voted(step, result.apart)
        if result.first and step < FIRST_VOTE:  # where others have voted before a new process comes back to it, it does
            return
        if result.never_equal:
            self._leave_out(result.never_equal)
        if self._steady and not result.steady:
            self._changes_by_right(ballot.changed)
        if result.passed:
            self._passed(step, mine, unchecked=len(self._left_out.union(result.single).intersection(mine)))
        elif self._then is IntegrityAction.REPORT:
            self._report_only(step, result)
        else:
            self._lost(step, mine, result)

    def passed_elsewhere(self, step: int) -> None:
        """Take the vote of a step for passed: this rank applies its update because others have, behind that vote.

        Runs where the commit barrier broke before this rank had heard what all say.
        """
        mine, self._open = self._open.hashes, _NOTHING
        if step < FIRST_VOTE and not self._proven:
            return
        if mine and self._then is not IntegrityAction.REPORT:  # which goes on from one that is lost, too
            self._passed(step, mine, unchecked=len(self._left_out.intersection(mine)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_due(self, step: int) -> bool:
        repeats = step in {self._resumed, self._unheard.step, *self._doubtful}
        return repeats or self._cadence.is_due(step) or not self._proven

    def _changed(self, found: "Mapping[str, ShardDigest]") -> tuple[str, ...]:
        now = self._digests()
        return tuple(name for name, each in found.items() if name in now and now[name].tensors != each.tensors)

    def _digests(self) -> "Mapping[str, ShardDigest]":
        assert isinstance(self._framework, Comparable)
        with self._no_stall():
            began_s = self._clock()
            digests = self._framework.digests()
            self._hashing_s += self._clock() - began_s
            return digests

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
        # Where no rank had what is right, something wrong had been in the gradients of all: none is to blame for that.
        shards = tuple(
            name for name, (held, found) in (was or {}).items() if mine.get(name, held) != held and mine[name] in found
        )
        if shards:
            detail = (
                f"rank {self._runtime.rank} was wrong at step {step}: the repetition, in which all copies are equal, "
                f"has another {_named(shards)}"
            )
            self._report_past(detail, f"wrong at step {step}")
        self._received = frozenset()
        self._doubtful = {each: found for each, found in self._doubtful.items() if each > step}
        for kind in self._reported:
            self._note(kind, "copies are equal again", Assertion.RECOVER)
        self._reported.clear()

    def _lost(self, step: int, mine: dict[str, int], result: VoteResult) -> None:
        """Leave the step with all other ranks, and say why if that is for this rank to say."""
        # Where memory is not looked at before each update, the odd one may have computed with what is wrong.
        rank, exact = (
            self._runtime.rank,
            result.is_exact(step) and (self._steady or set(result.odd) <= {*result.arrived}),
        )
        as_it_is = exact or (self._then is IntegrityAction.REPAIR and not result.undecided)
        trusted_step = None if as_it_is else result.agreed
        self.sound = min(result.agreed, step - 1)
        again, code = self._differs_again(step, mine, result)
        if result.undecided:
            self._doubtful[step] = {
                name: (mine[name], found)
                for name, found in result.hashes.items()
                if name in mine and name not in self._received
            }
            for oldest in sorted(self._doubtful)[:-MOST_REMEMBERED]:
                del self._doubtful[oldest]
        report = self._runtime.report_fault
        if as_it_is:
            self._step_state.mark_corrupted(result.wrong.get(rank, ()))
        if rank in result.to_blame:
            way = "" if exact or not as_it_is else _inexact(step, result.agreed)
            detail = f"{_what(rank, step, result)}{way}"
            report(FaultKind.ODD_COPY, detail, mendable=True, trusted_step=trusted_step)
        elif again:
            detail = (
                f"{_named(again)} of rank {rank} differs once more before step {step}, and another rank repeats itself"
            )
            report(FaultKind.ODD_COPY, detail, mendable=True, trusted_step=trusted_step, code=code)
        elif not result.to_blame and rank == result.speaker:
            report(FaultKind.COPIES_DIFFER, _differing(step, result), mendable=True, trusted_step=trusted_step)
        raise Interrupted

    def _hear_late(self, step: int, result: VoteResult) -> None:
        """Remember a vote on this state as the others do, if this rank was stopped in its barrier."""
        unheard = self._unheard
        if step < unheard.step:
            return
        self._unheard = _NOTHING
        missed = {name: (own, result.before[name]) for name, own in unheard.voices.items() if name in result.before}
        if missed and step == unheard.step:
            self._doubtful.setdefault(step, missed)

    def _differs_again(self, step: int, mine: dict[str, int], result: VoteResult) -> tuple[tuple[str, ...], str | None]:
        """Return the shards that are wrong here though no copy has a majority, and the code of one that is so twice.

        Of a step that was repeated for that. A device that is right gives again what it gave; if one copy alone has
        been there before, the others are wrong.
        """
        odd, twice = list[str](), False
        for name, (held, found) in self._doubtful.get(step, {}).items():
            repeated = set(found).intersection(result.hashes.get(name, ()))
            if len(repeated) == 1 and mine.get(name, held) not in repeated:
                odd.append(name)
                twice = twice or held not in repeated
        return tuple(odd), EACH_TIME if twice else None

    def _report_only(self, step: int, result: VoteResult) -> None:
        rank = self._runtime.rank
        if rank in result.to_blame:
            self._note(FaultKind.ODD_COPY, _what(rank, step, result), Assertion.OCCUR)
        elif not result.to_blame and rank == result.speaker:
            self._note(FaultKind.COPIES_DIFFER, _differing(step, result), Assertion.OCCUR)

    def _report_past(self, detail: str, fault_id: str) -> None:
        """Report that this rank was wrong, where nothing more has to be done about it."""
        _log.error("%s", detail)
        self._runtime.report_fault(
            FaultKind.ODD_COPY, detail, FaultLevel.NOT_HANDLE, fault_id=fault_id, assertion=Assertion.OCCUR
        )

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
        """Look at memory no more before an update, on any rank: a new process could not tell what its script does."""
        self._steady = False
        if shards:
            _log.warning(
                "%s changes between the updates of this script: memory that changes by itself is found only where it "
                "differs from other copies",
                _named(shards),
            )


def _what(rank: int, step: int, result: VoteResult) -> str:
    if rank in result.changed:
        return f"{_named(result.changed[rank])} of rank {rank} has changed in memory during step {step}, by itself"
    return f"rank {rank} holds another {_named(result.odd[rank])} than the majority of its holders, before step {step}"


def _differing(step: int, result: VoteResult) -> str:
    """Say what is wrong where no rank is to blame."""
    if not result.undecided:
        shards = tuple(sorted({shard for shards in result.wrong.values() for shard in shards}))
        return (
            f"{ranks_text(result.wrong)} have been sent another {_named(shards)} than others hold, before step {step}"
        )
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
