"""The transition table: which event is taken in which phase, by whom, and where it can lead.

The machine dispatches by it, a test holds every transition against it, and the diagram in `docs/architecture.md` is
drawn from it. An event without a row in the present phase changes nothing and is counted.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ...protocol import messages as m
from ..events import (
    ControllerStarted,
    DeadlinePassed,
    HoldEnded,
    InjectRequested,
    KillNodeRequested,
    NodeReturned,
    StopRequested,
)
from . import answers, boundary, deadlines, draining, nodes, reports, requests, shutdown, suspicion
from .state import JobState, Phase

Handler = Callable[[JobState, Any, float], None]


class Row(msgspec.Struct, frozen=True):
    """In each of `phases`, an event of type `event` is handled by `handler` and can lead to the phases `to`."""

    phases: tuple[Phase, ...]
    event: type
    handler: Handler
    to: tuple[Phase, ...] = ()


P = Phase
ALIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)
NOT_PAUSING = tuple(phase for phase in ALIVE if phase is not Phase.PAUSING)
AT_WORK = tuple(phase for phase in ALIVE if phase is not Phase.WAITING)
# Where a decision can lead: on with survivors, with a new world, to wait for nodes, or to the stop. Never straight to
# rejoining: whatever is decided, somebody has to answer first.
DECIDED = (P.QUIESCING, P.STARTING, P.WAITING, P.SAVING, P.ENDED)
# Barrier one closes here, or state is lost: then the rungs that keep processes are over for this incident.
BARRIER_ONE = (P.QUIESCING, P.REJOINING, P.STARTING, P.WAITING, P.SAVING, P.ENDED)
# A suspicion leads to a decision, or comes to nothing, and what was waited for may have come meanwhile.
NOT_SUSPECTED = (*DECIDED, P.RUNNING, P.RESUMING, P.FINISHING)

ROWS: tuple[Row, ...] = (
    Row(ALIVE, m.NodeJoined, nodes.on_node_joined, (P.STARTING,)),
    Row(ALIVE, NodeReturned, nodes.on_node_returned),
    Row(ALIVE, HoldEnded, nodes.on_hold_ended),
    Row(ALIVE, m.NodeLost, nodes.on_node_lost, DECIDED),
    Row((P.WAITING,), m.NodeRefused, nodes.on_node_refused, (P.STARTING, P.ENDED)),  # or it waits on, for other nodes
    Row(AT_WORK, m.NodeRefused, nodes.on_node_refused),
    Row(ALIVE, m.StoreMoved, nodes.on_store_moved),
    Row(ALIVE, m.ProcessStarted, reports.on_process_started),
    Row((P.RUNNING, P.SUSPECTING), m.NewcomerWaiting, draining.on_newcomer_waiting),
    Row(ALIVE, m.ProcessExited, reports.on_process_exited, DECIDED),
    Row(ALIVE, m.FaultReported, reports.on_fault_reported, (*DECIDED, P.SUSPECTING)),
    Row((P.SUSPECTING,), m.ProgressReported, suspicion.on_progress_reported, NOT_SUSPECTED),
    Row((P.RUNNING, P.PAUSING), m.ProgressReported, boundary.on_progress_reported, (P.PAUSING,)),
    Row((P.STARTING, P.QUIESCING), m.RankJoined, answers.on_rank_joined, BARRIER_ONE),
    Row((P.QUIESCING, P.SAVING), m.RankQuiesced, answers.on_rank_quiesced, BARRIER_ONE),
    Row((P.PAUSING,), m.RankQuiesced, answers.on_rank_quiesced, BARRIER_ONE),
    Row((P.REJOINING,), m.RankReady, answers.on_rank_ready, (*DECIDED, P.RESUMING)),
    Row((P.RESUMING, P.RUNNING, P.SUSPECTING), m.StepCommitted, answers.on_step_committed, (P.RUNNING,)),
    Row(
        (P.RESUMING, P.RUNNING, P.PAUSING, P.SUSPECTING),
        m.RankFinished,
        answers.on_rank_finished,
        (P.RUNNING, P.FINISHING),
    ),
    Row((P.PAUSING,), m.CheckpointSaved, draining.on_part_saved, BARRIER_ONE),
    Row((P.SAVING,), m.CheckpointSaved, shutdown.on_checkpoint_saved, (P.STARTING, P.WAITING, P.ENDED)),
    Row((P.PAUSING,), DeadlinePassed, deadlines.on_deadline, (*DECIDED, P.REJOINING)),
    Row(NOT_PAUSING, DeadlinePassed, deadlines.on_deadline, (*DECIDED, P.SUSPECTING)),
    Row(tuple(Phase), ControllerStarted, requests.on_controller_started),
    Row(AT_WORK, InjectRequested, requests.on_inject_requested),
    Row(ALIVE, KillNodeRequested, requests.on_kill_node_requested),
    Row(ALIVE, StopRequested, requests.on_stop_requested, (P.SAVING, P.ENDED)),
)

TABLE: Mapping[tuple[Phase, type], Row] = {(phase, row.event): row for row in ROWS for phase in row.phases}


def diagram(rows: Iterable[Row] = ROWS) -> str:
    """Return the table as a mermaid state diagram, each arrow labelled with its events.

    Events after which the ladder decides lead to one node, `ladder`, and from there to all that it can choose.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        decides = set(DECIDED) & set(BARRIER_ONE) <= set(row.to)
        targets = [target.value for target in row.to if not (decides and target in DECIDED)]
        for phase in row.phases:
            for target in [*targets, *(["ladder"] if decides else [])]:
                if target != phase.value:
                    arrows.setdefault((phase.value, target), []).append(row.event.__name__)
    lines = ["stateDiagram-v2", "    state ladder <<choice>>", "    [*] --> waiting"]
    for (source, target), events in arrows.items():
        lines.append(f"    {source} --> {target}: {', '.join(dict.fromkeys(events))}")
    lines += [f"    ladder --> {phase.value}" for phase in DECIDED]
    lines.append("    ended --> [*]")
    return "\n".join(lines) + "\n"
