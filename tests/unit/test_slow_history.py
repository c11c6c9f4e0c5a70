"""Which nodes were named slow, by how much, since when, and what was done: kept for `midstep report`."""

import io
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console

from midstep.cli.views.incident_data import report_json
from midstep.cli.views.report_text import job_view
from midstep.controller.journaled import Journaled
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.routes import Routes
from midstep.controller.slow_history import MOST_KEPT, SlowHistory
from midstep.policies.schema import Policy, ScalePolicy, SlowAction, SlowPolicy
from midstep.protocol.messages import FaultReported
from midstep.protocol.slow_records import SlowAnswer, SlowRecord, SlowTold
from midstep.protocol.types import CONTROLLER, Assertion, FaultKind
from midstep.testing.fake_cluster import STEP, FakeCluster, job

BOUNDARY = STEP + 1 + 10  # a second ahead
SCORES = {2: 1.4, 3: 1.92}


class Watched(FakeCluster):
    """A running job of four ranks on two nodes, whose slow nodes are written down."""

    def __init__(self, policy: SlowPolicy, spares: int = 1) -> None:
        self.slow = SlowHistory()
        super().__init__(job(spares=spares), Policy(slow=policy, scale=ScalePolicy(min_nodes=1)))
        self.start()

    def handled(self, event: Journaled, actions: object) -> None:
        """Look on, as a controller does after each event."""
        self.slow.follow(self.machine.state, event, self.now)

    def name(
        self,
        node: str = "node1",
        kind: FaultKind = FaultKind.SLOW,
        assertion: Assertion = Assertion.OCCUR,
        scores: Mapping[int, float] = SCORES,
    ) -> float:
        """The controller finds that a node is slow, or well again; return when."""
        report = self.fault(None, kind, node=node, fault_id=f"{kind} {node}", assertion=assertion, detail="measured")
        told = msgspec.structs.replace(report.report, seen_by=CONTROLLER, scores={**scores})
        self.feed(FaultReported(told))
        return self.now

    def record(self) -> SlowRecord:
        """The one record."""
        (record,) = self.slow.records
        return record


def printed(cluster: Watched, slow: SlowTold) -> str:
    """Return the report of a job as text."""
    status = cluster.machine.status(cluster.now)
    console = Console(file=io.StringIO(), width=100, highlight=False)
    with console.capture() as captured:
        console.print(job_view(status, status.incidents, width=100, slow=slow))
    return captured.get()


def drained() -> Watched:
    """A job of which a slow node was drained to the spare one."""
    cluster = Watched(SlowPolicy(then=SlowAction.DRAIN))
    cluster.name()
    cluster.feed(*(cluster.waiting(rank) for rank in (2, 3)))
    cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))
    cluster.feed(*(cluster.quiesced(rank, BOUNDARY, peers=[(rank + 2) % 4]) for rank in range(4)))
    cluster.feed(cluster.joined(2), cluster.joined(3))
    cluster.holder(2).pid, cluster.holder(3).pid = 202, 203
    cluster.pass_barrier_two(BOUNDARY)
    return cluster


def test_a_slow_node_that_is_shown_is_reported_until_it_is_well_again() -> None:
    cluster = Watched(SlowPolicy())
    since_s = cluster.name()
    assert cluster.record() == SlowRecord("slow node1", FaultKind.SLOW, "node1", "measured", since_s, SCORES)
    cluster.name()  # it is known
    well_s = cluster.name(assertion=Assertion.RECOVER)
    assert (cluster.record().until_s, cluster.record().answer) == (well_s, SlowAnswer.REPORTED)
    again_s = cluster.name()
    assert [each.since_s for each in cluster.slow.records] == [since_s, again_s]


def test_a_drain_is_told_with_the_number_of_its_incident() -> None:
    cluster = drained()
    (incident,) = cluster.machine.incidents
    record = cluster.record()
    assert (record.answer, record.incident, record.until_s) == (SlowAnswer.DRAINED, incident.number, cluster.now)


