"""The `ray` platform of one job: carries out what the controller orders of nodes, and reports those that are lost.

Runs in the process of the controller's actor. When that process is started again, the agents are found by their names,
and follow the controller to its new address.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...protocol.compat import within
from ...protocol.discovery import read_endpoint
from ...protocol.errors import ConfigurationError
from ...protocol.keys import JobKeys
from ...protocol.messages import (
    CreateNode,
    DeleteNode,
    EndJob,
    KillNode,
    NodeGoing,
    NodeLost,
    NodeRefused,
    NodeStaying,
    PlatformJoined,
    Report,
)
from ...protocol.private_files import replace_file
from ...protocol.types import PLATFORM, node_address
from ..peer import PlatformPeer
from .agent_actor import NodeOrder, Placed
from .cluster import RayClient, place_for
from .library import library

LOOK_S = 0.5  # at where the controller listens
DRAINS_S = 1.0  # between two looks at the machines that Ray is about to take away
AGAIN_S = 0.5  # to the next question for an actor that Ray could not reach
CLOSE_MARGIN_S = 5.0
_T = TypeVar("_T")
_NAME = "ray.json"

_log = logging.getLogger(__name__)


class RayOptions(msgspec.Struct, frozen=True):
    """Options of the platform. `nodes`: with spares. `grace_s`: from asking an agent to exit until it is killed."""

    job: str
    keys: str
    run_directory: str
    job_directory: str
    nodes: int
    resources: dict[str, float]
    environment: dict[str, str]
    grace_s: float


class RayNode:
    """Its actor, where that is, and whether the controller wants it gone. `bundle`: its place in the job's group."""

    def __init__(self, name: str, actor: Any = None, bundle: int | None = None) -> None:
        self.name = name
        self.actor = actor
        self.placed: Placed | None = None
        self.bundle = bundle
        self.deleted = False

    @property
    def is_searching(self) -> bool:
        """True while Ray looks for a machine for it outside of the group."""
        return self.actor is not None and self.placed is None and self.bundle is None


