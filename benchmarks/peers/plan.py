"""The answer of a peer's file when it is asked how a trial is started."""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from . import schedule
from .kinds import Fault, Setting, Trial
from .marks import NODE

JOB = str(Path(__file__).parent / "train" / "job.py")
HOST = "127.0.0.1"
STORE = (
    "import sys, time, torch.distributed as dist; "
    "store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False); "
    "time.sleep(1e6)"
)
RESTARTS_A_FAULT = 3  # a restart can fail
# Without it ranks that torchrun of torch 2.13 has restarted read the addresses of the dead ones. torchft fails with it.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Program(NamedTuple):
    """One process to start. Its environment is added to that of the benchmark."""

    command: list[str]
    environment: Mapping[str, str] = {}
    port: int = 0  # on which it listens once it can be used, if it is a server
    of_node: bool = False  # it is started again when its node is lost


class Plan(NamedTuple):
    """The processes of a trial: servers are there before the launchers, and are ended after them."""

    launchers: Sequence[Program]
    servers: Sequence[Program] = ()


class Start(NamedTuple):
    """A trial that is about to start: where its notes go, and where the programs of the peers' environment are."""

    trial: Trial
    notes: Path
    programs: Path

    @property
    def tuned(self) -> bool:
        """Return whether the peer is set up by somebody who knows it."""
        return self.trial.setting is Setting.TUNED

    def program(self, name: str) -> str:
        """Return the path of a program."""
        return str(self.programs / name)

    def script(self) -> list[str]:
        """Return the script under measurement with its arguments."""
        planned = msgspec.json.encode(schedule.of(self.trial)).decode()
        return [JOB, self.trial.peer, str(self.notes), planned, self.trial.setting.value]

    def restarts(self, usual: int) -> str:
        """Return how often a launcher may start its processes again: no schedule runs out of it."""
        return str(max(usual, RESTARTS_A_FAULT * len(schedule.of(self.trial).faults)))

    def on_node(self, node: int, command: list[str], environment: Mapping[str, str]) -> Program:
        """Return the launcher of a node; with several nodes one can be lost, and is started again."""
        if self.trial.nodes == 1:
            return Program(command, environment)
        return Program(command, {**environment, NODE: f"{self.notes}/{node}"}, of_node=True)

    def elastic(self, launcher: list[str], flags: list[str], environment: Mapping[str, str], *, quick: bool) -> Plan:
        """Return a launcher of torchrun's kind on each node. `quick`: they notice early that one is gone."""
        nodes = self.trial.nodes
        if nodes == 1:
            size = ["--standalone", "--nproc-per-node", str(self.trial.ranks)]
            return Plan([Program([*launcher, *size, *flags, *self.script()], environment)])
        port = free_port()
        size = ["--nnodes", str(nodes), "--nproc-per-node", str(self.trial.ranks // nodes), "--local-addr", HOST]
        conf = "is_host=0" + (",keep_alive_interval=1" if quick else "")
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:{port}", "--rdzv-id", "peers"]
        command = [*launcher, *size, *meet, "--rdzv-conf", conf, *flags, *self.script()]
        return Plan([self.on_node(node, command, environment) for node in range(nodes)], [self.store(port)])

    def store(self, port: int) -> Program:
        """Return a store of torch's that outlives every rank and node."""
        return Program([self.program("python"), "-c", STORE, HOST, str(port)], port=port)

    def torchrun(self, *flags: str, ranks: int | None = None) -> list[str]:
        """Return a command of torchrun on one node, for all ranks unless told otherwise."""
        size = ["--standalone", "--nproc-per-node", str(ranks or self.trial.ranks)]
        return [self.program("python"), "-m", "torch.distributed.run", *size, *flags, *self.script()]


class Peer(NamedTuple):
    """The facts about a peer before it runs."""

    title: str
    requirements: tuple[tuple[str, ...], ...]  # arguments of pip, a call for each, beyond torch and midstep
    plan: Callable[[Start], Plan]
    cannot: Mapping[tuple[Setting, Fault], str] = {}  # what is not tried, and why


def free_port() -> int:
    """Return a port that was free right now."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
