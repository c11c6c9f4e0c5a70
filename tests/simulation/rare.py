"""Events that few simulated jobs meet, or none, played by hand."""

import msgspec

from midstep.controller.recovery.events import ControlRequested, DeadlinePassed
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import RankEvent, RankState
from midstep.policies.schema import Budget, NodeCheckPolicy, Policy, RungPolicy
from midstep.protocol.controls import Asked, EndPause, PauseTraining, ReleaseNode
from midstep.protocol.messages import FaultReported, NodeChecked, NodeLost
from midstep.protocol.types import OPERATOR, Assertion, FaultKind, FaultLevel, FaultReport, Rung
from midstep.testing.fake_cluster import job

from ..unit.test_draining import stopped
from .boundary import Written
from .recording import Happened, Moved

STOP = RungPolicy(Rung.STOP)
_ASKED = Asked("ann", "operator", "maintenance")


def seen_by_hand() -> set[Happened]:
    """Return all that is seen."""
    return (
        _left_by_one_and_awaited_by_the_other()
        | _all_restarted_after_a_suspicion()
        | _on_new_nodes_without_saving()
        | _ended_by_a_suspicion()
        | _broken_before_the_world_was_back()
        | _back_at_a_wrong_step()
        | _saved_after_its_newcomer_has_failed()
        | _said_once_more()
        | _fit_again_while_it_is_waited_for()
        | _begun_when_its_node_has_passed()
        | _not_saved_in_time()
        | _paused_and_let_go_on()
        | _released_while_nodes_are_waited_for()
    )


def _paused_and_let_go_on() -> set[Happened]:
    """Operators hold all ranks at a boundary, and let them go on."""
    held = Written()
    held.start()
    held.feed(ControlRequested(PauseTraining(3600.0), _ASKED))
    held.feed(*(held.clocks(name) for name in ("node0", "node1")))
    held.feed(*(stopped(held, rank) for rank in range(4)))
    held.feed(ControlRequested(EndPause(), _ASKED))
    held.expect(Phase.REJOINING)
    return held.seen


def _released_while_nodes_are_waited_for() -> set[Happened]:
    """The node that is missing is one that an operator has isolated."""
    isolated = Written(job(spares=0))
    isolated.feed(isolated.node("node0"))
    fault = FaultReport(
        FaultKind.NODE, 0.0, OPERATOR, "", node="node1", level=FaultLevel.NODE, fault_id="isolate node1"
    )
    isolated.feed(FaultReported(msgspec.structs.replace(fault, assertion=Assertion.OCCUR)), isolated.node("node1"))
    isolated.expect(Phase.WAITING)
    isolated.feed(ControlRequested(ReleaseNode("node1"), _ASKED))
    isolated.expect(Phase.STARTING)
    return isolated.seen


def _not_saved_in_time() -> set[Happened]:
    """All nodes are to be new ones, and the ranks that park write nothing first."""
    saving = Written(job(spares=0), Policy(ladder=(RungPolicy(Rung.RESCHEDULE_JOB), STOP)), creates=True)
    saving.start()
    saving.feed(saving.exited(1))
    saving.expect(Phase.SAVING)
    saving.feed(*(saving.quiesced(rank, 5) for rank in (0, 2, 3)))
    for _ in range(5):
        if saving.machine.phase is Phase.SAVING:
            saving.overdue()
    saving.expect(Phase.WAITING)
    return saving.seen


def _begun_when_its_node_has_passed() -> set[Happened]:
    """No simulated policy has nodes checked."""
    waiting = Written(job(nodes=1, spares=0), Policy(node_check=NodeCheckPolicy(enabled=True)))
    waiting.feed(waiting.node("node0"), NodeChecked("node0", 1, product_s=0.1))
    return waiting.seen


def _left_by_one_and_awaited_by_the_other() -> set[Happened]:
    """A process ends well in front of its train function, and another one waits there. No simulated script does so."""
    starting = Written(job(nodes=1, spares=0))
    starting.feed(starting.node("node0"))
    starting.feed(starting.exited(0, 0), starting.joined(1, fresh=True, own=0))
    return starting.seen


def _all_restarted_after_a_suspicion() -> set[Happened]:
    """A policy that only knows new nodes, and saves nothing first."""
    policy = Policy(ladder=(RungPolicy(Rung.RESCHEDULE_JOB), STOP), save_before_reschedule=False)
    seen: set[Happened] = set()
    for exits in (False, True):
        suspecting = Written(job(spares=0), policy, creates=True)
        suspecting.start()
        suspecting.feed(suspecting.fault(0, FaultKind.COMMUNICATION))
        if exits:
            suspecting.feed(suspecting.exited(1))
        else:
            suspecting.overdue()
        suspecting.expect(Phase.WAITING)
        seen |= suspecting.seen
    return seen