class RayPlatform:
    """The platform. Construct it in the running loop, then `open` it; `close` ends all nodes."""

    def __init__(self, options: RayOptions, *, on_end: Callable[[EndJob], None]) -> None:
        """Raises ConfigurationError."""
        self._options = options
        self._on_end = on_end
        self._cluster = RayClient(options.job, options.resources)
        self._errors = library().exceptions
        self._books = BookKeeper(Path(options.job_directory))
        self._session = self._books.next_session()
        self._nodes: dict[str, RayNode] = {}
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._placing = asyncio.Lock()
        self._moved = asyncio.Event()  # a node has got its machine, or is gone
        self._endpoint = _required_endpoint(Path(options.run_directory))
        self._drains = Drains()
        self._keys = JobKeys.load_client(options.keys, PLATFORM)
        self._peer: PlatformPeer | None = None  # before the nodes of earlier are known no order is taken

    async def open(self) -> None:
        """Ask for the nodes of a new job; or find those of one that continues, and report those that are gone."""
        await asyncio.to_thread(self._cluster.reserve, self._options.nodes)
        if not self._books.books.founded:
            self._books.found(tuple(f"node{number}" for number in range(self._options.nodes)))
        existing = await asyncio.to_thread(self._cluster.existing)
        self._peer = peer = PlatformPeer(
            self._options.job,
            [self._endpoint],
            self._keys,
            session=self._session,
            lookup=partial(read_endpoint, Path(self._options.run_directory)),
        )
        peer.serve(self)
        for name in self._books.books.nodes:
            if name in existing:
                self._do(self._adopt(name, existing[name]))
            elif name in self._books.books.placed:
                self._lost(name, "its actor ended while no controller was there")
            else:
                self._begin(name)
        peer.introduce()
        self._do(self._lead_agents())
        self._do(self._watch_drains())

    async def close(self) -> None:
        """End all nodes, and give back what Ray has given. Idempotent."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        placed = [node for node in self._nodes.values() if node.placed is not None]
        ends = [asyncio.ensure_future(_answer(node.actor.end.remote())) for node in placed]
        if ends:
            await asyncio.wait(ends, timeout=self._options.grace_s + CLOSE_MARGIN_S)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.to_thread(self._cluster.release)
        if self._peer is not None:
            await self._peer.close()

    # --- commands of the controller ---------------------------------------------------------------------------------

    def describe(self) -> PlatformJoined:
        """Return what Ray can do for the job, and which nodes it has, or is looking for machines for."""
        return PlatformJoined(can_create=True, can_kill=True, nodes=self._books.books.nodes)

    def create_node(self, command: CreateNode) -> None:
        """Have Ray place one more agent. Answers with NodeRefused if it cannot."""
        if not self._ending and command.node not in self._nodes:
            self._books.add(command.node)
            self._begin(command.node)

    def delete_node(self, command: DeleteNode) -> None:
        """Ask the node's agent to exit, then end its actor. Its machine is taken again only where there is no other."""
        node = self._nodes.get(command.node)
        if node is not None and not node.deleted:
            node.deleted = True
            self._moved.set()  # it may wait for its turn
            self._books.remove(node.name)
            if node.placed is not None:
                self._books.give_back(node.placed.machine)
            self._do(self._delete(node))

    def kill_node(self, command: KillNode) -> None:
        """Kill the node's agent and everything below it."""
        node = self._nodes.get(command.node)
        if node is not None and node.placed is not None:
            node.actor.kill.remote()

    def end_job(self, command: EndJob) -> None:
        """Take note that the agents are about to exit, and tell who runs this platform."""
        self._ending = True
        self._on_end(command)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        node = self._nodes[name] = RayNode(name)
        self._do(self._create(node))

    async def _create(self, node: RayNode) -> None:
        while node.actor is None:
            async with self._placing:  # one after the other: each sees where those before it went
                self._moved.clear()
                if node.deleted:
                    del self._nodes[node.name]
                    return
                try:
                    node.actor = await asyncio.to_thread(self._start, node)
                except Exception as error:  # of Ray, whose kinds are many; the controller decides what follows
                    del self._nodes[node.name]
                    self._books.remove(node.name)
                    self._post(NodeRefused(node=node.name, reason=_first_line(error)))
                    return
            if node.actor is None:
                await self._moved.wait()
        if node.deleted:  # while Ray was asked
            del self._nodes[node.name]
            self._moved.set()
            self._discard(node)
            return
        if node.bundle is not None:
            self._books.bind(node.name, node.bundle)
        await self._watch(node)

    def _start(self, node: RayNode) -> Any:
        """Have Ray start the node's actor, and return it; None: that has to wait."""
        busy = {each.bundle for each in self._nodes.values() if each.bundle is not None}
        used = {each.placed.machine for each in self._nodes.values() if each.placed is not None}
        place = place_for(
            self._cluster.bundles(busy),
            alive=self._cluster.alive(),
            used=used,
            given_back={*self._books.books.given_back, *self._cluster.draining()},
            searching=any(each.is_searching for each in self._nodes.values()),
        )
        if place is None:
            return None
        node.bundle = getattr(place, "index", None)
        options = self._options
        logs = str(Path(options.job_directory) / "logs")
        order = NodeOrder(options.job, node.name, logs, options.grace_s, options.environment)
        return self._cluster.start(order, place)

    async def _adopt(self, name: str, actor: Any) -> None:
        node = self._nodes[name] = RayNode(name, actor, self._books.books.bundles.get(name))
        await self._watch(node)

    async def _watch(self, node: RayNode) -> None:
        """Have the agent started, and wait for its end."""
        try:
            JobKeys.add(self._options.keys, node_address(node.name))
            keys = JobKeys.load_client(self._options.keys, node_address(node.name))
            node.placed = await self._reached(lambda: node.actor.start.remote(keys, self._endpoint, self._session))
            node.bundle = node.placed.bundle
            self._moved.set()
            self._books.place(node.name)
            _log.info("%s is on %s, machine %s", node.name, node.placed.address, node.placed.machine)
            reason = await self._reached(node.actor.ended.remote)
        except Exception as error:  # of Ray and of the actor; the node is lost whatever it is
            reason = _first_line(error)
        del self._nodes[node.name]
        self._moved.set()
        self._books.remove(node.name)
        if not node.deleted:
            self._lost(node.name, reason)
            self._discard(node)

    async def _delete(self, node: RayNode) -> None:
        if node.actor is None:
            return  # it is not started any more
        try:
            if node.placed is None:
                raise self._errors.RayError("it has no machine yet")
            await within(self._options.grace_s + CLOSE_MARGIN_S, _answer(node.actor.end.remote()))
        except Exception as error:  # it is gone, or Ray cannot reach it
            _log.warning("%s does not end in order: %s", node.name, _first_line(error))
        self._discard(node)

    def _discard(self, node: RayNode) -> None:
        self._do(_in_thread(self._cluster.discard, node.actor))

    def _lost(self, name: str, reason: str) -> None:
        self._books.remove(name)
        if not self._ending:
            _log.warning("%s is lost: %s", name, reason)
            self._post(NodeLost(node=name, reason=reason, at_s=time.time()))

    def _post(self, report: Report) -> None:
        assert self._peer is not None, "what is reported is found by `open`, or after it"
        self._peer.post(report)

    async def _reached(self, ask: Callable[[], Any]) -> Any:
        """Ask an actor, again while Ray cannot reach it: that alone is no loss."""
        while True:
            try:
                return await _answer(ask())
            except self._errors.ActorUnavailableError as error:
                _log.info("an actor cannot be reached: %s", _first_line(error))
            await asyncio.sleep(AGAIN_S)

    async def _lead_agents(self) -> None:
        """Tell all agents when the controller listens elsewhere."""
        while True:
            await asyncio.sleep(LOOK_S)
            endpoint = _required_endpoint(Path(self._options.run_directory))
            if endpoint != self._endpoint:
                self._endpoint = endpoint
                for node in self._nodes.values():
                    if node.actor is not None:
                        node.actor.follow.remote(endpoint)

    async def _watch_drains(self) -> None:
        """Tell the controller of nodes whose machines Ray will take away, and of those that stay after all."""
        while True:
            await asyncio.sleep(DRAINS_S)
            try:
                draining = await asyncio.to_thread(self._cluster.draining)
            except Exception as error:  # of Ray, whose control store may be away for a while
                _log.info("Ray does not say which machines it drains: %s", _first_line(error))
                continue
            machines = {node.name: node.placed.machine for node in self._nodes.values() if node.placed is not None}
            for change in self._drains.changes(machines, draining, time.time()):
                self._post(change)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("the platform has failed to do something", exc_info=task.exception())