def test_a_world_that_shrinks_is_told() -> None:
    cluster = Watched(SlowPolicy(then=SlowAction.SHRINK), spares=0)
    cluster.name()
    cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))
    cluster.feed(*(cluster.quiesced(rank, BOUNDARY) for rank in range(4)))
    cluster.feed(*(cluster.saved(rank, BOUNDARY) for rank in range(4)))
    ranks = range(2)
    assert cluster.record().incident is None
    cluster.feed(*(cluster.started(rank) for rank in ranks))
    joined = [cluster.joined(rank, fresh=True) for rank in ranks]
    reports = [msgspec.structs.replace(each.report, checkpoints=(BOUNDARY,), clean=False) for each in joined]
    cluster.feed(*(msgspec.structs.replace(j, report=r) for j, r in zip(joined, reports, strict=True)))
    cluster.feed(*(cluster.ready(rank, BOUNDARY) for rank in ranks))
    cluster.feed(*(cluster.committed(rank, BOUNDARY + 1) for rank in ranks))
    assert (cluster.record().answer, cluster.record().incident) == (SlowAnswer.SHRUNK, 1)


def test_an_incident_with_another_cause_is_no_answer_to_a_slow_node() -> None:
    cluster = Watched(SlowPolicy())
    cluster.name()
    cluster.feed(cluster.exited(0))
    cluster.feed(cluster.started(0))
    cluster.recover(STEP)
    assert (cluster.record().until_s, cluster.record().incident) == (None, None)


def test_the_report_has_a_line_for_each_slow_rank() -> None:
    """Its score, since when, for how long, and what was done; the worst one first."""
    cluster = drained()
    record = cluster.record()
    cluster.slow.records = [msgspec.structs.replace(record, since_s=1000.0, until_s=1004.2)]
    text = printed(cluster, cluster.slow.told())
    rows = [line.split() for line in text.splitlines() if line.startswith("slow ")]
    since = ["1970-01-01", "00:16:40", "UTC"]
    done = ["drained", "to", "a", "spare,", "incident", "1"]
    assert rows == [
        ["slow", "3", "node1", "1.92", *since, "4.20", "s", *done],
        ["slow", "2", "node1", "1.40", *since, "4.20", "s", *done],
    ]
    assert "node1: measured" in text


def test_the_report_tells_what_stands_and_what_has_no_number() -> None:
    cluster = Watched(SlowPolicy())
    cluster.name(kind=FaultKind.SLOW_INPUT, scores={})
    cluster.now += 59.9
    text = " ".join(printed(cluster, cluster.slow.told()).split())
    assert "slow input - node1 -" in text
    assert "59.9 s so far reported" in text


def test_a_report_says_nothing_of_slow_ranks_where_none_was_named() -> None:
    assert "score" not in printed(Watched(SlowPolicy()), SlowTold())


def test_the_data_of_a_report_has_the_records() -> None:
    cluster = drained()
    status = cluster.machine.status(cluster.now)
    data: dict[str, Any] = report_json(status, status.incidents, slow=cluster.slow.told())
    (record,) = data["slow"]
    assert (record["scores"], record["answer"], data["slow_left_out"]) == ({"2": 1.4, "3": 1.92}, "drained", 0)


def test_of_too_many_records_the_earliest_go_and_are_counted() -> None:
    cluster = Watched(SlowPolicy())
    for _ in range(MOST_KEPT + 2):
        cluster.name()
        cluster.name(assertion=Assertion.RECOVER)
    told = cluster.slow.told()
    assert (len(told.records), told.left_out) == (MOST_KEPT, 2)


def test_another_controller_knows_them_from_a_snapshot() -> None:
    """The events may be gone."""

    def learned(cluster: FakeCluster) -> Learned:
        return Learned(cluster.new_machine(), Routes(), Liveness(cluster.policy.heartbeat))

    cluster = Watched(SlowPolicy())
    first = learned(cluster)
    cluster.name()
    for event, at_s in cluster.journal:
        first.take(event, at_s)
    second = learned(cluster)
    second.restore(first.snapshot())
    assert second.slow_told() == cluster.slow.told() != SlowTold()