def _on_new_nodes_without_saving() -> set[Happened]:
    """A process ends, or comes back at a wrong step, where nothing but a job on new nodes is left."""
    unsaved = Policy(ladder=(RungPolicy(Rung.RESCHEDULE_JOB), STOP), save_before_reschedule=False)
    running = Written(job(spares=0), unsaved, creates=True)
    running.start()
    running.feed(running.exited(1))
    running.expect(Phase.WAITING)
    once = msgspec.structs.replace(unsaved, ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1), *unsaved.ladder))
    rejoining = Written(job(spares=0), once, creates=True)
    rejoining.start()
    rejoining.feed(rejoining.exited(1))
    rejoining.feed(*(rejoining.quiesced(rank, 5, peers=[1]) for rank in (0, 2, 3)), rejoining.joined(1))
    rejoining.feed(rejoining.ready(0, 99))
    rejoining.expect(Phase.WAITING)
    return running.seen | rejoining.seen


def _ended_by_a_suspicion() -> set[Happened]:
    """A fault whose rank does not come to light, under a policy that saves nothing."""
    suspecting = Written(job(spares=0), Policy(ladder=(STOP,), save_before_reschedule=False))
    suspecting.start()
    suspecting.feed(suspecting.fault(0, FaultKind.COMMUNICATION))
    suspecting.overdue()  # clocks are read once more
    suspecting.overdue()
    suspecting.expect(Phase.ENDED)
    return suspecting.seen


def _broken_before_the_world_was_back() -> set[Happened]:
    """A fault that came while a node was waited for is taken up when all rejoin already, and the budget is spent."""
    ladder = (RungPolicy(Rung.RESCHEDULE_POD, budget=Budget(per_job=1)), STOP)
    waiting = Written(job(spares=0), Policy(ladder=ladder, save_before_reschedule=False), creates=True)
    waiting.start()
    waiting.feed(NodeLost("node1", "gone", waiting.now))
    waiting.feed(waiting.fault(None, FaultKind.NODE, node="node0", level=FaultLevel.SEPARATE_NPU, code="A1"))
    waiting.feed(waiting.node("node2"))
    waiting.feed(*(waiting.joined(rank, fresh=True, own=0) for rank in range(4)))
    waiting.expect(Phase.REJOINING)
    waiting.feed(DeadlinePassed())
    waiting.expect(Phase.SAVING)
    return waiting.seen


def _back_at_a_wrong_step() -> set[Happened]:
    """At the first start there is nothing to be saved; in a recovery there is, where no other rung is left."""
    starting = Written(job(), Policy(ladder=(STOP,)))
    starting.join()
    starting.feed(starting.ready(0, 99))
    starting.expect(Phase.ENDED)
    rejoining = Written(job(spares=0), Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1), STOP)))
    rejoining.start()
    rejoining.feed(rejoining.exited(1))
    rejoining.feed(*(rejoining.quiesced(rank, 5, peers=[1]) for rank in (0, 2, 3)), rejoining.joined(1))
    rejoining.expect(Phase.REJOINING)
    rejoining.feed(rejoining.ready(0, 99))
    rejoining.expect(Phase.SAVING)
    return starting.seen | rejoining.seen


def _saved_after_its_newcomer_has_failed() -> set[Happened]:
    """The one rung that was allowed has failed before all had stopped."""
    quiescing = Written(job(spares=0), Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1), STOP)))
    quiescing.start()
    quiescing.feed(quiescing.exited(0))
    quiescing.feed(quiescing.exited(0))
    quiescing.expect(Phase.SAVING)
    return quiescing.seen


def _fit_again_while_it_is_waited_for() -> set[Happened]:
    """A node whose device does not work is there, and then it does."""
    waiting = Written(job(spares=0))
    broken = {"node": "node1", "level": FaultLevel.SEPARATE_NPU, "code": "A1"}
    waiting.feed(waiting.node("node1"))
    waiting.feed(waiting.fault(None, FaultKind.NODE, **broken, assertion=Assertion.OCCUR), waiting.node("node0"))
    waiting.expect(Phase.WAITING)
    waiting.feed(waiting.fault(None, FaultKind.NODE, **broken, assertion=Assertion.RECOVER))
    waiting.expect(Phase.STARTING)
    return waiting.seen


def _said_once_more() -> set[Happened]:
    """A rank does not know whether its first step was heard of."""
    running = Written(job())
    running.start()
    running.feed(running.committed(0, 2))
    assert running.holder(0).state is RankState.TRAINING
    return {Moved(RankState.TRAINING, RankEvent.STEP_COMMITTED)}
