"""`midstep status`, `inject` and `stop` against a real controller, and without one."""

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from midstep.cli.main import main
from midstep.launch.directories import JobFile, write_job_file
from midstep.protocol.incidents import Outcome

if TYPE_CHECKING:
    from tests.chaos.controller.conftest import Cluster

pytestmark = pytest.mark.chaos


def midstep(cluster: "Cluster", command: str, *options: str) -> Result:
    """Run a command for the cluster's job."""
    write_job_file(cluster.job_directory, JobFile(str(cluster.run_directory)))
    return CliRunner().invoke(main, [command, str(cluster.job_directory), *options])


def test_status_is_live_while_there_is_a_controller_and_from_the_journal_afterwards(cluster: "Cluster") -> None:
    cluster.start()
    live = json.loads(midstep(cluster, "status", "--json").stdout)
    assert (live["live"], live["phase"], live["committed"], len(live["ranks"])) == (True, "running", 1, 4)
    cluster.kill_controller()
    dead = midstep(cluster, "status", "--json")
    assert json.loads(dead.stdout)["live"] is False
    shown = midstep(cluster, "status")
    assert shown.exit_code == 0
    assert "no controller answers; this is the journal as of" in shown.stderr
    assert "running" in shown.stdout


def test_inject_kills_by_way_of_the_agent_and_says_what_it_did(cluster: "Cluster") -> None:
    cluster.start()
    done = midstep(cluster, "inject", "--rank", "1")
    assert (done.exit_code, done.stdout) == (0, "job: armed: kill rank 1 now; sent to node/node0\n")
    refused = midstep(cluster, "inject", "--rank", "8")
    assert refused.exit_code == 1
    assert "there is no rank 8: the job has ranks 0 to 3" in refused.stderr
    cluster.until(lambda: cluster.host(1).armed)
    cluster.host(1).kill(1)
    cluster.until(cluster.recovered)
    assert cluster.status().incidents[0].outcome is Outcome.RESUMED


def test_watching_ends_with_the_job(cluster: "Cluster") -> None:
    cluster.start()
    assert midstep(cluster, "stop", "--reason", "seen enough").exit_code == 0
    midstep(cluster, "stop")
    cluster.until(lambda: cluster.controllers[-1].poll() is not None)
    lines = midstep(cluster, "status", "--json", "--watch").stdout.splitlines()
    last = json.loads(lines[-1])
    assert (len(lines), last["exit_code"], last["note"]) == (
        1,
        130,
        "the job has ended; this is the end of its journal",
    )
    again = midstep(cluster, "stop")
    assert again.exit_code == 1
    assert "there is no controller here" in again.stderr
