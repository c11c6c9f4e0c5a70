"""Measure what an incident and a heartbeat cost the controller's thread: real driver, wire and journal, no sockets.

Nodes are played in the same process (`played_rank.py`), and only what the driver's turns take is counted, in CPU time
of the thread. So it can be compared on a machine with other programs at work, where `scale.py` needs one for itself. A
rank is lost, all others report a broken collective, quiesce, rejoin, resume and commit. Left out: encryption, the
front, the kernel, and what waking up for a frame costs.
"""

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import figures
import msgspec
from played_rank import PlayedRank, Setting, answers_of

from midstep.controller.driver import Driver
from midstep.controller.endpoints.local_sockets import ControlServer
from midstep.controller.enroller import open_wire
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.liveness import Liveness, ProgressBoard
from midstep.controller.routes import Routes
from midstep.policies.rules import job_settings
from midstep.policies.schema import Policy, default_policy
from midstep.protocol.codec import encode, envelopes_of, pack
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Envelope,
    NodeHeartbeat,
    NodeJoined,
    NodeReport,
    OrderRanks,
    ProcessesStarted,
    ProcessExited,
    ProcessStarted,
    RankReport,
    RanksReported,
    Report,
    StartProcesses,
)
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import CONTROLLER, JobSpec, StoreEndpoint, node_address

RANKS_PER_NODE = 8
BEATS = 20
SIGKILL = -9
LONG_S = 3600.0


def patient_policy(*, proxies: bool = False) -> Policy:
    """Return the default policy without its haste: nodes are played where the controller runs, and may send no word.

    `proxies`: may speak for them.
    """
    policy = default_policy()
    deadlines = msgspec.structs.replace(
        policy.deadlines, quiesce_s=LONG_S, rejoin_s=LONG_S, first_step_s=LONG_S, start_s=LONG_S, nodes_s=LONG_S
    )
    heartbeat = msgspec.structs.replace(policy.heartbeat, missed=round(LONG_S / policy.heartbeat.interval_s))
    controller = msgspec.structs.replace(policy.controller, proxies=proxies)
    return msgspec.structs.replace(policy, deadlines=deadlines, heartbeat=heartbeat, controller=controller)


class Router:
    """Stands for the controller's socket: what has arrived, and what was sent."""

    endpoint = ""

    def __init__(self, descriptor: int) -> None:
        self.arrived: list[Received] = []
        self.sent: list[tuple[str, bytes]] = []
        self.refused: Counter[str] = Counter()
        self._descriptor = descriptor

    @property
    def pending(self) -> bool:
        """Return whether something is to be read."""
        return bool(self.arrived)

    def fileno(self) -> int:
        """Return a descriptor that is never ready."""
        return self._descriptor

    def knows(self, identity: str) -> bool:
        """Every node is there."""
        return True

    def receive(self, limit: int) -> list[Received]:
        """Return what has arrived."""
        batch, self.arrived = self.arrived[:limit], self.arrived[limit:]
        return batch

    def send(self, identity: str, data: bytes) -> bool:
        """Keep it for the node."""
        self.sent.append((identity, data))
        return True


class NoOperators:
    """Stands for the control socket, at which nobody asks."""

    pending = False

    def __init__(self, descriptor: int) -> None:
        self.refused: Counter[str] = Counter()
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return a descriptor that is never ready."""
        return self._descriptor

    def requests(self) -> Iterator[Any]:
        """Yield no request."""
        return iter(())


class Node:
    """An agent, and the ranks of its node, which answer at once. What they say in a turn is a frame."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.address, self.ranks = name, node_address(name), dict[int, PlayedRank]()
        self._setting = setting
        self._mailbox = Mailbox(job=setting.job, address=self.address, session=1)
        self._mailbox.expect_ranks(setting.world_size)
        self._said: list[RankReport] = []
        self._leaving: list[bytes] = []

    def send(self, envelope: Envelope) -> None:
        """Let an envelope leave with the others of this turn."""
        self._leaving.append(encode(envelope))

    def complain(self) -> None:
        """Have all ranks report a broken collective."""
        self._said += [rank.complaint() for rank in self.ranks.values()]

    def say(self, report: Report | NodeReport, *, reliable: bool = True) -> None:
        """Report in the agent's own name."""
        self.send(self._mailbox.post(report, CONTROLLER, time.monotonic(), reliable=reliable))

    def take(self, frame: bytes) -> None:
        """Take in what has come, and let the ranks answer."""
        for envelope in envelopes_of(frame):
            taken = self._mailbox.take(envelope, time.monotonic())
            if taken.deliver:
                self.send(self._mailbox.acknowledge(envelope))
                self._obey(envelope)

    def _obey(self, envelope: Envelope) -> None:
        match envelope.body:
            case OrderRanks() as message:
                self._said += answers_of(self.ranks, message)
            case StartProcesses(starts=starts):
                ranks = [PlayedRank(order, self._setting, self.name) for order in starts]
                self.ranks.update((rank.running.rank, rank) for rank in ranks)
                started = tuple(ProcessStarted(self.name, rank.running, warm=True) for rank in ranks)
                self.say(ProcessesStarted(self.name, started))
                self._said += [rank.joined() for rank in ranks]

    def frames(self) -> Iterator[Received]:
        """Yield what leaves."""
        said, self._said = self._said, []
        if said:
            self.say(RanksReported(self.name, tuple(said)))
        leaving, self._leaving = self._leaving, []
        return (Received(self.address, self.address, frame) for frame in pack(leaving))


