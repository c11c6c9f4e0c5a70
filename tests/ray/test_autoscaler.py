"""Ray's autoscaler brings the machines that a job waits for, and one for each that is lost; in the end all leave."""

from pathlib import Path

from midstep.protocol.types import FaultKind

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from ..machines.availability import require_machines
from ..machines.conftest import REPOSITORY
from ..machines.machines import Machines, why_not
from .autoscaled import AutoscaledRay
from .conftest import RANKS, STEPS
from .environment import SUITE
from .job import RayJob

LOST, END = 40, STEPS - 1


def test_machines_come_for_a_job_one_more_for_a_lost_one_and_all_leave_after_it(
    tmp_path: Path, undisturbed: Record
) -> None:
    """The job is started where no machine fits, and its bits are those of an undisturbed run."""
    SUITE.require()
    require_machines(why_not())
    with Machines(1, (REPOSITORY, tmp_path)) as machines:
        cluster = AutoscaledRay(machines, tmp_path)
        assert cluster.workers() == set()
        job = RayJob(cluster, tmp_path, nodes=RANKS, spares=0, steps=STEPS, gates=(LOST, END))
        try:
            node = job.held_at(LOST).ranks[1].node
            first = cluster.until_workers(RANKS)
            job.kill_raylet_below(node)
            job.until_incidents(1)
            job.open_gate(LOST)

            job.held_at(END)
            now = cluster.until_workers(RANKS)
            assert len(now - first) == 1
            job.open_gate(END)
            report = job.finish()
            (incident,) = report["incidents"]
            assert incident["rung"] == "recover"
            assert incident["cause"].startswith(FaultKind.NODE_LOST)
            assert_nobody_harmed(incident, {1}, ranks=RANKS)
            assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
            job.assert_nothing_left()
            cluster.until_workers(0)
        finally:
            job.close()
