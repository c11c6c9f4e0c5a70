"""Measure what a job of many nodes costs its controller: over real sockets, encrypted, with a real journal.

The controller is `midstep controller`, in a process of its own. The nodes are played, 8 ranks each, in two more
processes: each node has its own connection, key and address, sends its heartbeats, and answers for its ranks at once.
With --proxies the nodes of each process are behind so many proxies, half of them in each: a proxy has one connection,
and hands on what the nodes say as `midstep proxy` does. What nodes and proxies would say to each other is left out.
After some seconds of heartbeats alone one rank is lost; then one node; then every twelfth node at the same time.
All ranks that are left report a broken collective each time. Times are from the loss until the last rank has the order,
on the machine's one clock. The nodes use the same cores as the controller: what they take is in the times, and not in
the CPU seconds.
"""

import asyncio
import contextlib
import json
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import figures
import msgspec
import psutil
from played_nodes import BEAT, Arrivals, End, KillRank, Order, PowerOff, Seen, live
from played_rank import Setting

from midstep.benchmarks.turns import patient_policy
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.keys import JobKeys
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import NodeLost, PlatformJoined
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import PLATFORM, JobSpec, node_address

JOB = "scale"
RANKS_PER_NODE = 8
PROCESSES = 2
SHARE_LOST = 12  # one node of so many, where many are lost at once
PATIENCE_S = 600.0
HEARTBEAT_S = default_policy().heartbeat.interval_s


class Lost(msgspec.Struct, frozen=True):
    """One incident: seconds from the loss until the last rank had each order, and what it took the controller."""

    ranks_lost: int
    quiesce_s: float
    rejoin_s: float
    resume_s: float
    cpu_s: float
    generations: int  # more than one: something was too slow, and the ladder went on


class Controller:
    """The real one, in a process of its own, and the directories of its job."""

    def __init__(self, root: Path, nodes: int, spares: int, *, proxies: bool) -> None:
        self.job_directory, self.run_directory = root / "job", root / "run"
        self.job_directory.mkdir()
        self.run_directory.mkdir(mode=0o700)
        self.keys = self.run_directory / "keys"
        self.nodes = tuple(f"node{number}" for number in range(nodes + spares))
        JobKeys.create(self.keys, [PLATFORM, *map(node_address, self.nodes), *[PROXY_FAMILY] * proxies])
        directory, policy = str(self.job_directory), patient_policy(proxies=proxies)
        spec = JobSpec(
            JOB, ("t.py",), False, False, {}, directory, directory, nodes * RANKS_PER_NODE, RANKS_PER_NODE, nodes,
            spares, 0, job_settings(policy, directory),
        )  # fmt: skip
        found_journal(journal_path(self.job_directory), spec, policy)
        self.log = (root / "controller.log").open("wb")
        command = [sys.executable, "-m", "midstep.cli.main", "controller"]
        directories = ["--job-dir", directory, "--run-dir", str(self.run_directory)]
        self.process = psutil.Popen([*command, *directories], stderr=self.log)

    @property
    def cpu_s(self) -> float:
        """The processor time that it has used so far, in all its threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def memory_bytes(self) -> int:
        """Return how much of its memory is resident."""
        return int(self.process.memory_info().rss)

    async def endpoint(self) -> str:
        """Return where it listens, once it does."""
        await until(lambda: read_endpoint(self.run_directory) is not None, "the controller's endpoint")
        found = read_endpoint(self.run_directory)
        assert found is not None
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.log.close()


class Nodes:
    """The processes that play the nodes, and what has arrived in them."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._seen: list[Seen] = []
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            shares = {kind: getattr(setting, kind)[number::PROCESSES] for kind in ("nodes", "proxies")}
            own = msgspec.structs.replace(setting, **shares)
            self._processes.append(context.Process(target=live, args=(own, theirs), daemon=True))
            self._pipes.append(ours)
            self._seen.append({})
            self._processes[-1].start()

    def order(self, order: Order) -> None:
        """Have something happen in all of them."""
        for pipe in self._pipes:
            pipe.send(order)

    def arrivals(self, kind: str) -> dict[int, Arrivals]:
        """Return how many orders of a kind have arrived, by generation, and when the last one did."""
        for number, pipe in enumerate(self._pipes):
            while pipe.poll():
                self._seen[number] = pipe.recv()
        merged: dict[int, Arrivals] = {}
        for seen in self._seen:
            for (each, generation), part in seen.items():
                if each == kind:
                    whole = merged.setdefault(generation, Arrivals())
                    whole.count, whole.last_s = whole.count + part.count, max(whole.last_s, part.last_s)
        return merged

    def close(self) -> None:
        """End them."""
        self.order(End())
        for process in self._processes:
            process.join(PATIENCE_S)


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait, and give up with a word after PATIENCE_S."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise click.ClickException(f"waited {PATIENCE_S:g} s for {what}")
        await asyncio.sleep(0.02)


