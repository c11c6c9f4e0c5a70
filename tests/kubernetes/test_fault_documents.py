"""A fault that is put into a ConfigMap of MindCluster by hand: the rank on that device of that host moves."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .cluster.cluster import Cluster
from .conftest import RANKS, STEPS, StartManaged
from .managed import MIDSTEP, victim
from .mindcluster import make_kinds_known
from .operations import DEVICE, DEVICE_INFO, SEPARATED, write

pytestmark = pytest.mark.timeout(600)

ACJOB = Path(__file__).parents[2] / "examples" / "acjob.yaml"
FAULTY, END = 40, STEPS - 1


def policy_of_acjob(cluster: Cluster) -> dict[str, Any]:
    """Return the policy that a dry run makes of an AscendJob in the cluster, whose kind is made known first."""
    make_kinds_known(cluster)
    (acjob,) = (each for each in yaml.safe_load_all(ACJOB.read_text()) if each["kind"] == "AscendJob")
    cluster.apply(acjob)
    name = acjob["metadata"]["name"]
    words = (*MIDSTEP, "run", "--platform", "kubernetes", "--image", "i", "--nnodes", "2", "--acjob", name, "--dry-run")
    environment = [f"{key}={value}" for key, value in {**cluster.environment(), "HOME": "/tmp"}.items()]
    printed = cluster.machines[0].run("env", *environment, *words, "t.py")
    found = next(each for each in yaml.safe_load_all(printed) if each and each["kind"] == "ConfigMap")
    policy: dict[str, Any] = yaml.safe_load(found["data"]["policy.yaml"])
    return policy


def test_a_device_that_is_separated_loses_its_rank_to_a_spare(
    cluster: Cluster, start_managed: StartManaged, undisturbed: Record
) -> None:
    """As the annotations of an AscendJob in the cluster allow it."""
    policy = policy_of_acjob(cluster)
    assert "recover" in [each["rung"] for each in policy["ladder"]]
    options = ("--device", "cpu", "--config-maps", DEVICE_INFO)
    job = start_managed("faulty", spares=1, step_s=0.05, gates=(FAULTY, END), policy=policy, options=options)
    status = job.held_at(FAULTY)
    job.until_spare()
    node, ranks = victim(job, status)
    host = job.cluster.machine_of(job.pod_of(node)).name
    write(job.cluster, host)
    write(job.cluster, host, SEPARATED)
    job.until(lambda now: bool(now["incidents"]), "the fault to be answered")
    job.open_gate(FAULTY)
    job.held_at(END)
    job.open_gate(END)

    (incident,) = job.finish()["incidents"]
    assert incident["rung"] == "recover"
    assert incident["cause"].startswith("device")
    assert f"rank {sorted(ranks)[DEVICE]}" in incident["cause"], incident["cause"]
    assert_nobody_harmed(incident, ranks, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert f"midstep-{job.name}" not in cluster.kubectl("get", "roles,rolebindings", "-n", DEVICE_INFO, "-o", "name")
