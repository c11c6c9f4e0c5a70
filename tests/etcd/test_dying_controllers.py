"""Controllers that are killed around every record that they write into etcd: the incident is finished all the same.

The controllers and etcd are real, agents and processors are played.
"""

import signal
import sys
from collections.abc import Iterator

import pytest

from midstep.controller.etcd.place import EtcdPlace
from midstep.controller.journal.etcd_store import submit
from midstep.controller.journal.reading import read_status
from midstep.policies.schema import default_policy
from midstep.protocol.incidents import JobStatus, Outcome
from midstep.protocol.types import JobSpec

from ..chaos.controller.conftest import Cluster

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

LEAST_CONTROLLERS = 5
MOST_CONTROLLERS = 60

# A controller that kills itself when its first news of the job are durable and nothing has followed from them yet, or
# when all has followed from them and the next are about to be written. That it has started, and which nodes there are,
# each of them hears again.
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


class EtcdCluster(Cluster):
    """A job whose journal is in etcd."""

    def __init__(self, place: EtcdPlace, url: str) -> None:
        self._place = place
        self._url = url
        self.dies = ""
        super().__init__()

    def found(self, job: JobSpec) -> None:
        submit(self._place, job, default_policy())

    def command(self, *options: str) -> list[str]:
        directories = ["--job-dir", str(self.job_directory), "--run-dir", str(self.run_directory)]
        where = ["--store", self._url, "--job", self._place.job, "--keys", str(self.keys)]
        start = ["-m", "midstep.cli.main"] if not self.dies else ["-c", DYING, self.dies]
        return [sys.executable, *start, "controller", *directories, *where, *options]

    def status(self) -> JobStatus:
        return read_status(self._place)


@pytest.fixture
def cluster(place: EtcdPlace) -> Iterator[EtcdCluster]:
    url = str(place).rpartition("/")[0]
    made = EtcdCluster(place, url)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_incident_is_finished_by_controllers_that_are_killed_at_every_record(
    cluster: EtcdCluster, when: str
) -> None:
    cluster.start()
    cluster.kill_controller()
    cluster.dies = when
    cluster.host(1).kill(1)
    while not cluster.recovered():
        assert len(cluster.controllers) < MOST_CONTROLLERS
        cluster.start_controller("--standby")
        cluster.until(lambda: cluster.controllers[-1].poll() is not None or cluster.recovered())
        assert cluster.controllers[-1].poll() in {None, -signal.SIGKILL}, cluster.said()
    assert len(cluster.controllers) >= LEAST_CONTROLLERS

    cluster.kill_controller()
    cluster.dies = ""
    cluster.start_controller("--standby")
    cluster.until(lambda: cluster.phase() == "running")
    status = cluster.status()
    assert [incident.outcome for incident in status.incidents] == [Outcome.RESUMED]
    assert cluster.starts() == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)]
    assert {use.name: use.used for use in status.budgets}["recover_in_place per job"] == 1
    assert len({rank.committed for rank in cluster.ranks().values()}) == 1
