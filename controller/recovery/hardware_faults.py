"""What becomes of faults of devices, nodes and networks before a rank or a node is blamed.

They enter the fault book. One that stands where no rank can be hurt keeps its node from being chosen; one that asks
for nothing is only noted; one that has recovered may free a node, or let a process start that waited for its device.
What is left is a fault of a rank or of a node in use, and is taken by `take_fault` in `reports.py`.
"""

import msgspec

from ...policies.fault_codes import TREATMENTS, Treatment, closed_text
from ...policies.schema import SubHealthAction
from ...protocol.types import Assertion, FaultLevel, FaultReport
from ..changes.drain import take_sub_health, well_again
from ..changes.generation import release_held, start_if_possible
from ..changes.node_checks import is_unfit
from .state import JobState, Phase
from .world import NodeState

# What keeps a node in use from getting new processes.
MAX_PUT_OFF = 1000  # faults that wait for a world; the oldest goes

_CLOSED = frozenset({Treatment.LEAVE, Treatment.CLOSE})


def sort_out(state: JobState, report: FaultReport, now: float) -> FaultReport | None:
    """Enter a fault of hardware into the book; return it if something has to be done now, with its rank and node.

    A fault of software is returned as it is, if it can hurt a rank.
    """
    if report.node is not None:
        report = msgspec.structs.replace(report, node=state.world.node_called(report.node))
    if report.assertion is Assertion.RECOVER:
        _recovered(state, located(state, report), now)
        return None
    if report.level is FaultLevel.SOFTWARE:
        return report if _of_somebody(state, report) else None
    report, news = state.book.enter(located(state, report), now)
    if not news:
        state.ignore("fault that stands already")
        return None
    settle(state, report.node)
    return report if _is_for_the_ladder(state, report, now) else None


def _is_for_the_ladder(state: JobState, report: FaultReport, now: float) -> bool:
    """Say whether a fault asks for a rung now; take care of what is waited out, or only noted."""
    if TREATMENTS[report.level] is Treatment.WATCH and state.policy.sub_health is not SubHealthAction.LEAVE_NOW:
        if state.book.concerns_ranks(report):
            take_sub_health(state, report, now)
        return False
    hurts = _hurts(state, report)
    if not hurts and report.assertion is Assertion.ONCE:
        state.ignore(f"{report.level} that hurts no rank")
    return hurts


def _of_somebody(state: JobState, report: FaultReport) -> bool:
    """Say whether a fault of software is a rank's, or of a node that holds some, or of none in particular."""
    known = report.rank is not None or report.node is None or bool(state.world.on(report.node))
    if not known:
        state.ignore("fault of a node that holds no rank")
    return known


def located(state: JobState, report: FaultReport) -> FaultReport:
    """Fill in what follows: the node and device of a rank, or the rank on a device of a node in use."""
    world = state.world
    if report.rank is not None:
        holder = world.holder(report.rank)
        where = report.node or (holder.node if holder is not None else None)
        device = state.book.device_of(where, report.rank) if report.device is None else report.device
        if holder is not None and (where == holder.node or not asks_to_leave(report)):
            return msgspec.structs.replace(report, node=where, device=device)
        if holder is None and not (where and asks_to_leave(report)):
            return report
        # Another rank is there by now, and what is wrong with the device is so for each.
        report = msgspec.structs.replace(report, rank=None, incarnation=0, device=device)
    if report.node is None or report.device is None:
        return report
    here = world.on(report.node)
    held = [holder for holder in here if state.book.device_of(report.node, holder.rank) == report.device]
    return msgspec.structs.replace(report, rank=held[0].rank) if held else report


def settle(state: JobState, name: str | None) -> None:
    """Take a spare out of use while a fault of it stands, and back when none does."""
    node = state.world.nodes.get(name or "")
    if node is None:
        return
    unfit = is_unfit(state, node.name)
    if unfit and node.state is NodeState.SPARE:
        node.state = NodeState.UNFIT
    elif not unfit and node.state is NodeState.UNFIT:
        node.state = NodeState.SPARE


def closed_nodes(state: JobState, now: float) -> dict[str, str]:
    """Return the nodes in use that are to get no new process, each with the reason, for the ladder."""
    closed: dict[str, str] = {}
    limit_s = state.policy.faults.in_place_age_s
    for name in state.world.named(NodeState.ACTIVE):
        for fault in state.book.on(name, _CLOSED):
            closed.setdefault(name, closed_text(name, fault.level, _what(fault)))
        for fault in state.book.on(name, frozenset({Treatment.RESTART})):
            stood_s = fault.age_s + now - fault.at_s
            if stood_s > limit_s:
                text = f"{fault.level} {_what(fault)} on node {name} has stood for {stood_s:.0f} s"
                closed.setdefault(name, f"{text}; up to {limit_s:g} s a restart in place can mend it")
    return closed


def _recovered(state: JobState, report: FaultReport, now: float) -> None:
    cleared = state.book.clear(report)
    if cleared is None:
        state.ignore("recovery of a fault that is not known")
        return
    settle(state, cleared.report.node)
    well_again(state, cleared.report.node, now)
    if state.phase is Phase.WAITING:
        start_if_possible(state, now)
    release_held(state, now)


def _hurts(state: JobState, report: FaultReport) -> bool:
    """Say whether the fault is for the ladder: it asks for something, and a rank is where it is."""
    treatment = TREATMENTS[report.level]
    if treatment in {Treatment.NOTE, Treatment.CLOSE}:
        return False
    node = state.world.nodes.get(report.node or "")
    if node is None or node.state is not NodeState.ACTIVE:
        return False
    return report.rank is not None or (report.device is None and bool(state.world.on(node.name)))


def asks_to_leave(report: FaultReport) -> bool:
    """Whether nothing may run where the fault is, whichever process it is."""
    return TREATMENTS[report.level] is Treatment.LEAVE and report.assertion is not Assertion.RECOVER


def put_off(state: JobState, report: FaultReport) -> None:
    """Nothing can be done now: keep what will have to be left, for when there is a world again."""
    state.ignore(f"fault while {state.phase}")
    if asks_to_leave(report) and (state.phase is Phase.WAITING or state.saving.before_a_start):
        state.book.put_off = [*state.book.put_off[-MAX_PUT_OFF + 1 :], report]


def stands(state: JobState, report: FaultReport) -> FaultReport | None:
    """Return a fault that was put off as one of the rank that is there now; None: it is gone, or hurts no rank."""
    report = located(state, msgspec.structs.replace(report, rank=None, incarnation=0))
    standing = report.node and state.book.on(report.node, frozenset({Treatment.LEAVE}), report.device)
    return report if standing and _hurts(state, report) else None


def _what(fault: FaultReport) -> str:
    code = f"{fault.code} " if fault.code else ""
    return f"{code}of device {fault.device}" if fault.device is not None else f"{code}of the node"
