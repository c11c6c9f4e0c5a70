"""Nodes of a job as its controller sees them: one connection each, and ranks that answer every order at once.

A node behind a proxy has the same link, and no connection of its own (`played_proxy.py`).

Sockets, keys, envelopes, numbers and acknowledgements are the product's own, through the agents' own link. Only what
they say is played (`played_rank.py`), and how ranks and agent hear each other inside a node: what is said to the
controller is the same, and the cores that it shares with these nodes have less to do. Many live in one process.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import msgspec
import zmq
from played_proxy import PlayedProxy
from played_rank import PlayedRank, Setting, answers_of

from midstep.agent.heartbeat import clocks_every_s
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.keys import JobKeys
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Envelope,
    NodeHeartbeat,
    NodeJoined,
    OrderRanks,
    ProbeProgress,
    ProcessesStarted,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    RankReport,
    RanksReported,
    StartProcesses,
    StopProcess,
)
from midstep.protocol.nonblocking import Context
from midstep.protocol.rank_relay import gathering_of
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import (
    RankProgress,
    StoreEndpoint,
    node_address,
)

SIGKILL = -9
SOCKETS_EACH = 4
TELL_EVERY_S = 0.05
BEAT = "beat"  # beside the kinds of orders in what was seen, of generation 0


class KillRank(msgspec.Struct, frozen=True, tag=True):
    """One rank ends, and all others of its generation report a broken collective."""

    rank: int


class PowerOff(msgspec.Struct, frozen=True, tag=True):
    """These nodes are gone without a word; the ranks of all others report a broken collective."""

    nodes: tuple[str, ...]


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave."""


Order = KillRank | PowerOff | End


class Arrivals(msgspec.Struct):
    """Orders of one kind and generation: how many have arrived so far, and when the last one did (monotonic clock)."""

    count: int = 0
    last_s: float = 0.0


Seen = dict[tuple[str, int], Arrivals]


class PlayedNode:
    """The agent of a node, with the real link to the controller."""

    def __init__(self, name: str, setting: Setting, socket: DealerSocket, saw: Callable[[str, int], None]) -> None:
        address = node_address(name)
        self.name = name
        self._saw = saw
        self.ranks: dict[int, PlayedRank] = {}
        self._setting = setting
        mailbox = Mailbox(job=setting.job, address=address, session=time.time_ns())
        self._gather_s = gathering_of(setting.world_size)
        self._clocks_s = clocks_every_s(setting.world_size, setting.heartbeat_s)
        self._next_clocks_s = time.monotonic() + random.random() * (self._clocks_s - setting.heartbeat_s)
        self._started: list[PlayedRank] = []  # and have not joined yet
        self._link = ControllerLink(
            mailbox,
            socket,
            on_command=self._obey,
            on_new_controller=lambda: None,  # there is one, which hears of the node at its start
        )
        self._link.expect_ranks(setting.world_size)
        self._join()

    def complain(self) -> None:
        """Have all ranks report a broken collective."""
        self._report([rank.complaint() for rank in self.ranks.values()])

    def beat(self) -> None:
        """Show that the node lives, and where its ranks are as often as an agent does."""
        now = time.monotonic()
        if now < self._next_clocks_s:
            self._link.sign()
            return
        self._next_clocks_s = now + self._clocks_s - self._setting.heartbeat_s / 2
        self._link.post(NodeHeartbeat(self.name, time.time(), self._clocks()), reliable=False)

    def kill(self, rank: int) -> None:
        """Have the process of a rank end."""
        killed = self.ranks.pop(rank)
        self._link.post(ProcessExited(self.name, killed.running, SIGKILL, time.time(), expected=False))

    def close(self) -> None:
        """Be gone."""
        self.ranks.clear()
        self._link.close()

    def _clocks(self) -> tuple[RankProgress, ...]:
        return tuple(rank.progress() for rank in self.ranks.values())

    def _join(self) -> None:
        running = tuple(rank.running for rank in self.ranks.values())
        self._link.post(NodeJoined(self.name, self.name, StoreEndpoint("127.0.0.1", 1), running))

    def _report(self, reports: list[RankReport]) -> None:
        """Say in one message what ranks say at about one time, as the agents' own relay does."""
        if reports:
            self._link.post(RanksReported(self.name, tuple(reports)))

    def _join_ranks(self) -> None:
        started, self._started = self._started, []
        self._report([each.joined() for each in started if each in self.ranks.values()])

    def _obey(self, envelope: Envelope) -> None:
        match envelope.body:
            case OrderRanks() as message:
                for order in message.orders:
                    self._saw(type(order.command).__name__.lower(), order.generation)
                self._report(answers_of(self.ranks, message))
            case StartProcesses(starts=starts):
                ranks = [PlayedRank(start, self._setting, self.name) for start in starts]
                for rank in ranks:
                    self._saw("start", rank.generation)
                self.ranks.update((rank.running.rank, rank) for rank in ranks)
                started = tuple(ProcessStarted(self.name, rank.running, warm=True) for rank in ranks)
                self._link.post(ProcessesStarted(self.name, started))
                if not self._started:
                    asyncio.get_running_loop().call_later(self._gather_s, self._join_ranks)
                self._started += ranks
            case StopProcess(rank=number) if number in self.ranks:
                stopped = self.ranks.pop(number)
                self._link.post(ProcessExited(self.name, stopped.running, SIGKILL, time.time(), expected=True))
            case ProbeProgress(probe=probe):
                self._link.post(ProgressReported(self.name, probe, time.time(), self._clocks()))


