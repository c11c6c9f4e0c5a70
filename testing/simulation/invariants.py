"""The invariants by name: those of `docs/architecture.md`, and what the simulation itself insists on."""

from ...protocol.enums import StrEnum


class Invariant(StrEnum):
    """What must hold after every event."""

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


class InvariantBroken(AssertionError):
    """An invariant does not hold. Carries the seed, the invariant, what happened, and the transcript."""

    def __init__(self, seed: int, invariant: Invariant, what: str, transcript: str) -> None:
        super().__init__(f"{invariant}: {what}\n{transcript}\nseed {seed}: {invariant}: {what}")
        self.seed, self.invariant, self.what, self.transcript = seed, invariant, what, transcript

    def __reduce__(self) -> tuple[type["InvariantBroken"], tuple[int, Invariant, str, str]]:
        """Let it come home from another process."""
        return InvariantBroken, (self.seed, self.invariant, self.what, self.transcript)
