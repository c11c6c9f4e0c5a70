"""A real API server takes what examples/kubernetes asks of Kubernetes: by its dry run, which stores nothing.

Version 1.20 knows neither the CRDs nor some fields of a Job. There the pods of all kinds are tried by themselves, and
Jobs without those fields. A cluster of one's own (MIDSTEP_KUBERNETES=use, KUBECONFIG) gets each document as it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ..unit.test_kubernetes_examples import FILES, documents, within
from .availability import uses_given_cluster
from .conftest import Kubectl

pytestmark = pytest.mark.timeout(600)

_NEWER = {"completionMode", "podFailurePolicy", "podReplacementPolicy", "successPolicy", "suspend"}
_KNOWN = {"v1", "batch/v1"}


def pods(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return each pod that a document describes."""
    templates = [each for each in within(document, "template") if "containers" in each.get("spec", {})]
    return [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template.get("metadata", {}), "name": name}}
        for template in templates
    ]


def older(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without what version 1.20 does not know."""
    if document["kind"] != "Job":
        return document
    kept = {key: value for key, value in document["spec"].items() if key not in _NEWER}
    return {**document, "spec": kept}


def is_known(document: dict[str, Any], kubectl: Kubectl) -> bool:
    """Say whether a cluster has the kind of a document."""
    group, _, _ = document["apiVersion"].rpartition("/")
    kinds = kubectl("api-resources", "--no-headers", f"--api-group={group}")
    return any(line.split()[-1] == document["kind"] for line in kinds.splitlines())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_api_server_takes_it(file: Path, kubectl: Kubectl, shared: Path) -> None:
    """Each of its documents, or at least its pods."""
    asked = documents(file)
    if not uses_given_cluster():
        known = [older(document) for document in asked if document["apiVersion"] in _KNOWN]
        asked = [*known, *(pod for document in asked for pod in pods(document, "pod"))]
    elif not all(is_known(document, kubectl) for document in asked):
        pytest.skip("this cluster does not have the kinds of it")
    assert asked
    for number, document in enumerate(asked):
        tried = shared / f"{file.stem}-{number}.json"
        tried.write_text(json.dumps(document))
        said = kubectl("apply", "--dry-run=server", "--filename", str(tried), "--output", "name")
        assert said.partition("/")[0].partition(".")[0] == document["kind"].lower()
