"""The platform: makes, ends and kills nodes; may be slow, run out of machines, or not answer at all."""

from typing import TYPE_CHECKING

from ...protocol.mailbox import Mailbox
from ...protocol.messages import (
    CreateNode,
    DeleteNode,
    EndJob,
    Envelope,
    KillNode,
    NodeGoing,
    NodeLost,
    NodeRefused,
    NodeStaying,
    PlatformJoined,
)
from ...protocol.types import CONTROLLER, PLATFORM
from .invariants import Invariant
from .network import Endpoint

if TYPE_CHECKING:
    from .world import SimulatedWorld

REFUSAL_S = (0.0, 0.0, 2.0, 30.0)  # how long it takes to find out that there are no more machines


class SimulatedPlatform:
    """Makes, ends and kills nodes; says so when one goes that was not to go."""

    def __init__(self, world: "SimulatedWorld", capacity: int, begun: tuple[str, ...]) -> None:
        """`begun`: the nodes that are on their way when the job begins."""
        self._world = world
        self._begun = begun
        self.capacity = capacity
        self.silent = False  # takes orders, and brings nothing
        self.deleted: set[str] = set()  # those that it was asked to end
        self._asked: set[str] = set()
        self.ending = False
        mailbox = Mailbox(job=world.job.job, address=PLATFORM, session=world.next_session())
        self.endpoint = Endpoint(
            mailbox,
            world.timeline,
            transmit=self._transmit,
            take=self._take,
            complain=world.fail,
            new_session=lambda _: self.introduce(),
        )

    def introduce(self) -> None:
        """Say what it can do and which nodes it has: at the start of the job, and to each new controller."""
        if self.silent or self.ending:
            return
        world = self._world
        known = [*self._begun, *sorted(self._asked), *world.agents]
        lost = {name for name, agent in world.agents.items() if not agent.alive} | self.deleted
        nodes = tuple(dict.fromkeys(name for name in known if name not in lost))
        self.endpoint.post(PlatformJoined(world.setting.can_create_nodes, can_kill=True, nodes=nodes), CONTROLLER)

    def take_away(self, name: str, within_s: float | None) -> None:
        """Say that a node will go."""
        self.endpoint.post(NodeGoing(name, "it is being drained", within_s), CONTROLLER)

    def leave_be(self, name: str) -> None:
        """Say that a node will not go after all, or was not to go at all."""
        self.endpoint.post(NodeStaying(name), CONTROLLER)

    def lost(self, name: str) -> None:
        """An agent is gone."""
        if name not in self.deleted and not self.ending:
            self.endpoint.post(NodeLost(name, "its agent ended with signal 9", self._world.timeline.now), CONTROLLER)

    def refuse(self, name: str) -> None:
        """Say that a node cannot be had."""
        self.endpoint.post(NodeRefused(name, "no more machines"), CONTROLLER)

    def _transmit(self, envelope: Envelope) -> None:
        def arrive(each: Envelope) -> None:
            self._world.controller.receive(each, PLATFORM)

        self._world.network.carry(envelope, arrive)

    def _take(self, envelope: Envelope) -> bool:
        world = self._world
        match envelope.body:
            case CreateNode() if self.silent:
                pass
            case CreateNode(node=name) if name in self._asked:
                pass
            case CreateNode(node=name) if self.capacity > 0:
                self._asked.add(name)
                self.capacity -= 1
                world.timeline.after(world.chance.uniform(0.1, 20.0), lambda: world.add_agent(name))
            case CreateNode(node=name):
                world.timeline.after(world.chance.choice(REFUSAL_S), lambda: self.refuse(name))
            case DeleteNode(node=name) if name in self.deleted:
                pass
            case DeleteNode(node=name):
                self.deleted.add(name)
                self.capacity += 1
                if name in world.agents:  # else it is still on its way, and comes for nothing
                    world.timeline.after(world.chance.uniform(0.01, 5.0), world.agents[name].die)
            case KillNode(node=name):
                world.kill_node(name)
            case EndJob():
                self.ending = True
                for agent in world.agents.values():
                    world.timeline.after(10.0, agent.die)
            case other:
                world.fail(Invariant.UNDERSTOOD, f"a platform cannot carry out a {type(other).__name__}")
        return True
