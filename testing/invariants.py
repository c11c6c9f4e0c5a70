"""The one list of what must always hold: unit tests, simulation, exploration and mutants hold the product against it.

Each invariant has a name. `contradictions` says which facts of the machine's state cannot be true together: those of
the whole here, those of a topic in its file. It is asked after every event; a reader of the topics may rely on it.
"""

from collections.abc import Iterator

from ..controller.recovery.machine import TOPICS, UNSETTLED
from ..controller.recovery.state import JobState, Phase
from ..controller.recovery.world import RankState as S
from ..protocol.compat import StrEnum
from ..protocol.types import Rung

KEEPING = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})  # the processes without a fault
# In which states ranks can be in a phase. A suspicion, and the saving before a stop, can come at any time.
_FITTING: dict[Phase, frozenset[S]] = {
    Phase.WAITING: frozenset({S.ABSENT}),
    Phase.STARTING: frozenset({S.STARTING, S.JOINED, S.EXITED}),
    Phase.RUNNING: frozenset({S.TRAINING, S.FINISHED}),
    Phase.PAUSING: frozenset({S.QUIESCING, S.QUIESCED, S.FINISHED}),
    Phase.QUIESCING: frozenset({S.STARTING, S.JOINED, S.QUIESCING, S.QUIESCED}),
    Phase.REJOINING: frozenset({S.REJOINING, S.READY}),
    Phase.RESUMING: frozenset({S.RESUMING, S.TRAINING, S.FINISHED}),
    Phase.FINISHING: frozenset({S.RELEASED, S.EXITED}),
}
# In these the job waits for an answer. A world may start, and train, for as long as its script takes.
_LIMITED = frozenset(Phase) - {Phase.STARTING, Phase.RUNNING, Phase.ENDED}


class Invariant(StrEnum):
    """A rule that must hold after every event."""

    ONE_GENERATION = "one generation"  # no two ranks compute in different generations at once
    SAME_STEP = "same step"  # all ranks resume at one step, not before the last that all had committed
    NOTHING_LOST = "nothing lost"  # with a clean copy of everything alive, no committed step is lost
    SAME_NUMBERS = "same numbers"  # what a rank holds is whole and of the step at which it stands
    ALWAYS_ENDS = "always ends"  # every wait has a deadline; every incident ends
    BUDGETS_HOLD = "budgets hold"  # no rung is taken more often than allowed, whichever controller takes it
    ONE_BRAIN = "one brain"  # a command of an earlier controller changes nothing
    NOBODY_KILLED_FOR_NOTHING = "nobody is killed for nothing"
    REASONS_GIVEN = "every decision has a reason"
    # Beyond the nine:
    JOURNAL_IS_TRUTH = "the journal is the truth"  # a replay acts and remembers alike
    TIMES_ARE_TRUE = "times are true"  # durations are those of one clock, whatever the clocks of nodes say
    AT_MOST_ONCE = "at most once"  # no message is taken in twice
    OWN_VOICE = "own voice"  # a rank is believed only over the node that its process was started on
    BY_THE_TABLE = "by the table"  # no transition that the table does not have
    CONSISTENT = "consistent"  # what the machine remembers does not contradict itself
    SIZE_FITS = "the size fits"  # a world has the ranks that its nodes can hold, within what was asked and is allowed
    SOUND_NODES = "ranks run on sound nodes"  # not where a fault stands that asks for the node to be left
    UNDERSTOOD = "understood"  # no process gets an order that it cannot carry out
    NOTHING_LEFT = "nothing is left behind"  # no process outlives its job
    NO_WRONG_STATE_PASSES = "no wrong state passes"  # what has passed a vote, and what all go back to after a lost one
    RIGHT_RANK_BLAMED = "the right rank is blamed"  # for what has silently gone wrong


class InvariantBroken(AssertionError):
    """An invariant does not hold. Carries the seed, the invariant, what happened, and the transcript."""

    def __init__(self, seed: int, invariant: Invariant, what: str, transcript: str) -> None:
        super().__init__(f"{invariant}: {what}\n{transcript}\nseed {seed}: {invariant}: {what}")
        self.seed, self.invariant, self.what, self.transcript = seed, invariant, what, transcript

    def __reduce__(self) -> tuple[type["InvariantBroken"], tuple[int, Invariant, str, str]]:
        """Let it come home from another process."""
        return InvariantBroken, (self.seed, self.invariant, self.what, self.transcript)


def contradictions(state: JobState) -> list[str]:
    """Return what cannot be true together, in words; empty when the state is as it should be."""
    return [*_of_the_whole(state, state.phase), *(what for topic in TOPICS for what in topic.contradictions(state))]


def _of_the_whole(state: JobState, phase: Phase) -> Iterator[str]:
    world = state.world
    standing: dict[S, set[int]] = {}
    for holder in world.holders:
        standing.setdefault(holder.state, set()).add(holder.rank)
    for each in S:
        here = standing.get(each, set())
        if world.count(each) != len(here) or (here and world.ranks(each) != here):
            yield f"the ranks that are {each} are counted as {sorted(world.ranks(each))}"
    fitting = _FITTING.get(phase)
    misfits = [f"{holder.rank} {holder.state}" for holder in world.holders if fitting and holder.state not in fitting]
    if misfits:
        yield f"the job is {phase}, and of its ranks {', '.join(misfits)}"
    if phase in _LIMITED and state.due.phase_s is None and not state.due.incident and not state.has_put_off:
        yield f"the job is {phase}, and that has no deadline"
    if state.history.ignored.get(UNSETTLED):
        yield "the rules about how ranks stand together do not settle"
