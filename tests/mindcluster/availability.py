"""Where ClusterD's program and MindCluster's manifests are, and an API server: tests that lack one are skipped.

MIDSTEP_CLUSTERD names ClusterD's program, as MindCluster's own `component/clusterd/build/build.sh` makes it, and
MIDSTEP_MINDCLUSTER the checkout from which it was made.
"""

import os
import shutil
from pathlib import Path

import pytest

from ..kubernetes.cluster.programs import CACHE, Programs

PROGRAM, CHECKOUT = "MIDSTEP_CLUSTERD", "MIDSTEP_MINDCLUSTER"
API_SERVER, STORE = "kube-apiserver", "etcd"
PATH = f"{Programs(CACHE).path}:{os.environ['PATH']}"
"""Where programs are looked for: first where the tests of Kubernetes have built theirs."""


def why_not() -> str:
    """Return what is missing on this computer; the empty string: nothing."""
    for name in (PROGRAM, CHECKOUT):
        if not Path(os.environ.get(name, "")).is_absolute() or not Path(os.environ[name]).exists():
            return f"{name} names nothing: see tests/mindcluster/availability.py"
    if os.geteuid() != 0:
        return "ClusterD's fixed places (/var/log, /home/hwMindX) are covered in a mount namespace, which needs root"
    missing = [name for name in (API_SERVER, STORE, "unshare", "openssl") if shutil.which(name, path=PATH) is None]
    if missing:
        return f"no {', no '.join(missing)}: `python -m tests.kubernetes.cluster build`, 5 to 20 minutes"
    return ""


def require_clusterd() -> tuple[Path, Path]:
    """Return ClusterD's program and MindCluster's checkout; skip the test where one is missing."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return Path(os.environ[PROGRAM]), Path(os.environ[CHECKOUT])
