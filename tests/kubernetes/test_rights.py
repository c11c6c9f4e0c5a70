"""A Role that is short of a verb, on a real API server: it is said which one, before anything of the job runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from midstep.platforms.kubernetes.rules import LEASE_RIGHTS, RIGHTS, ApiRight

from .cluster.cluster import Cluster
from .managed import ManagedJob

pytestmark = pytest.mark.timeout(600)


def without(role: dict[str, Any], right: ApiRight) -> dict[str, Any]:
    """Return a Role that lacks a right."""
    rules = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != right.verb]}
        if rule["resources"] == [right.resource]
        else rule
        for rule in role["rules"]
    ]
    assert rules != role["rules"]
    return {**role, "rules": [rule for rule in rules if rule["verbs"]]}


def test_each_verb_that_a_role_lacks_is_named_before_the_job_begins(cluster: Cluster, shared: Path) -> None:
    jobs = {}
    for number, right in enumerate((*RIGHTS, *LEASE_RIGHTS)):
        job = jobs[right] = ManagedJob(
            cluster, shared / f"rights{number}", f"rights{number}", steps=1, options=("--dry-run", "--controllers", "2")
        )
        cluster.until(lambda job=job: job.process.poll() is not None, "a dry run")  # type: ignore[misc]
        printed = job.output.read_text().replace("policy/v1\n", "policy/v1beta1\n")  # Kubernetes before 1.21
        objects = list(yaml.safe_load_all(printed))
        cluster.apply(*(without(each, right) if each["kind"] == "Role" else each for each in objects))
    try:
        for right, job in jobs.items():
            lacking = f"{right.verb} {right.resource}: {right.why}"
            cluster.until(lambda job=job, lacking=lacking: lacking in said(job), lacking)  # type: ignore[misc]
            assert job.pods() == []
            assert not job.directory.exists()
    finally:
        for job in jobs.values():
            kinds = "deployments,secrets,configmaps,services,roles,rolebindings,serviceaccounts,leases"
            kinds += ",poddisruptionbudgets"
            cluster.kubectl("delete", kinds, "-l", f"midstep.io/job={job.name}", "--wait=false")


def said(job: ManagedJob) -> str:
    """Return what the first container of a job's controller has said."""
    chosen = ("-l", f"midstep.io/job={job.name},midstep.io/role=controller", "-c", "check", "--tail", "20")
    return job.cluster.kubectl("logs", *chosen, check=False)
