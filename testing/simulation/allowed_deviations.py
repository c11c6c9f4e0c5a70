"""Why a process with no fault may be replaced after all, or compute where its rank is not any more.

What counts is what could be known when it was decided. A controller that dies over a decision that it has recorded
leaves it to the next one, which acts on it when the network may be good again; so what allows for a missed deadline is
remembered from the moment at which the deadline passed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...controller.liveness import QUIET_INTERVALS
from ...controller.recovery.events import Action, DeadlinePassed, Event, Send
from ...controller.recovery.world import REACHABLE, NodeState
from ...protocol.messages import NodeLost, ProbeProgress, ProgressReported
from ...protocol.types import CONTROLLER, FaultKind, node_address
from .network import RESENDS_S

if TYPE_CHECKING:
    from ...protocol.incidents import Incident
    from .node import SimulatedAgent
    from .process import Process
    from .world import SimulatedWorld

RESENT_S = 5.0  # what a node did not hear has come again by then


class AllowedDeviations:
    """Knows which processes are faulty, which could not be reached, and when."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._unheard: dict[float, frozenset[int]] = {}  # pids out of reach, by when a deadline passed
        self._probed: dict[str, int] = {}  # agents that owe an answer to a probe of the step clocks
        self._silent: dict[float, frozenset[str]] = {}  # agents that owed one, by when a deadline passed
        self._left: dict[str, float] = {}  # nodes that strays were first seen on after the job had left them
        self._given_up: set[int] = set()  # pids on nodes that the controller alone could not hear

    def recorded(self, event: Event) -> None:
        """The controller has recorded an event, and may die before it acts on it."""
        if isinstance(event, DeadlinePassed):
            unheard = frozenset(each.pid for each in self._world.living() if self._out_of_reach(each))
            self._unheard[self._world.timeline.now] = unheard
            self._silent[self._world.timeline.now] = frozenset(self._probed)
        elif isinstance(event, ProgressReported) and self._probed.get(node_address(event.node)) == event.probe:
            del self._probed[node_address(event.node)]
        elif isinstance(event, NodeLost) and self._is_for_silence(event.node):
            self._given_up |= {process.pid for process in self._world.agents[event.node].processes()}

    def handled(self, actions: Sequence[Action]) -> None:
        """The controller has handled an event; what it sends may not arrive."""
        for action in actions:
            if isinstance(action, Send) and isinstance(action.body, ProbeProgress):
                self._probed[action.receiver] = action.body.probe

    def replacing(self, process: "Process", incident: "Incident") -> bool:
        """Whether there is a reason to replace this process, as far as the world can know."""
        if process.faulty or process.agent.faulty or self._out_of_reach(process):
            return True
        return any(
            (report.seen_by == CONTROLLER and self._owed_an_answer(process, incident))
            or (
                report.kind is FaultKind.UNRESPONSIVE
                and report.incarnation == process.incarnation
                and process.pid in self._unheard.get(report.at_s, ())
            )
            for report in incident.reports
            if report.rank == process.rank
        )

    def given_up(self, process: "Process") -> bool:
        """Whether a process was given up, rightly, although only the controller was cut off from it.

        With its node, or because its agent did not say in time, by the deadline that passes now, what its ranks do.
        """
        silent = self._silent.get(self._world.timeline.now, frozenset())
        return process.pid in self._given_up or node_address(process.agent.name) in silent

    def _is_for_silence(self, name: str) -> bool:
        """Whether the controller is cut off from a node, and not from so many that it holds their silence."""
        now, agents = self._world.timeline.now, self._world.agents
        known = self._world.machine.state.world.nodes.values()
        nodes = [node.name for node in known if node.state in REACHABLE and not node.given_back]
        silent = [node for node in nodes if self._is_missed(agents[node])]
        share = self._world.policy.heartbeat.hold_share
        return name in silent and agents[name].isolated_until_s > now and len(silent) <= share * len(nodes)

    def _is_missed(self, agent: "SimulatedAgent") -> bool:
        """Whether the controller has not heard a node for long enough to notice it."""
        now, interval_s = self._world.timeline.now, self._world.policy.heartbeat.interval_s
        silent_lately = agent.isolated_until_s <= now and now - agent.silent_since_s < QUIET_INTERVALS * interval_s
        return not agent.is_heard and not silent_lately

    def _owed_an_answer(self, process: "Process", incident: "Incident") -> bool:
        """Whether the agent of a process did not say in time, in this incident, what its ranks are doing."""
        agent = node_address(process.agent.name)
        return any(at_s >= incident.began_s and agent in silent for at_s, silent in self._silent.items())

    def computing(self, process: "Process") -> bool:
        """Whether a process cannot be told that it is not needed: its node counts as lost, or was left just now."""
        agent = process.agent
        state = self._world.machine.state.world.nodes[agent.name].state
        now = self._world.timeline.now
        told = now > max(agent.deaf_until_s, agent.isolated_until_s, self._left.setdefault(agent.name, now)) + RESENT_S
        if state is NodeState.ACTIVE:
            del self._left[agent.name]
        return state is NodeState.LOST or (state is not NodeState.ACTIVE and not told)

    def _out_of_reach(self, process: "Process") -> bool:
        """Whether what was said to this process, or by it, may not have arrived by now."""
        agent, now = process.agent, self._world.timeline.now
        cut_off = now < max(agent.deaf_until_s, agent.mute_until_s) + RESENT_S
        return cut_off or self._lost_again(process) or not self._world.network.has_delivered

    def _lost_again(self, process: "Process") -> bool:
        """Whether what it said while the controller was cut off has not come since: the network lost the next, too."""
        lately = self._world.timeline.now < process.agent.isolated_until_s + RESENDS_S
        return lately and self._world.setting.loss > 0 and not process.endpoint.quiet