class Job:
    """A controller without sockets, and the nodes of its job."""

    def __init__(self, root: Path, nodes: int, policy: Policy) -> None:
        self.size = nodes * RANKS_PER_NODE
        spec = JobSpec(
            "turns", ("t.py",), False, False, {}, str(root), str(root), self.size, RANKS_PER_NODE, nodes, 0, 0,
            job_settings(policy, str(root)),
        )  # fmt: skip
        found_journal(journal_path(root), spec, policy)
        JobKeys.create(root, [])
        self._journal = open_sqlite(journal_path(root))
        setting = Setting("turns", self.size, RANKS_PER_NODE, policy.heartbeat.interval_s, "", "", ())
        self.nodes = {node_address(name): Node(name, setting) for name in (f"node{n}" for n in range(nodes))}
        self._pipe = os.pipe()
        self._router, liveness, routes = Router(self._pipe[0]), Liveness(policy.heartbeat), Routes()
        mailbox = Mailbox(
            job="turns", address=CONTROLLER, session=self._journal.session, capacity=20_000 + 4 * self.size
        )
        mailbox.term = self._journal.term
        mailbox.expect_ranks(self.size)
        wire, enroller = open_wire(
            cast(RouterSocket, self._router), mailbox, routes,
            liveness=liveness, world_size=self.size, keys=root, platform="",
        )  # fmt: skip
        self._machine = self._journal.founding.machine()
        self._driver = Driver(
            machine=self._machine, journal=self._journal, wire=wire, routes=routes,
            board=ProgressBoard(world_size=self.size), liveness=liveness, enroller=enroller,
            control=cast(ControlServer, NoOperators(self._pipe[0])), job_directory=root,
        )  # fmt: skip
        self._driver.begin()
        for node in self.nodes.values():
            node.say(NodeJoined(node.name, node.name, StoreEndpoint("127.0.0.1", 1), ()))
        self.start_cpu_s = self.settle()

    def settle(self) -> float:
        """Let all answer each other until there is nothing more to say; return the CPU seconds of the turns."""
        cpu_s, quiet = 0.0, False
        while not quiet:
            self._router.arrived += [frame for node in self.nodes.values() for frame in node.frames()]
            quiet = not self._router.arrived
            gc.disable()  # it would go through the nodes' objects as well
            began_s = time.thread_time()
            self._driver.turn()
            cpu_s += time.thread_time() - began_s
            gc.enable()
            sent, self._router.sent = self._router.sent, []
            for identity, frame in sent:
                self.nodes[identity].take(frame)
            quiet = quiet and not sent
        if not self._machine.is_quiet:
            raise click.ClickException(f"the job does not run, it is {self._machine.phase}")
        return cpu_s

    def lose(self, rank: int) -> float:
        """Kill a rank's process; return the CPU seconds until all train again."""
        node = next(node for node in self.nodes.values() if rank in node.ranks)
        killed = node.ranks.pop(rank)
        node.say(ProcessExited(node.name, killed.running, SIGKILL, time.time(), expected=False))
        for each in self.nodes.values():
            each.complain()
        return self.settle()

    def beat(self) -> float:
        """Let every node say that it lives; return the CPU seconds."""
        for node in self.nodes.values():
            clocks = tuple(rank.progress() for rank in node.ranks.values())
            node.say(NodeHeartbeat(node.name, time.time(), clocks), reliable=False)
        return self.settle()

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
        for descriptor in self._pipe:
            os.close(descriptor)


def measure(ranks: int, repeat: int) -> dict[str, Any]:
    """Measure one size, rounded up to whole nodes."""
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    try:
        job = Job(root, -(-ranks // RANKS_PER_NODE), patient_policy())
        try:
            losses = [job.lose((job.size // 2 + RANKS_PER_NODE * number) % job.size) for number in range(repeat)]
            beats = [job.beat() for _ in range(BEATS)]
        finally:
            job.close()
    finally:
        shutil.rmtree(root)
    heartbeat_us = 1e6 * statistics.median(beats) / len(job.nodes)
    return {"ranks": job.size, "start_cpu_s": job.start_cpu_s, "incident_cpu_s": losses, "heartbeat_us": heartbeat_us}


@click.command(help=__doc__)
@click.option("--ranks", "sizes", default="80,1000,4000,10000", show_default=True, help="Sizes of the job.")
@click.option("--repeat", default=3, show_default=True, help="Losses of a rank.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures to FILE.")
def main(sizes: str, repeat: int, path: Path | None) -> None:
    """Measure all sizes; print a table, and write JSON where it is asked for."""
    columns = ("CPU s of the start", "CPU s of an incident, median (least-greatest)", "us per rank", "us per heartbeat")
    print(f"{'ranks':>8} {columns[0]:>19} {columns[1]:>46} {columns[2]:>12} {columns[3]:>17}")
    rows = []
    for size in map(int, sizes.split(",")):
        rows.append(row := measure(size, repeat))
        spread = figures.text(figures.spread(row["incident_cpu_s"]))
        per_rank_us = 1e6 * statistics.median(row["incident_cpu_s"]) / row["ranks"]
        beat_us = row["heartbeat_us"]
        start_s = row["start_cpu_s"]
        print(f"{row['ranks']:>8} {start_s:>19.2f} {spread:>46} {per_rank_us:>12.0f} {beat_us:>17.0f}", flush=True)
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
