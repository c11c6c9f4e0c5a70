"""The cause that is named is what went wrong, not what followed from it."""

import msgspec

from midstep.cli.views.causes import cause_line, headline_cause, report_groups, root_report
from midstep.protocol.incidents import Incident, JobStatus
from midstep.protocol.types import FaultKind, FaultReport


def test_echoes_that_arrived_first_do_not_hide_the_process_that_ended(status: JobStatus) -> None:
    killed = status.incidents[1]
    earlier = tuple(msgspec.structs.replace(report, at_s=report.at_s - 1) for report in killed.reports[:3])
    killed = msgspec.structs.replace(killed, reports=(*earlier, killed.reports[3]))
    assert cause_line(killed) == "exit: rank 1 on node-0: ended by signal 9 (SIGKILL)"


def test_loss_of_the_node_explains_the_exits_of_its_processes() -> None:
    exits = [FaultReport(FaultKind.EXIT, 1.0, "agent", "gone", rank=rank, node="node-1") for rank in (2, 3)]
    lost = FaultReport(FaultKind.NODE_LOST, 1.2, "platform", "agent gone", node="node-1")
    assert cause_line(Incident(1, 1.0, reports=(*exits, lost))) == "node_lost: node-1: agent gone"


def test_a_second_fault_is_counted(status: JobStatus) -> None:
    assert cause_line(status.incidents[4]).endswith("(and 1 more fault)")


def test_an_incident_of_echoes_only_names_the_first_of_them() -> None:
    echo = FaultReport(FaultKind.COMMUNICATION, 1.0, "rank/0", "timed out", rank=0)
    assert headline_cause(Incident(1, 1.0, reports=(echo,))) == "collective failed: rank 0"


def test_an_incident_without_reports_says_so() -> None:
    assert root_report(Incident(1, 1.0)) is None
    assert cause_line(Incident(1, 1.0)) == "no fault was reported"


def test_reports_that_say_the_same_become_one_and_the_cause_comes_first(status: JobStatus) -> None:
    groups = report_groups(status.incidents[1])
    assert [(group.first.kind, group.ranks) for group in groups] == [
        (FaultKind.EXIT, (1,)),
        (FaultKind.COMMUNICATION, (0, 2, 3)),
    ]


def test_ranks_that_wait_for_a_stalled_one_are_not_the_cause() -> None:
    """The controller blames rank 3 later than rank 0 noticed that it has to wait."""
    waits = FaultReport(FaultKind.STALL, 1.0, "node/a", "no progress", rank=0, node="a")
    blamed = FaultReport(FaultKind.STALL, 1.3, "controller", "rank 3 holds up the others", rank=3, node="b")
    incident = Incident(1, 1.0, reports=(waits, blamed), replaced=(3,))
    assert cause_line(incident) == "stall: rank 3 on b: rank 3 holds up the others"


def test_ranks_that_wait_for_a_lost_node_are_not_the_cause() -> None:
    """A stall is seen after a second, the silence of a node after three."""
    waits = FaultReport(FaultKind.STALL, 1.0, "node/a", "no progress", rank=0, node="a")
    lost = FaultReport(FaultKind.NODE_LOST, 2.8, "controller", "no word for 3.0 s", node="b")
    incident = Incident(1, 1.0, reports=(waits, lost), replaced=(1,))
    assert cause_line(incident) == "node_lost: b: no word for 3.0 s"


def test_a_second_kill_in_a_later_generation_is_told_on_its_own() -> None:
    kills = tuple(
        FaultReport(FaultKind.EXIT, float(generation), "node/a", "SIGKILL", rank=1, node="a", generation=generation)
        for generation in (1, 2)
    )
    assert len(report_groups(Incident(1, 1.0, reports=kills))) == 2
