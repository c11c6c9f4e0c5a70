"""Whether a Kubernetes is to be had here, and what becomes of tests that need one where it is not."""

import os
import subprocess

import pytest

from .cluster.programs import NoKubernetes, require_programs, why_not

REQUIRED = "MIDSTEP_REQUIRE_KUBERNETES"  # set where the tests have to run: a skipped one is a failed one then
CHOSEN = "MIDSTEP_KUBERNETES"
_COMMAND_S = 60.0
USE = "use"  # the cluster of KUBECONFIG


def uses_given_cluster() -> bool:
    """Say whether the tests are to run on the cluster that the user's KUBECONFIG leads to."""
    return os.environ.get(CHOSEN) == USE


def kubectl_of_user(*words: str) -> str:
    """Run the user's kubectl with the user's KUBECONFIG, and return what it prints."""
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    assert not done.returncode, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def require_kubernetes() -> None:
    """Skip the test where no cluster can be made, with the reason; fail it where it has to run."""
    if uses_given_cluster():
        reason = f"{CHOSEN}={USE}: the machines of a cluster that is given are not switched off"
    else:
        reason = why_not() or _why_not_built()
    if not reason:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"no Kubernetes: {reason}", pytrace=False)
    pytest.skip(f"no Kubernetes: {reason}")


def _why_not_built() -> str:
    try:
        require_programs()
    except NoKubernetes as reason:
        return str(reason)
    return ""
