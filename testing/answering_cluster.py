"""The fake cluster whose agents, processes and platform answer every command at once, as the real ones do.

A test can have some of them not answer (`deaf`, `mute`, `never_joins`, `refuses_nodes`), or later (`late`). The events
are kept as the journal keeps them, so that a controller can die and another one take over at any moment.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ..controller.recovery.events import Action, ControllerStarted, Event, Send, StopRequested
from ..controller.recovery.state import Phase
from ..controller.routes import Routes
from ..policies.files import parse_policy
from ..processor.session import Order
from ..protocol import messages as m
from ..protocol.incidents import Incident
from ..protocol.types import PLATFORM, FaultKind, FaultLevel, Rung
from .fake_cluster import STEP_S, FakeCluster, job, only
from .instant import Agent, Process

MOST_EVENTS = 10_000  # a job that goes on for longer is going round in circles
FIRST_PID = 100


class AnsweringCluster(FakeCluster):
    """A job of `nodes` x `ranks_per_node` ranks with `spares`; `policy` is YAML text."""

    def __init__(
        self,
        policy: str = "",
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        spares: int = 1,
        creates_nodes: bool = False,
        max_restarts: int = 0,
        resilient: bool = True,
        refuses_nodes: str = "",
        never_joins: Iterable[int] = (),
    ) -> None:
        """`resilient` False: a script that knows nothing of midstep, and never joins."""
        spec = job(nodes, ranks_per_node, spares, max_restarts)
        super().__init__(spec, parse_policy(policy, "contract"), creates=creates_nodes)
        self.resilient = resilient
        self.refuses_nodes = refuses_nodes  # why the platform creates none
        self.pids = FIRST_PID
        self.agents: dict[str, Agent] = {}
        self.sent: list[Any] = []
        self.checkpoints: tuple[int, ...] = ()
        self.deaf: set[int] = set()  # ranks whose present processes answer nothing
        self.never_joins = set(never_joins)  # ranks whose next processes never reach the train function
        self.clock_changes: dict[str, Any] = {}  # what every step clock says instead
        self.mute: Callable[[Any], bool] = lambda body: False  # commands that nobody answers
        self.late: Callable[[Any], bool] = lambda body: False  # commands that wait for `arrive`
        self._routes = Routes()
        self._owed: deque[Send] = deque()
        self._late: list[Send] = []

    # --- what happens -------------------------------------------------------------------------------------------------

    def start(self) -> "AnsweringCluster":
        """Bring the job to RUNNING, a few steps on."""
        for number in range(self.job.nodes + self.job.spare_nodes):
            self.node_joins(f"node{number}")
        self.settle()
        self.train(5)
        return self

    def train(self, steps: int) -> None:
        """All processes commit as many steps more."""
        for process in self.processes.values():
            process.train(steps)
        self.now += steps * STEP_S

    def node_joins(self, name: str) -> None:
        """An agent comes up, or greets a controller that it does not know."""
        agent = self.agents.setdefault(name, Agent(self, name))
        agent.say(agent.introduction())

    def kill(self, rank: int, status: int = -9) -> None:
        """The process of a rank ends, and its agent says so."""
        self.processes[rank].end(status)
        self.settle()

    def vanish(self, rank: int) -> Process:
        """The process of a rank ends, and nothing is said of it yet."""
        process = self.processes[rank]
        process.alive, process.place.process = False, None
        return process

    def end_of(self, process: Process, status: int = -9, *, expected: bool = False) -> m.ProcessExited:
        """An agent's report of an end."""
        return m.ProcessExited(process.node, process.running, status, self.now, expected=expected)

    def drop_node(self, name: str) -> None:
        """A node goes away with everything on it, and nothing is said of it yet."""
        self.agents.pop(name, None)

    def lose_node(self, name: str) -> None:
        """A node goes away, and is missed."""
        self.drop_node(name)
        self.feed(m.NodeLost(name, "its agent is gone", self.now))
        self.settle()

    def report(self, kind: FaultKind, rank: int | None = None, **fields: Any) -> None:
        """A fault is reported, of the present process of `rank` unless told otherwise; nothing is answered yet."""
        told = {"seen_by": "test", "generation": self.machine.generation, **fields}
        self.feed(self.fault(rank, kind, **told))

    def suffer(self, kind: FaultKind, rank: int | None = None, **fields: Any) -> None:
        """A fault is reported, and all do what follows."""
        self.report(kind, rank, **fields)
        self.settle()

    def device_fault(self, rank: int, level: FaultLevel) -> None:
        """A detector reports the device of a rank."""
        self.suffer(FaultKind.DEVICE, rank, level=level, code="80E01801")

    def stop(self, reason: str = "Ctrl-C") -> None:
        """An operator ends the job."""
        self.feed(StopRequested(reason))
        self.settle()

    def complete(self) -> None:
        """Every train function returns."""
        for rank in sorted(self.processes):
            self.rank_finishes(rank)
        self.settle()

    def rank_finishes(self, rank: int) -> None:
        """The train function of one rank returns; nothing is answered yet."""
        process = self.processes[rank]
        process.finished = True
        process.go_on()

    def restart_controller(self) -> None:
        """The controller dies; the next one has the journal alone, and knows what this one knew."""
        before = msgspec.structs.replace(self.machine.status(self.now), term=0)
        term = self.machine.state.term + 1
        self.machine, self._routes = self.new_machine(), Routes()
        for event, at_s in self.journal:
            self._routes.learn(event, self.machine.handle(event, at_s))
        assert msgspec.structs.replace(self.machine.status(self.now), term=0) == before
        self.feed(ControllerStarted(term))

    def wait(self) -> None:
        """Nothing is said until the next deadline has passed."""
        self.overdue()
        self.settle()

    def wait_until(self, phase: Phase) -> None:
        """Let deadline after deadline pass until the machine stands in `phase`."""
        for _ in range(50):
            if self.phase is phase:
                return
            self.wait()
        raise AssertionError(f"never {phase}, but {self.phase}")

    # --- who gets what is sent ----------------------------------------------------------------------------------------

    def handled(self, event: Event, actions: list[Action]) -> None:
        """Keep what is sent for `settle`."""
        assert len(self.journal) < MOST_EVENTS, "the job goes round in circles"
        self._routes.learn(event, actions)
        sends = [action for action in actions if isinstance(action, Send)]
        self.sent += [send.body for send in sends]
        self._owed += sends

    def settle(self) -> None:
        """All carry out what they were sent, and answer, until nothing is left to do."""
        while self._owed:
            send = self._owed.popleft()
            if self.late(send.body):
                self._late.append(send)
            elif not self.mute(send.body):
                self._deliver(send)

    def arrive(self) -> None:
        """Have what was late arrive; nothing is late any more."""
        self.late = lambda body: False
        self._owed += self._late
        self._late.clear()
        self.settle()

    def _deliver(self, send: Send) -> None:
        body, connection = send.body, self._routes.connection(send.receiver)
        if send.receiver == PLATFORM:
            self._ask_platform(body)
            return
        agent = self.agents.get((connection or "").removeprefix("node/"))
        if agent is None:
            return
        if connection == send.receiver:
            agent.obey(body)
            return
        process = agent.hosts(int(send.receiver.removeprefix("rank/")))
        if process is not None and isinstance(body, Order) and not (process.suspended or process.rank in self.deaf):
            process.obey(body)

    def _ask_platform(self, body: Any) -> None:
        if isinstance(body, m.CreateNode) and self.refuses_nodes:
            self.feed(m.NodeRefused(body.node, self.refuses_nodes))
        elif isinstance(body, m.CreateNode):
            self.node_joins(body.node)
        elif isinstance(body, m.DeleteNode):
            self.drop_node(body.node)

    # --- what is seen -------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> dict[int, Process]:
        """The processes that hold their ranks."""
        return self._processes(lambda process, incarnation: process.incarnation == incarnation)

    @property
    def newcomers(self) -> dict[int, Process]:
        """The processes that were started early, beside those that hold their ranks."""
        return self._processes(lambda process, incarnation: process.incarnation > incarnation)

    def _processes(self, fits: Callable[[Process, int], bool]) -> dict[int, Process]:
        holders = self.machine.state.world.holders
        hosted = [process for agent in self.agents.values() for process in agent.processes()]
        found = [each for each in hosted if each.rank < len(holders) and fits(each, holders[each.rank].incarnation)]
        return {process.rank: process for process in sorted(found, key=lambda process: process.rank)}

    @property
    def phase(self) -> Phase:
        """Where the machine stands."""
        return self.machine.phase

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far."""
        return self.machine.incidents

    @property
    def rungs(self) -> list[Rung]:
        """The rungs of the last incident, in the order in which they were taken."""
        return [decision.rung for decision in self.incidents[-1].decisions]

    @property
    def outcome(self) -> Any:
        """How the job ended."""
        assert self.finish is not None, f"the job has not ended, it is {self.phase}"
        return self.finish

    def pids_now(self) -> dict[int, int]:
        """The pid of each rank."""
        return {rank: process.pid for rank, process in self.processes.items()}

    def replaced_since(self, before: dict[int, int]) -> set[int]:
        """The ranks that have another process than in `before`."""
        now = self.pids_now()
        return {rank for rank in before if now.get(rank) != before[rank]}

    def commands(self, kind: type, since: int = 0) -> list[Any]:
        """The commands of one kind, from the `since`th command on."""
        return only(self.sent[since:], kind)

    def skipped(self, rung: Rung) -> str:
        """Why the last decision did not take a cheaper rung."""
        decision = self.incidents[-1].decisions[-1]
        return next(each.reason for each in decision.skipped if each.rung is rung)
