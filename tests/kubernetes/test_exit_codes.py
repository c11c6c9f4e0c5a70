"""The exit codes of agents that are pid 1: rules of Kubernetes go by them (podFailurePolicy, restartPolicyRules)."""

import signal

import pytest

from midstep.protocol.exits import ANOTHER_NODE, RESTART_HERE

from .conftest import StartJoined
from .joined import MIDSTEP, JoinedJob

pytestmark = pytest.mark.timeout(900)

HELD = 5
LEAVE_S = 5.0
TERMINATED, KILLED, GIVEN_BACK, LEFT = "terminated", "killed", "given-back", "left"
SPARES = (TERMINATED, KILLED, LEFT)
POLICY = {"agent": {"leave_s": LEAVE_S}, "ladder": [{"rung": "reschedule_pod"}, {"rung": "stop"}]}


def exit_code(job: JoinedJob, pod: str) -> int | None:
    """Return the exit code of a pod's container; None while it runs."""
    (container,) = job.cluster.get("pod", pod)["status"].get("containerStatuses") or [{"state": {}}]
    ended = container["state"].get("terminated")
    return None if ended is None else int(ended["exitCode"])


def test_an_agent_that_is_pid_1_ends_with_the_code_that_says_what_to_do(start_joined: StartJoined) -> None:
    """Also where it kills itself, which the kernel does not allow to a pid 1."""
    job = start_joined("codes", nodes=2, ranks_per_node=1, gates=(HELD,), npus=0, policy=POLICY)
    job.start_agent(GIVEN_BACK)
    status = job.held_at(HELD)
    for name in SPARES:
        job.start_agent(name)
    (rank,) = (rank["rank"] for rank in status["ranks"] if rank["node"] == GIVEN_BACK)

    def are_spares() -> bool:
        status = job.status() or {"nodes": []}
        return {node["node"] for node in status["nodes"] if node["state"] == "spare"} >= set(SPARES)

    job.cluster.until(are_spares, "the other agents to be spares")
    first = job.first()
    inject = (*MIDSTEP, "inject", str(job.root / "job"))
    job.execute(TERMINATED, "kill", "-TERM", "1")
    job.execute(first, *inject, "--node", KILLED)
    job.execute(first, *inject, "--rank", str(rank), "--device-fault", "SeparateNPU")
    wanted = {TERMINATED: 128 + signal.SIGTERM, KILLED: 128 + signal.SIGKILL, GIVEN_BACK: ANOTHER_NODE, LEFT: None}

    def codes() -> dict[str, int | None]:
        return {name: exit_code(job, name) for name in wanted}

    job.cluster.until(lambda: codes() == wanted, f"the exit codes {wanted}")
    job.cluster.kubectl("delete", "job", f"{job.name}-first", "--grace-period=0", "--force")
    job.cluster.until(lambda: exit_code(job, LEFT) is not None, "the last agent to leave")
    assert exit_code(job, LEFT) == RESTART_HERE
