"""The one list of what must always hold: unit tests, simulation, exploration and mutants hold the product against it.

Each invariant has a name. `contradictions` says where the state of the recovery machine contradicts itself; it is asked
after every event, and what it refuses is what a reader of the handlers may rely on never to see.
"""

from collections.abc import Iterator

from ..controller.handlers.barriers import UNSETTLED
from ..controller.recovery.incident import OpenIncident, Verdict
from ..controller.recovery.state import OVER, JobState, Phase
from ..controller.recovery.world import NodeState
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
    phase = state.phase
    return [*_ranks(state, phase), *_incident(state, phase), *_waiting(state, phase), *_ahead(state, phase)]


def _ranks(state: JobState, phase: Phase) -> Iterator[str]:
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
    asked = world.ranks(S.REJOINING, S.READY, S.RESUMING, S.TRAINING, S.FINISHED, S.RELEASED)
    if phase is Phase.SAVING and asked - state.incident.culprits.keys():
        yield f"the job is saving, and ranks {sorted(asked)} were not asked to stop"


def _incident(state: JobState, phase: Phase) -> Iterator[str]:
    incident = state.incident
    if phase is Phase.RUNNING and incident != OpenIncident():
        yield f"the job is running, and something is wrong: {incident}"
    untreated = incident.held(Verdict.CULPRIT, Verdict.MENDING)
    if untreated and phase not in {Phase.WAITING, *OVER}:
        yield f"the job is {phase}, and nothing was decided about ranks {sorted(untreated)}"
    if incident.attempt.rungs and state.history.open is None and phase is not Phase.ENDED:
        yield f"{incident.attempt.rungs[-1]} is under way, and no incident is on record"


def _waiting(state: JobState, phase: Phase) -> Iterator[str]:
    if state.due.held - state.world.ranks(S.STARTING):
        yield f"ranks {sorted(state.due.held)} wait for their devices, and not all of them are to be started"
    if state.due.unplaced - state.world.ranks(S.STARTING):
        yield f"ranks {sorted(state.due.unplaced)} wait for a node, and not all of them are to be started"
    if state.due.unplaced and state.due.nodes_s is None:
        yield f"ranks {sorted(state.due.unplaced)} wait for a node, and that has no deadline"
    if state.saving.outstanding and phase not in {Phase.SAVING, Phase.PAUSING}:
        yield f"the job is {phase}, and ranks {sorted(state.saving.outstanding)} are to save"
    due = state.due
    deadlines = (due.phase_s, due.newcomers_s, due.devices_s, due.nodes_s)
    if phase in _LIMITED and all(at is None for at in deadlines) and not state.has_put_off:
        yield f"the job is {phase}, and that has no deadline"
    if state.history.ignored.get(UNSETTLED):
        yield "the rules about how ranks stand together do not settle"


def _ahead(state: JobState, phase: Phase) -> Iterator[str]:
    covered: dict[str, str] = {}
    for node in state.world.nodes.values() if phase is Phase.RUNNING else ():
        if node.ahead.nodes and node.state is not NodeState.SPARE:
            yield f"{node.name} is {node.state}, and is to build processes for {', '.join(node.ahead.nodes)}"
        for name in node.ahead.nodes:
            if state.world.nodes[name].state is not NodeState.ACTIVE:
                yield f"{node.name} is to build processes for {name}, which is {state.world.nodes[name].state}"
            if covered.setdefault(name, node.name) != node.name:
                yield f"{covered[name]} and {node.name} are both to build processes for {name}"