async def _answer(reference: Any) -> Any:
    return await reference


async def _in_thread(work: Callable[..., _T], *arguments: Any) -> None:
    await asyncio.to_thread(work, *arguments)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__


def _required_endpoint(run_directory: Path) -> str:
    endpoint = read_endpoint(run_directory)
    if endpoint is None:
        raise ConfigurationError(f"{run_directory}: no controller has said where it listens")
    return endpoint


class Books(msgspec.Struct, frozen=True):
    """Facts that outlive the platform's process, as far as Ray's control store does not keep them.

    `session`: of the last platform. `nodes`: those that were asked for and are not lost, `placed`: that have begun.

    `bundles`: the reserved places that nodes were given. `given_back`: machines that the job has left. `founded`: the
    first nodes have been asked for.
    """

    session: int = 0
    nodes: tuple[str, ...] = ()
    placed: tuple[str, ...] = ()
    bundles: dict[str, int] = {}
    given_back: tuple[str, ...] = ()
    founded: bool = False


class BookKeeper:
    """Keeps the books of one job beside its journal. Each change is durable at once. Raises ConfigurationError."""

    def __init__(self, job_directory: Path) -> None:
        self._path = job_directory / _NAME
        try:
            self.books = msgspec.json.decode(self._path.read_bytes(), type=Books)
        except FileNotFoundError:
            self.books = Books()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigurationError(f"{self._path} cannot be read: {error}") from error

    def next_session(self) -> int:
        """Return a number above that of every platform of the job before, whatever this machine's clock says."""
        session = max(time.time_ns(), self.books.session + 1)
        self._write(msgspec.structs.replace(self.books, session=session))
        return session

    def found(self, nodes: tuple[str, ...]) -> None:
        """The first nodes have been asked for."""
        self._write(msgspec.structs.replace(self.books, nodes=nodes, founded=True))

    def add(self, node: str) -> None:
        """A node has been asked for."""
        if node not in self.books.nodes:
            self._write(msgspec.structs.replace(self.books, nodes=(*self.books.nodes, node)))

    def bind(self, node: str, bundle: int) -> None:
        """A node was given a reserved place, whether it has a machine yet or not."""
        self._write(msgspec.structs.replace(self.books, bundles={**self.books.bundles, node: bundle}))

    def place(self, node: str) -> None:
        """A node's agent has been started: if the node is not there any more, it is lost."""
        if node not in self.books.placed:
            self._write(msgspec.structs.replace(self.books, placed=(*self.books.placed, node)))

    def remove(self, node: str) -> None:
        """A node is gone."""
        if node in self.books.nodes:
            nodes, placed = (
                tuple(each for each in names if each != node) for names in (self.books.nodes, self.books.placed)
            )
            bundles = {name: bundle for name, bundle in self.books.bundles.items() if name != node}
            self._write(msgspec.structs.replace(self.books, nodes=nodes, placed=placed, bundles=bundles))

    def give_back(self, machine: str) -> None:
        """The job has left a machine."""
        if machine not in self.books.given_back:
            self._write(msgspec.structs.replace(self.books, given_back=(*self.books.given_back, machine)))

    def _write(self, books: Books) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(books))
        except OSError as error:
            raise ConfigurationError(f"{self._path} cannot be written: {error}") from error
        self.books = books


class Drains:
    """Remembers which nodes the controller has been told are on machines that Ray drains. Pure."""

    def __init__(self) -> None:
        self._going: set[str] = set()

    def changes(
        self, machines: Mapping[str, str], draining: Mapping[str, float], now_s: float
    ) -> list[NodeGoing | NodeStaying]:
        """Return what is new. `machines`: by node; `draining`: until when each is there, 0 where it is not said."""
        found: list[NodeGoing | NodeStaying] = []
        for node, machine in machines.items():
            ends_s = draining.get(machine)
            if ends_s is not None and node not in self._going:
                self._going.add(node)
                found.append(NodeGoing(node, "Ray drains its machine", max(0.0, ends_s - now_s) if ends_s else None))
            elif ends_s is None and node in self._going:
                self._going.discard(node)
                found.append(NodeStaying(node))
        self._going &= machines.keys()
        return found
