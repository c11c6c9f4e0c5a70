"""A real API server over a real etcd, on this computer's loopback: objects, and nothing that acts on them."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ..etcd.server import Server, free_ports
from ..kubernetes.mindcluster.api import Api, Thing
from .availability import API_SERVER

CLUSTERD_TOKEN = "of-clusterd"
_ADMIN_TOKEN = "of-the-tests"
_CLUSTERD_USER = "system:serviceaccount:mindx-dl:clusterd"
_READY_S = 90.0
_COMMAND_S = 30.0
_PLACES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}


class ApiServer:
    """Both programs. `certificate`: by which the server is known."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "api.log"
        self._store = Server(folder, 1, "--unsafe-no-fsync")
        (self.port,) = free_ports(1)
        self.certificate = folder / "certificates" / "apiserver.crt"
        _write_secrets(folder)
        command = [
            API_SERVER,
            f"--etcd-servers=http://127.0.0.1:{self._store.members[0].port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.certificate.parent}",
            f"--token-auth-file={folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=198.18.250.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--service-account-key-file={folder / 'accounts.pub'}",
            "--disable-admission-plugins=ServiceAccount",  # no controller makes them
            "--endpoint-reconciler-type=none",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.api = Api(f"https://127.0.0.1:{self.port}", _ADMIN_TOKEN)
        self.until(lambda: self.api.send("GET", "/api/v1/namespaces/default") is not None, "the API server")

    def make(self, thing: Thing) -> None:
        """Make one of MindCluster's own objects."""
        path = _PLACES[thing["kind"]].format(namespace=thing["metadata"].get("namespace"))
        self.api.send("POST", path, thing)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something is so, whatever the server says before."""
        deadline = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(OSError):
                if holds():
                    return
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self._log.read_text()[-3000:]}"
            time.sleep(0.2)

    def close(self) -> None:
        """Kill both."""
        self._process.kill()
        self._process.wait(_COMMAND_S)
        self._store.close()


def _write_secrets(folder: Path) -> None:
    private, public = folder / "accounts.key", folder / "accounts.pub"
    for words in (
        ["genrsa", "-out", str(private), "2048"],
        ["rsa", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=_COMMAND_S)
    tokens = f"{_ADMIN_TOKEN},admin,1,system:masters\n{CLUSTERD_TOKEN},{_CLUSTERD_USER},2\n"
    (folder / "tokens").write_text(tokens)
