"""Which event is taken in which phase, and by whom.

The machine dispatches by it. An event without a row in the present phase changes nothing and is counted. Where an event
leads is in `transitions.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...protocol import messages as m
from ..changes import drain, node_checks, shutdown, step_clocks
from ..recovery.events import (
    ControllerStarted,
    DeadlinePassed,
    HoldEnded,
    InjectRequested,
    KillNodeRequested,
    NodeReturned,
    StopRequested,
)
from ..recovery.state import JobState, Phase
from . import answers, deadlines, nodes, platform, reports, requests
from .transitions import LEADS_TO

Handler = Callable[[JobState, Any, float], None]


class Row(msgspec.Struct, frozen=True):
    """In each of `phases`, an event of type `event` is handled by `handler`."""

    phases: tuple[Phase, ...]
    event: type
    handler: Handler


class Entry(msgspec.Struct, frozen=True):
    """What handles an event in a phase, and to which other phases it can lead."""

    handler: Handler
    to: frozenset[Phase]


P = Phase
ALIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)
AT_WORK = tuple(phase for phase in ALIVE if phase is not Phase.WAITING)

ROWS: tuple[Row, ...] = (
    Row(ALIVE, m.NodeJoined, nodes.on_node_joined),
    Row(ALIVE, NodeReturned, nodes.on_node_returned),
    Row(ALIVE, HoldEnded, nodes.on_hold_ended),
    Row(ALIVE, m.NodeLost, nodes.on_node_lost),
    Row(ALIVE, m.NodeRefused, nodes.on_node_refused),
    Row(ALIVE, m.PlatformJoined, platform.on_platform_joined),
    Row(ALIVE, m.NodeGoing, platform.on_node_going),
    Row(ALIVE, m.NodeStaying, platform.on_node_staying),
    Row(ALIVE, m.NodeChecked, node_checks.on_node_checked),
    Row(ALIVE, m.StoreMoved, nodes.on_store_moved),
    Row(ALIVE, m.ProcessesPrepared, nodes.on_processes_prepared),
    Row(ALIVE, m.ProcessStarted, reports.on_process_started),
    Row((P.RUNNING, P.SUSPECTING), m.NewcomerWaiting, drain.on_newcomer_waiting),
    Row(ALIVE, m.ProcessExited, reports.on_process_exited),
    Row(ALIVE, m.FaultReported, reports.on_fault_reported),
    Row((P.SUSPECTING, P.RUNNING, P.PAUSING), m.ProgressReported, step_clocks.on_progress_reported),
    Row((P.STARTING, P.QUIESCING), m.RankJoined, answers.on_rank_joined),
    Row((P.QUIESCING, P.PAUSING, P.SAVING), m.RankQuiesced, answers.on_rank_quiesced),
    Row((P.REJOINING,), m.RankReady, answers.on_rank_ready),
    Row((P.RESUMING, P.RUNNING, P.SUSPECTING), m.StepCommitted, answers.on_step_committed),
    Row((P.RESUMING, P.RUNNING, P.PAUSING, P.SUSPECTING), m.RankFinished, answers.on_rank_finished),
    Row((P.PAUSING,), m.CheckpointSaved, drain.on_part_saved),
    Row((P.SAVING,), m.CheckpointSaved, shutdown.on_checkpoint_saved),
    Row(ALIVE, DeadlinePassed, deadlines.on_deadline),
    Row(tuple(Phase), ControllerStarted, requests.on_controller_started),
    Row(AT_WORK, InjectRequested, requests.on_inject_requested),
    Row(ALIVE, KillNodeRequested, requests.on_kill_node_requested),
    Row(ALIVE, StopRequested, requests.on_stop_requested),
)

TABLE: Mapping[tuple[Phase, type], Entry] = {
    (phase, row.event): Entry(row.handler, LEADS_TO.get((phase, row.event), frozenset()))
    for row in ROWS
    for phase in row.phases
}
