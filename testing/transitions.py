"""The transitions between phases, each with its event: exactly what happens, no more and no less.

A test plays a simulated job for each, and every test of the machine, the simulation and the exploration hold what they
see against it. The diagram in `docs/recovery.md` is drawn from it.
"""

from collections.abc import Iterable, Mapping

from ..controller.recovery.events import ControlRequested, DeadlinePassed, StopRequested
from ..controller.recovery.state import Phase
from ..protocol import messages as m

P = Phase
# Where a decision can lead: on with survivors, with a new world, to wait for nodes, or to the stop.
DECIDED = frozenset({P.QUIESCING, P.STARTING, P.WAITING, P.SAVING, P.ENDED})

# In this phase, each of these events can lead to each of those phases. What is not here leaves the phase as it is.
_BY_PHASE: Mapping[Phase, Mapping[tuple[type, ...], tuple[Phase, ...]]] = {
    P.WAITING: {
        (m.NodeJoined, m.NodeChecked, m.NodeStaying, m.FaultReported): (P.STARTING,),
        (m.NodeRefused, DeadlinePassed): (P.STARTING, P.ENDED),
        (ControlRequested,): (P.STARTING,),
        (StopRequested,): (P.ENDED,),
    },
    P.STARTING: {
        (m.NodeLost, m.ProcessExited, m.FaultReported, DeadlinePassed): (P.WAITING, P.QUIESCING, P.ENDED),
        (m.RankJoined,): (P.QUIESCING, P.REJOINING, P.ENDED),
        (StopRequested,): (P.ENDED,),
    },
    P.RUNNING: {
        (m.NodeLost, m.ProcessExited): (*DECIDED,),
        (m.FaultReported,): (*DECIDED, P.SUSPECTING),
        (m.ProgressReported,): (P.PAUSING,),
        (m.RankFinished,): (P.FINISHING,),
        (DeadlinePassed,): (P.ENDED,),
        (StopRequested,): (P.SAVING,),
    },
    P.PAUSING: {
        (m.NodeLost, m.ProcessExited): (*DECIDED,),
        (m.FaultReported,): (*DECIDED, P.SUSPECTING),
        (m.RankQuiesced, DeadlinePassed): (*DECIDED, P.REJOINING),
        (m.CheckpointSaved,): (P.QUIESCING, P.REJOINING),
        (ControlRequested,): (P.REJOINING,),
        (m.RankFinished,): (P.FINISHING,),
        (StopRequested,): (P.SAVING,),
    },
    P.SUSPECTING: {
        (m.NodeLost, m.ProcessExited, m.FaultReported): (*DECIDED,),
        (DeadlinePassed,): (*DECIDED,),
        (m.ProgressReported,): (*DECIDED, P.RUNNING, P.RESUMING, P.FINISHING),
        (StopRequested,): (P.SAVING, P.ENDED),
    },
    P.QUIESCING: {
        (m.NodeLost, m.ProcessExited, m.FaultReported, DeadlinePassed): (*(DECIDED - {P.QUIESCING}),),
        (m.NodeRefused,): (P.WAITING, P.SAVING, P.ENDED),
        (m.RankJoined, m.RankQuiesced): (*(DECIDED - {P.QUIESCING}), P.REJOINING),
        (StopRequested,): (P.SAVING, P.ENDED),
    },
    P.REJOINING: {
        (m.NodeLost, m.ProcessExited): (*DECIDED,),
        (m.FaultReported,): (*DECIDED, P.SUSPECTING),
        (m.RankReady,): (*DECIDED, P.RESUMING),
        (DeadlinePassed,): (P.SUSPECTING, P.SAVING),
        (StopRequested,): (P.SAVING, P.ENDED),
    },
    P.RESUMING: {
        (m.NodeLost, m.ProcessExited): (*DECIDED,),
        (m.FaultReported,): (*DECIDED, P.SUSPECTING),
        (m.StepCommitted,): (P.RUNNING,),
        (m.RankFinished,): (P.RUNNING, P.FINISHING),
        (DeadlinePassed,): (P.SUSPECTING,),
        (StopRequested,): (P.SAVING,),
    },
    P.FINISHING: {
        (m.NodeLost, m.ProcessExited, DeadlinePassed): (P.ENDED,),
        (m.FaultReported,): (*DECIDED,),
        (StopRequested,): (P.SAVING,),
    },
    P.SAVING: {
        (m.NodeLost, m.ProcessExited, m.RankQuiesced, m.CheckpointSaved, DeadlinePassed): (
            P.WAITING,
            P.STARTING,
            P.ENDED,
        ),
        (StopRequested,): (P.ENDED,),
    },
}

LEADS_TO: Mapping[tuple[Phase, type], frozenset[Phase]] = {
    (before, event): frozenset(after)
    for before, ways in _BY_PHASE.items()
    for events, after in ways.items()
    for event in events
}


def is_known(before: Phase, event: type, after: Phase) -> bool:
    """Return whether `event` can lead from one phase to another; it can always leave it as it is."""
    return after is before or after in LEADS_TO.get((before, event), ())


def diagram(leads_to: Mapping[tuple[Phase, type], Iterable[Phase]] = LEADS_TO) -> str:
    """Return the transitions as a mermaid state diagram, each arrow labelled with its events.

    Events that can lead to most of what a decision leads to are drawn to one node, `ladder`, and from there on to all.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in leads_to.items():
        decides = len(DECIDED.intersection(after)) > 2
        targets = [each.value for each in Phase if each in after and not (decides and each in DECIDED)]
        for target in [*targets, *(["ladder"] if decides else [])]:
            arrows.setdefault((before.value, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    state ladder <<choice>>", "    [*] --> waiting"]
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    lines += [f"    ladder --> {phase.value}" for phase in Phase if phase in DECIDED]
    lines.append("    ended --> [*]")
    return "\n".join(lines) + "\n"
