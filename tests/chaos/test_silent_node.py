"""A node goes silent without dying, is given up, and comes back: it is freed of what it ran, and is a spare again."""

import contextlib

import psutil
import pytest

from .comparing import assert_nobody_harmed, finish
from .conftest import StartJob
from .node_processes import agents_of

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]

SILENT_STEP, BACK_STEP = 8, 16


def test_a_node_that_was_silent_is_freed_and_becomes_a_spare_again(start_job: StartJob) -> None:
    """Its ranks go on elsewhere meanwhile; nothing of them is left on it, and the others never notice its return."""
    job = start_job(spares=1, steps=24, gates=[SILENT_STEP, BACK_STEP])
    lost = job.held_at(SILENT_STEP).ranks[3].node
    agent = agents_of(job.launcher.pid)[lost]
    agent.suspend()
    try:
        job.until(lambda status: any(node.state == "lost" for node in status.nodes), "the silent node to be given up")
        job.open_gate(SILENT_STEP)
        before = job.held_at(BACK_STEP)
        assert all(rank.node != lost for rank in before.ranks)
    finally:
        agent.resume()

    def freed(status: object) -> bool:
        names = []
        for process in agent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return not any(name.startswith("midstep-r") for name in names)

    job.until(lambda status: any((node.node, node.state) == (lost, "spare") for node in status.nodes), "its return")
    job.until(freed, "the end of its old processes")
    job.open_gate(BACK_STEP)
    (incident,) = finish(job)["incidents"]
    assert incident["rung"] == "recover"
    assert_nobody_harmed(incident, {2, 3})
