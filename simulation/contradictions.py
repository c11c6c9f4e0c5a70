"""Says where the state of the machine contradicts itself. Tests and the simulation ask after every event.

What is held here is what a reader of the handlers may rely on.
"""

from collections.abc import Iterator

from ..controller.handlers.barriers import UNSETTLED
from ..controller.state.incident import OpenIncident, Verdict
from ..controller.state.job_state import OVER, JobState, Phase
from ..controller.state.rank_states import RankState as S

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


def contradictions(state: JobState) -> list[str]:
    """Return what cannot be true together, in words; empty when the state is as it should be."""
    return [*_ranks(state), *_incident(state), *_waiting(state)]


def _ranks(state: JobState) -> Iterator[str]:
    world = state.world
    for each in S:
        if world.ranks(each) != {holder.rank for holder in world.holders if holder.state is each}:
            yield f"the ranks that are {each} are counted as {sorted(world.ranks(each))}"
    fitting = _FITTING.get(state.phase)
    misfits = [f"{holder.rank} {holder.state}" for holder in world.holders if fitting and holder.state not in fitting]
    if misfits:
        yield f"the job is {state.phase}, and of its ranks {', '.join(misfits)}"
    asked = world.ranks(S.REJOINING, S.READY, S.RESUMING, S.TRAINING, S.FINISHED, S.RELEASED)
    if state.phase is Phase.SAVING and asked - state.incident.culprits.keys():
        yield f"the job is saving, and ranks {sorted(asked)} were not asked to stop"


def _incident(state: JobState) -> Iterator[str]:
    incident = state.incident
    if state.phase is Phase.RUNNING and incident != OpenIncident():
        yield f"the job is running, and something is wrong: {incident}"
    untreated = incident.held(Verdict.CULPRIT, Verdict.MENDING)
    if untreated and state.phase not in {Phase.WAITING, *OVER}:
        yield f"the job is {state.phase}, and nothing was decided about ranks {sorted(untreated)}"
    if incident.attempt.rungs and state.history.open is None and state.phase is not Phase.ENDED:
        yield f"{incident.attempt.rungs[-1]} is under way, and no incident is on record"


def _waiting(state: JobState) -> Iterator[str]:
    if state.due.held - state.world.ranks(S.STARTING):
        yield f"ranks {sorted(state.due.held)} wait for their devices, and not all of them are to be started"
    if state.due.unplaced - state.world.ranks(S.STARTING):
        yield f"ranks {sorted(state.due.unplaced)} wait for a node, and not all of them are to be started"
    if state.due.unplaced and state.due.nodes_s is None:
        yield f"ranks {sorted(state.due.unplaced)} wait for a node, and that has no deadline"
    if state.saving.outstanding and state.phase not in {Phase.SAVING, Phase.PAUSING}:
        yield f"the job is {state.phase}, and ranks {sorted(state.saving.outstanding)} are to save"
    due = state.due
    deadlines = (due.phase_s, due.newcomers_s, due.devices_s, due.nodes_s)
    if state.phase in _LIMITED and all(at is None for at in deadlines) and not state.has_put_off:
        yield f"the job is {state.phase}, and that has no deadline"
    if state.history.ignored.get(UNSETTLED):
        yield "the rules about how ranks stand together do not settle"
