"""How long a job is without a controller when the one that leads dies or freezes, and another one stands by.

    python benchmarks/failover.py [--repeats 5] [--store etcd://HOST:PORT] [--json FILE]

Two real controllers of one job, elected by a file or by the etcd that --store names, and one played agent with the
real link. The one that leads is killed (SIGKILL) or frozen (SIGSTOP), and the time is taken until the agent has the
first command of the next one, which has decided something by then. A frozen one is woken up afterwards, and has to
leave. The goal is a lease and 0.2 s.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from midstep.controller.election.file_election import LEASE_S
from midstep.controller.election.presence import controllers_in_etcd, controllers_of_host
from midstep.controller.etcd.place import parse_place
from midstep.controller.journal.etcd_store import submit
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.incidents import ControllerPhase
from midstep.protocol.keys import JobKeys
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Envelope, NodeHeartbeat, NodeJoined
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import JobSpec, StoreEndpoint, node_address

GOAL_S = LEASE_S + 0.2
PATIENCE_S = 60.0
HEARTBEAT_S = 0.5
NODE = "node0"
KINDS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


class Job:
    """The directories of a job, and its controllers."""

    def __init__(self, root: Path, store: str | None) -> None:
        self._place = None if store is None else parse_place(store, f"failover-{secrets.token_hex(4)}")
        self._store = store
        self.job_directory, self.run_directory = root / "job", root / "run"
        self.job_directory.mkdir()
        self.run_directory.mkdir(mode=0o700)
        self.keys = self.run_directory / "keys"
        JobKeys.create(self.keys, [node_address(NODE), "platform"])
        directory = str(self.job_directory)
        settings = job_settings(default_policy(), directory)
        spec = JobSpec(self.name, ("t.py",), False, False, {}, directory, directory, 1, 1, 1, 0, 0, settings)
        if self._place is None:
            found_journal(journal_path(self.job_directory), spec, default_policy())
        else:
            submit(self._place, spec, default_policy())
        self.log = (root / "controllers.log").open("wb")
        self.controllers: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def name(self) -> str:
        """The name of the job."""
        return "failover" if self._place is None else self._place.job

    def start(self) -> None:
        """Start one more controller, which stands by if another one leads."""
        directories = ["--job-dir", str(self.job_directory), "--run-dir", str(self.run_directory)]
        command = [sys.executable, "-m", "midstep.cli.main", "controller", *directories, "--standby"]
        if self._store is not None:
            command += ["--store", self._store, "--job", self.name, "--keys", str(self.keys)]
        process = subprocess.Popen(command, stderr=self.log)
        self.controllers[process.pid] = process

    def phases(self) -> dict[ControllerPhase, int]:
        """Return the process id of a controller in each phase."""
        known = controllers_of_host(self.run_directory) if self._place is None else controllers_in_etcd(self._place)
        return {each.phase: each.pid for each in known if self.controllers[each.pid].poll() is None}

    def close(self) -> None:
        """End all controllers."""
        for process in self.controllers.values():
            process.kill()
            process.wait(PATIENCE_S)
        self.log.close()


class Agent:
    """Hears the controllers as an agent does, and notes which term it was told something in, and when."""

    def __init__(self, job: Job, endpoint: str) -> None:
        address = node_address(NODE)
        self.heard: dict[int, float] = {}  # by term: the first command
        self._link = ControllerLink(
            Mailbox(job=job.name, address=address, session=time.time_ns()),
            DealerSocket(endpoint, identity=address, curve=JobKeys.load_client(job.keys, address)),
            on_command=self._take,
            on_new_controller=self._join,
            lookup=partial(read_endpoint, job.run_directory),
        )
        self._join()

    async def live(self) -> None:
        """Show signs of life."""
        while True:
            self._link.post(NodeHeartbeat(NODE, time.time(), ()), reliable=False)
            await asyncio.sleep(HEARTBEAT_S)

    def close(self) -> None:
        """Hear nothing more."""
        self._link.close()

    def _join(self) -> None:
        self._link.post(NodeJoined(NODE, NODE, StoreEndpoint("127.0.0.1", 1)))

    def _take(self, envelope: Envelope) -> None:
        self.heard.setdefault(envelope.term, time.perf_counter())


async def until(holds: Any, what: str) -> None:
    """Wait, and give up with a word after PATIENCE_S."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"waited {PATIENCE_S:g} s for {what}")
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(root: Path, store: str | None) -> AsyncIterator[tuple[Job, Agent]]:
    """Have a job with a leader, and an agent that it has ordered to do something."""
    job = Job(root, store)
    try:
        job.start()
        await until(lambda: ControllerPhase.HOT in job.phases(), "a leader")
        endpoint = read_endpoint(job.run_directory)
        assert endpoint is not None
        agent = Agent(job, endpoint)
        living = asyncio.create_task(agent.live())
        try:
            await until(lambda: agent.heard, "the first command")
            yield job, agent
        finally:
            living.cancel()
            agent.close()
    finally:
        job.close()


async def failover(job: Job, agent: Agent, number: signal.Signals) -> float:
    """Have the leader killed or frozen, and return the time until the next one has ordered something."""
    job.start()
    await until(lambda: {*job.phases()} >= {ControllerPhase.HOT, ControllerPhase.COLD}, "a standby")
    await asyncio.sleep(1.0)  # it has long been there
    leader, term = job.controllers[job.phases()[ControllerPhase.HOT]], max(agent.heard)
    began_s = time.perf_counter()
    leader.send_signal(number)
    await until(lambda: max(agent.heard) > term, "the next term")
    took_s = agent.heard[max(agent.heard)] - began_s
    if number is signal.SIGSTOP:
        leader.send_signal(signal.SIGCONT)
    await until(lambda: leader.poll() is not None, "the end of the last leader")
    return took_s


async def measure(repeats: int, store: str | None) -> dict[str, list[float]]:
    """Measure all kinds, in turn."""
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    try:
        async with running(root, store) as (job, agent):
            taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(repeats):
                for kind, number in KINDS.items():
                    taken[kind].append(await failover(job, agent, number))
            return taken
    finally:
        shutil.rmtree(root)


def main() -> int:
    """Print a table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--store", metavar="URL", help="an etcd, which is to be running")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    taken = asyncio.run(measure(options.repeats, options.store))
    print(f"lease {LEASE_S:g} s, goal {GOAL_S:g} s; seconds from the signal to the next leader's first command")
    for kind, values in taken.items():
        print(f"{kind:>8} {statistics.median(values):6.3f} ({min(values):.3f}-{max(values):.3f})")
    if options.json is not None:
        options.json.write_text(json.dumps({"lease_s": LEASE_S, "goal_s": GOAL_S, "seconds": taken}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
