"""Says where the state of the machine contradicts itself. Tests and the simulation ask after every event.

What is held here is what a reader of the handlers may rely on.
"""

from collections.abc import Iterator

from ...controller.handlers.barriers import UNSETTLED
from ...controller.recovery.incident import OpenIncident, Verdict
from ...controller.recovery.state import OVER, JobState, Phase
from ...controller.recovery.world import NodeState
from ...controller.recovery.world import RankState as S

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