class Job:
    """A job that runs, and what is done to it."""

    def __init__(self, controller: Controller, nodes: Nodes, platform: ControllerLink, size: int) -> None:
        self.controller, self._nodes, self._platform, self.size = controller, nodes, platform, size
        self._lost_nodes = self._lost_ranks = 0
        self._generation = 0

    @property
    def beats(self) -> int:
        """Return how many heartbeats the nodes have sent so far."""
        return int(self._nodes.arrivals(BEAT).get(0, Arrivals()).count)

    async def started(self) -> None:
        """Wait until all ranks train."""
        await self._resumed()

    async def _resumed(self) -> None:
        last = self._generation

        def resumed() -> bool:
            whole = [g for g, each in self._nodes.arrivals("resume").items() if g > last and each.count >= self.size]
            self._generation = max(whole, default=last)
            return bool(whole)

        await until(resumed, f"the resume after generation {last}")

    async def lose_rank(self) -> Lost:
        """Kill the process of one rank, each time of another node: one rank has a budget."""
        rank = (self.size // 2 + RANKS_PER_NODE * self._lost_ranks) % self.size
        self._lost_ranks += 1
        return await self._lose(1, lambda: self._nodes.order(KillRank(rank)))

    async def lose_nodes(self, count: int) -> Lost:
        """Power off so many nodes, no two of them neighbours, and have the platform say so."""
        names = tuple(f"node{2 * number}" for number in range(self._lost_nodes, self._lost_nodes + count))
        self._lost_nodes += count

        def lose() -> None:
            self._nodes.order(PowerOff(names))
            for name in names:
                self._platform.post(NodeLost(name, "powered off", time.time()))

        return await self._lose(count * RANKS_PER_NODE, lose)

    async def _lose(self, ranks: int, lose: Callable[[], None]) -> Lost:
        before, cpu_s, began_s = self._generation, self.controller.cpu_s, time.monotonic()
        lose()
        await self._resumed()
        await asyncio.sleep(1.0)  # the last acknowledgements
        used_s = self.controller.cpu_s - cpu_s
        last = {kind: self._nodes.arrivals(kind)[self._generation].last_s - began_s for kind in ("rejoin", "resume")}
        quiesced_s = self._nodes.arrivals("quiesce")[before + 1].last_s - began_s
        return Lost(ranks, quiesced_s, last["rejoin"], last["resume"], used_s, self._generation - before)


@contextlib.asynccontextmanager
async def running(root: Path, nodes: int, spares: int, proxies: int) -> AsyncIterator[Job]:
    """Have a job of so many nodes, behind so many proxies."""
    with contextlib.ExitStack() as stack:
        controller = Controller(root, nodes, spares, proxies=proxies > 0)
        stack.callback(controller.close)
        endpoint = await controller.endpoint()
        platform = ControllerLink(
            Mailbox(job=JOB, address=PLATFORM, session=time.time_ns()),
            DealerSocket(endpoint, identity=PLATFORM, curve=JobKeys.load_client(controller.keys, PLATFORM)),
            on_command=lambda envelope: None,
            on_new_controller=lambda: None,
        )
        stack.callback(platform.close)
        platform.post(PlatformJoined(False, False, controller.nodes))
        size = nodes * RANKS_PER_NODE
        names = tuple(f"proxy{number}" for number in range(proxies))
        keys = str(controller.keys)
        setting = Setting(JOB, size, RANKS_PER_NODE, HEARTBEAT_S, endpoint, keys, controller.nodes, names)
        played = Nodes(setting)
        stack.callback(played.close)
        yield Job(controller, played, platform, size)


async def measure(root: Path, ranks: int, proxies: int, idle_s: float, repeat: int) -> dict[str, Any]:
    """Measure one size, rounded up to whole nodes."""
    nodes = -(-ranks // RANKS_PER_NODE)
    many = max(2, nodes // SHARE_LOST)
    async with running(root, nodes, many + 2 * repeat, proxies) as job:
        began_s = time.monotonic()
        await job.started()
        start_s = time.monotonic() - began_s
        await asyncio.sleep(2.0)
        cpu_s, beats, began_s = job.controller.cpu_s, job.beats, time.monotonic()
        await asyncio.sleep(idle_s)
        took_s = time.monotonic() - began_s
        busy, beats_per_s = (job.controller.cpu_s - cpu_s) / took_s, (job.beats - beats) / took_s
        row = {
            "ranks": job.size, "nodes": nodes, "proxies": proxies, "start_s": start_s, "start_cpu_s": cpu_s,
            "busy_cores": busy, "beats_per_s": beats_per_s, "memory_bytes": job.controller.memory_bytes,
        }  # fmt: skip
        print(
            f"{job.size} ranks, {nodes} nodes{f' behind {proxies} proxies' if proxies else ''}: "
            f"all train after {start_s:.1f} s; {beats_per_s:.0f} heartbeats a second take {busy:.2f} of a core; "
            f"{row['memory_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
        losses = {
            "a rank": [await job.lose_rank() for _ in range(repeat)],
            "a node": [await job.lose_nodes(1) for _ in range(repeat)],
            f"{many} nodes": [await job.lose_nodes(many)],
        }
        for kind, each in losses.items():
            print(line_of(kind, each), flush=True)
        return {**row, "losses": msgspec.to_builtins(losses)}


def line_of(kind: str, losses: list[Lost]) -> str:
    """Return medians, with least and greatest, as a line of the table."""
    names = ("quiesce_s", "rejoin_s", "resume_s", "cpu_s")
    columns = [figures.text(figures.spread([getattr(lost, name) for lost in losses])) for name in names]
    more = "" if all(lost.generations == 1 for lost in losses) else f"  {[lost.generations for lost in losses]} tries"
    return f"{kind:>12} {' '.join(f'{column:>20}' for column in columns)}{more}"


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return the power of the number of ranks with which CPU seconds grow, between the smallest and the largest."""
    first, last = rows[0], rows[-1]
    cost = [statistics.median(lost["cpu_s"] for lost in row["losses"]["a rank"]) for row in (first, last)]
    return math.log(cost[1] / cost[0]) / math.log(last["ranks"] / first["ranks"])


@click.command(help=__doc__)
@click.option("--ranks", "sizes", default="80,1000,4000", show_default=True, help="Sizes of the job.")
@click.option(
    "--proxies",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Proxies that nodes are behind; 0: each node has its own connection.",
)
@click.option("--idle", "idle_s", default=10.0, show_default=True, help="Seconds of heartbeats alone.")
@click.option("--repeat", default=3, show_default=True, help="Losses of a rank and of a node.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures to FILE.")
def main(sizes: str, proxies: int, idle_s: float, repeat: int, path: Path | None) -> None:
    """Measure all sizes; print a table, and write JSON where it is asked for."""
    if 0 < proxies < PROCESSES:
        raise click.UsageError(
            f"each of the {PROCESSES} processes that play nodes needs a proxy: --proxies {PROCESSES}"
        )
    print("seconds until the last rank has the order, and CPU seconds of the controller: median (least-greatest)")
    print(f"{'lost':>12} {'Quiesce':>20} {'Rejoin':>20} {'Resume':>20} {'CPU':>20}")
    rows: list[dict[str, Any]] = []
    for size in map(int, sizes.split(",")):
        root = Path(tempfile.mkdtemp(prefix="ms-"))
        try:
            rows.append(asyncio.run(measure(root, size, proxies, idle_s, repeat)))
        except click.ClickException as failed:
            raise click.ClickException(f"{failed}; its controller said last:\n{last_of(root)}") from failed
        finally:
            shutil.rmtree(root)
    if len(rows) > 1:
        print(f"CPU of a lost rank grows with the power {exponent(rows):.2f} of the ranks")
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rows": rows}, indent=2) + "\n")


def last_of(root: Path) -> str:
    """Return the last lines of the controller's log."""
    return "\n".join((root / "controller.log").read_text(errors="replace").splitlines()[-5:])


if __name__ == "__main__":
    main()
