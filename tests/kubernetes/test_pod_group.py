"""Volcano places the pods that midstep makes, in a PodGroup, and gives them NPUs. It is played (`mindcluster`)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .cluster.cluster import RESOURCE, Cluster
from .conftest import RANKS, STEPS, StartManaged
from .managed import ManagedJob, victim
from .mindcluster import playing
from .operations import DEVICE_INFO, separated, write

pytestmark = pytest.mark.timeout(600)

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes" / "managed"
LOST, FAULTY, END = 30, 70, STEPS - 1
NPUS = 2  # of a pod, which is one for each of its ranks


def template_of_example() -> dict[str, Any]:
    """Return the template for pods with NPUs, without what hosts of this cluster do not have."""
    template: dict[str, Any] = yaml.safe_load((EXAMPLES / "npu-agent.yaml").read_text())
    (container,) = template["spec"]["containers"]
    del template["spec"]["nodeSelector"], template["spec"]["volumes"], container["volumeMounts"]
    return template


def numbers(job: ManagedJob, pod: str) -> list[int]:
    """Return the numbers of the NPUs that Volcano has given to a pod."""
    written = job.cluster.get("pod", pod)["metadata"]["annotations"][RESOURCE]
    return [int(each.removeprefix("Ascend910-")) for each in written.split(",")]


def test_a_group_of_pods_is_placed_together_and_a_fault_of_an_npu_finds_its_rank(
    cluster: Cluster, start_managed: StartManaged, undisturbed: Record
) -> None:
    """A pod that is lost is placed again, alone; ranks see the numbers of the NPUs that their pod was given."""
    options = ("--device", "cpu", "--pod-group", str(EXAMPLES / "npu-pod-group.yaml"), "--config-maps", DEVICE_INFO)
    with playing(cluster):
        job = start_managed(
            "grouped",
            spares=1,
            step_s=0.05,
            gates=(LOST, FAULTY, END),
            options=options,
            npus=NPUS,
            agent=template_of_example(),
        )
        status = job.held_at(LOST)
        group = cluster.get("podgroup", "midstep-grouped")
        assert group["spec"] == {"minMember": 2, "minResources": {RESOURCE: "4"}, "queue": "default"}
        assert group["metadata"]["ownerReferences"][0]["kind"] == "Deployment"
        job.until_spare()
        node, lost = victim(job, status)
        cluster.kubectl("delete", "pod", job.pod_of(node), "--grace-period=0", "--force")
        job.open_gate(LOST)

        status = job.held_at(FAULTY)
        job.until_spare()
        node, faulty = victim(job, status)
        given = numbers(job, job.pod_of(node))
        seen = {job.execute(node, "cat", f"/proc/{status['ranks'][rank]['pid']}/environ") for rank in faulty}
        assert all(f"ASCEND_VISIBLE_DEVICES={','.join(f'Ascend910-{n}' for n in given)}\0" in each for each in seen)
        host = cluster.machine_of(job.pod_of(node)).name
        write(cluster, host)
        write(cluster, host, separated(given[1]))
        job.until(lambda now: len(now["incidents"]) > 1, "the fault to be answered")
        job.open_gate(FAULTY)
        job.held_at(END)
        job.open_gate(END)
        incidents = job.finish()["incidents"]
    assert [each["rung"] for each in incidents] == ["recover", "recover"]
    assert given[1] != 1, "a number that no rank has by chance"
    assert f"rank {sorted(faulty)[1]}" in incidents[1]["cause"], incidents[1]["cause"]
    for incident, replaced in zip(incidents, (lost, faulty), strict=True):
        assert_nobody_harmed(incident, replaced, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    cluster.until(lambda: not cluster.get("podgroups")["items"], "the group to be gone")
