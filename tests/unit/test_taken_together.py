"""What nodes say at one time is handled at once: actions, and all that is learned, are those of one after the other."""

from collections.abc import Iterable, Sequence

from midstep.controller.journaled import Journaled, in_runs, together
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import Action, ControllerStarted, Event, Send
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.routes import Routes
from midstep.policies.schema import Policy
from midstep.protocol import messages as m
from midstep.protocol.types import FaultKind, FaultReport, RunningProcess, StoreEndpoint, rank_address
from midstep.testing.fake_cluster import FakeCluster, job

NODES, RANKS_PER_NODE = 3, 2
RANKS = range(NODES * RANKS_PER_NODE)


def of_nodes(words: Sequence[m.RankWord]) -> list[m.RanksReported]:
    """What all ranks say, in one message for each node."""
    said = [m.RankReport(rank, 1, word) for rank, word in enumerate(words)]
    firsts = range(0, len(said), RANKS_PER_NODE)
    return [
        m.RanksReported(f"node{first // RANKS_PER_NODE}", tuple(said[first : first + RANKS_PER_NODE]))
        for first in firsts
    ]


def complaint(rank: int) -> m.FaultReported:
    address = rank_address(rank)
    return m.FaultReported(FaultReport(FaultKind.COMMUNICATION, 5.0, address, "closed", rank, f"node{rank // 2}", 1, 1))


def started(*ranks: int) -> m.ProcessesStarted:
    node = f"node{ranks[0] // RANKS_PER_NODE}"
    each = (m.ProcessStarted(node, RunningProcess(rank, 100 + rank, 1, 1), warm=True) for rank in ranks)
    return m.ProcessesStarted(node, tuple(each))


def course() -> list[list[Journaled]]:
    """A job that starts, and loses a rank: what is journaled at each moment, up to the answers of survivors."""
    cluster = FakeCluster(job(nodes=NODES, spares=0), Policy()).start()
    joined = [cluster.joined(rank, fresh=True, own=0) for rank in RANKS]
    return [
        [ControllerStarted(1)],
        [m.NodeJoined(f"node{n}", f"node{n}", StoreEndpoint("127.0.0.1", n + 1), ()) for n in range(NODES)],
        [started(*RANKS[n * RANKS_PER_NODE :][:RANKS_PER_NODE]) for n in range(NODES)],
        [*of_nodes(joined)],
        [*of_nodes([m.RankReady(rank, 1, 1, 0, {"rebuild": 0.1}, 0) for rank in RANKS])],
        [*of_nodes([m.StepCommitted(rank, 1, 1, 1, 4.0, 0.1) for rank in RANKS])],
        [*of_nodes([complaint(rank) for rank in RANKS]), started(0), *of_nodes([complaint(rank) for rank in RANKS])],
        [m.ProcessExited("node0", RunningProcess(0, 100, 1, 1), -9, 5.0, expected=False)],
        [*of_nodes([m.RankQuiesced(rank, 2, 1, word.report, {"stop": 0.1}) for rank, word in enumerate(joined)])],
    ]  # fmt: skip


class Controller:
    """What a controller learns, and has done."""

    def __init__(self) -> None:
        cluster = FakeCluster(job(nodes=NODES, spares=0), Policy())
        machine: RecoveryMachine = cluster.machine
        self.learned = Learned(machine, Routes(), Liveness(cluster.policy.heartbeat))
        self.done: list[Action] = []

    def take(self, journaled: Iterable[Journaled], at_s: float) -> None:
        self.done += self.learned.take_all(journaled, at_s)


def test_what_came_at_one_time_teaches_what_it_teaches_one_after_the_other() -> None:
    """To the byte of a snapshot; so a controller that replays event by event stands where the last one stood."""
    at_once, one_by_one = Controller(), Controller()
    for moment, journaled in enumerate(course()):
        at_once.take(journaled, float(moment))
        for event in journaled:
            one_by_one.take([event], float(moment))
        assert at_once.learned.snapshot() == one_by_one.learned.snapshot(), journaled
    assert at_once.done == one_by_one.done
    sent = {type(action.body) for action in at_once.done if isinstance(action, Send)}
    assert {m.StartProcess, m.Rejoin, m.Resume, m.Quiesce} <= sent
    assert at_once.learned.routes.connection(rank_address(5)) == "node/node2"


def test_reports_of_one_kind_are_handled_at_once_whichever_node_they_are_of() -> None:
    """And those of another kind between them are not passed over."""
    handed: list[Sequence[Event]] = []

    class Machine:
        def handle(self, event: Event, now: float, *more: Event) -> list[Action]:
            handed.append((event, *more))
            return []

    ready = [m.RankReady(rank, 1, 1, 0, {}, 0) for rank in RANKS]
    lost = m.NodeLost("node9", "", 0.0)
    for events in together([*of_nodes(ready), lost, lost, *of_nodes(ready)]):
        Machine().handle(*events[:1], 0.0, *events[1:])  # type: ignore[arg-type]  # nothing else is among them
    assert handed == [tuple(ready), (lost,), (lost,), tuple(ready)]


def test_a_run_ends_where_something_else_was_said() -> None:
    """What has an answer of its own, or changes whom there is to speak to, is taken in by itself."""
    words, lost = of_nodes([complaint(rank) for rank in RANKS]), m.NodeLost("node9", "", 0.0)
    taken: list[Journaled] = [*words, started(0), lost, lost, *words[:1]]
    assert [*in_runs(taken, lambda each: each)] == [[*words, started(0)], [lost], [lost], words[:1]]
