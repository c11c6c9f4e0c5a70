"""Controllers of a job on a volume of several machines: real processes that are killed, frozen and promoted.

The API server that keeps their Lease, agents and processors are played.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.election.presence import controllers_on_volume
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.volume_place import folder_in
from midstep.controller.journal.volume_store import submit
from midstep.policies.schema import default_policy
from midstep.protocol.incidents import ControllerPhase, JobStatus, Outcome
from midstep.protocol.types import JobSpec

from ...contract.kubernetes.api_server import ApiThread, lease
from .conftest import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NAME = "midstep-demo"
LEAST_CONTROLLERS = 5
MOST_CONTROLLERS = 60

# A controller that kills itself when its first news of the job are durable and nothing has followed from them yet, or
# when all has followed from them and the next are about to be written.
DYING = """
import os, signal, sys
from midstep.cli.main import main
from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.journal.journal import Journal
from midstep.protocol.messages import NodeJoined

append, written, when = Journal.append, [], sys.argv.pop(1)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying(self, entries, at_s):
    news = [entry for entry in entries if not isinstance(entry.event, ControllerStarted | NodeJoined)]
    if news and written:
        die()
    fresh = append(self, entries, at_s)
    written.extend(news)
    if written and when == "after":
        die()
    return fresh

Journal.append = dying
main()
"""


class SharedCluster(Cluster):
    """A job whose journal is in its directory, with controllers that a Lease elects."""

    def __init__(self, server: ApiThread) -> None:
        self._server = server
        self.dies = ""
        super().__init__()

    @property
    def folder(self) -> Path:
        """Where the journal is."""
        return folder_in(self.job_directory)

    def found(self, job: JobSpec) -> None:
        submit(self.folder, job, default_policy())

    def command(self, *options: str) -> list[str]:
        directories = ["--job-dir", str(self.job_directory), "--run-dir", str(self.run_directory)]
        where = ["--store", f"kubernetes:///{NAME}?journal={self.folder}", "--job", "demo", "--keys", str(self.keys)]
        start = ["-m", "midstep.cli.main"] if not self.dies else ["-c", DYING, self.dies]
        return [sys.executable, *start, "controller", *directories, *where, *options]

    def status(self) -> JobStatus:
        return read_status(self.folder)

    def leader(self) -> str:
        """Return the name of the controller that says that it leads."""
        return next((each.name for each in controllers_on_volume(self.folder) if each.phase is ControllerPhase.HOT), "")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedCluster]:
    server = ApiThread(tmp_path)
    server.api.put("leases", lease(NAME))
    monkeypatch.setenv("KUBECONFIG", str(server.config))
    made = SharedCluster(server)
    try:
        yield made
    finally:
        made.close()
        server.close()


def test_a_standby_takes_over_from_a_leader_that_is_killed_and_from_one_that_is_frozen(cluster: SharedCluster) -> None:
    """The one that was frozen says that it is not in service, and leaves."""
    cluster.start()
    cluster.start_controller("--standby", "--name", "second")
    cluster.until(lambda: len(controllers_on_volume(cluster.folder)) == 2)
    cluster.host(1).kill(1)
    cluster.controllers[0].kill()
    cluster.until(lambda: cluster.leader() == "second" and cluster.recovered() and cluster.phase() == "running")
    cluster.start_controller("--standby", "--name", "third")
    cluster.until(lambda: any(each.name == "third" for each in controllers_on_volume(cluster.folder)))
    os.kill(cluster.controllers[1].pid, signal.SIGSTOP)
    cluster.until(lambda: cluster.leader() == "third" and cluster.phase() == "running")
    os.kill(cluster.controllers[1].pid, signal.SIGCONT)
    cluster.until(lambda: cluster.controllers[1].poll() is not None)
    assert cluster.controllers[1].poll() == 70, cluster.said()
    status = cluster.status()
    assert status.term == 3
    assert [incident.outcome for incident in status.incidents] == [Outcome.RESUMED]
    assert cluster.starts() == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)]


@pytest.mark.soak
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_incident_is_finished_by_controllers_that_are_killed_at_every_record(
    cluster: SharedCluster, when: str
) -> None:
    """They have one name, as in a container that is started again: each takes the Lease of the last one at once."""
    cluster.start()
    cluster.kill_controller()
    cluster.dies = when
    cluster.host(1).kill(1)
    while not cluster.recovered():
        assert len(cluster.controllers) < MOST_CONTROLLERS
        cluster.start_controller("--standby", "--name", "pod")
        cluster.until(lambda: cluster.controllers[-1].poll() is not None or cluster.recovered())
        assert cluster.controllers[-1].poll() in {None, -signal.SIGKILL}, cluster.said()
    assert len(cluster.controllers) >= LEAST_CONTROLLERS

    cluster.kill_controller()
    cluster.dies = ""
    cluster.start_controller("--standby", "--name", "pod")
    cluster.until(lambda: cluster.phase() == "running")
    status = cluster.status()
    assert [incident.outcome for incident in status.incidents] == [Outcome.RESUMED]
    assert cluster.starts() == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)]
    assert {use.name: use.used for use in status.budgets}["recover_in_place per job"] == 1
    assert len({rank.committed for rank in cluster.ranks().values()}) == 1