def connections(setting: Setting) -> Iterator[DealerSocket]:
    """Yield a socket for each node, in their order: of its own, or to one of the proxies by turns."""
    if setting.proxies:
        keys = JobKeys.load_client(setting.keys, PROXY_FAMILY)
        proxies = itertools.cycle([PlayedProxy(name, setting.endpoint, keys) for name in setting.proxies])
        yield from (next(proxies).connection(node_address(name)) for name in setting.nodes)
        return
    context = Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * len(setting.nodes) + SOCKETS_EACH)
    for name in setting.nodes:
        address = node_address(name)
        endpoint, curve = _from_own_address(name, setting.endpoint), JobKeys.load_client(setting.keys, address)
        yield DealerSocket(endpoint, identity=address, curve=curve, context=context)


def _from_own_address(name: str, endpoint: str) -> str:
    """Return an endpoint that is connected to from another loopback address for each node, as machines have them."""
    number = int(name.removeprefix("node"))
    return endpoint.replace("//", f"//127.1.{number // 250}.{number % 250 + 1}:0;")


class _Nodes:
    """All nodes of one process."""

    def __init__(self, setting: Setting, orders: Connection) -> None:
        self._orders, self._heartbeat_s = orders, setting.heartbeat_s
        self._seen: Seen = {}
        self._told = True
        sockets = zip(setting.nodes, connections(setting), strict=True)
        self._nodes = {name: PlayedNode(name, setting, socket, self._saw) for name, socket in sockets}
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(orders.fileno(), self._obey)

    async def live(self) -> None:
        """Beat and tell what was seen, until the order to end."""
        tasks = [asyncio.create_task(each()) for each in (self._beat, self._tell)]
        await self._ended.wait()
        for task in tasks:
            task.cancel()
        for node in self._nodes.values():
            node.close()

    def _saw(self, kind: str, generation: int) -> None:
        arrivals = self._seen.setdefault((kind, generation), Arrivals())
        arrivals.count += 1
        arrivals.last_s = time.monotonic()
        self._told = False

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            if not self._told:
                self._told = True
                self._orders.send(self._seen)

    async def _beat(self) -> None:
        """Spread the heartbeats over their interval, as those of nodes that started at different times are."""
        while True:
            nodes = list(self._nodes.values())
            began_s = time.monotonic()
            for done, node in enumerate(nodes, start=1):
                node.beat()
                self._saw(BEAT, 0)
                early_s = began_s + self._heartbeat_s * done / len(nodes) - time.monotonic()
                if early_s > 0.005:  # not for each of many
                    await asyncio.sleep(early_s)
            await asyncio.sleep(max(0.0, began_s + self._heartbeat_s - time.monotonic()))

    def _obey(self) -> None:
        try:
            order: Order = self._orders.recv()
        except EOFError:  # the benchmark was killed
            order = End()
        match order:
            case KillRank(rank=rank):
                for node in self._nodes.values():
                    if rank in node.ranks:
                        node.kill(rank)
            case PowerOff(nodes=names):
                for name in names:
                    if name in self._nodes:
                        self._nodes.pop(name).close()
            case End():
                self._ended.set()
                return
        for node in self._nodes.values():
            node.complain()


def live(setting: Setting, orders: Connection) -> None:
    """Be all nodes of `setting` until told to end. The main function of a process."""

    async def run() -> None:
        await _Nodes(setting, orders).live()

    asyncio.run(run())
