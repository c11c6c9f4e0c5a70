"""The programs on m0: etcd, the API server, the scheduler, the controllers, and the program that answers for names."""

import subprocess
import sys
from pathlib import Path

from ...machines.machines import Machine
from .programs import Programs

SERVICES = "198.18.250.0/24"  # in the machines' network: what is listened to there is reached without a kube-proxy
API_ADDRESS = "198.18.250.1"  # what pods are told, in KUBERNETES_SERVICE_HOST
NAMES_ADDRESS = "198.18.250.10"
NOT_READY_S = 6
TOKEN = "of-the-tests"
_STORE = "http://127.0.0.1:2379"
STORE_PORT = 2379
_COMMAND_S = 30.0


class ControlPlane:
    """The programs of m0, and the file with which others reach the API. `state`: a folder that all machines see."""

    def __init__(self, machine: Machine, state: Path, programs: Programs) -> None:
        """Start the store and the API server."""
        self._machine = machine
        self._state = state
        self._programs = programs
        self.kubeconfig = state / "kubeconfig"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        machine.run("ip", "addr", "add", f"{API_ADDRESS}/16", "dev", "eth0")
        machine.run("ip", "addr", "add", f"{NAMES_ADDRESS}/16", "dev", "eth0")
        self._write_secrets()
        self.start_store()
        self.start_api()

    def start_store(self) -> None:
        """Start etcd, whose data is in the machine's memory."""
        urls = f"{_STORE},http://{self._machine.address}:{STORE_PORT}"  # also for controllers of jobs
        where = ("--data-dir", "/run/etcd", "--listen-client-urls", urls, "--advertise-client-urls", _STORE)
        self._start("etcd", *where, "--listen-peer-urls", "http://127.0.0.1:2380", "--unsafe-no-fsync")

    def start_api(self) -> None:
        """Start the API server, or start it again."""
        self._start(
            "kube-apiserver",
            f"--etcd-servers={_STORE}",
            "--secure-port=443",
            "--bind-address=0.0.0.0",
            f"--advertise-address={self._machine.address}",
            f"--cert-dir={self._state}/certificates",
            f"--token-auth-file={self._state}/tokens",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._state}/accounts.key",
            f"--service-account-key-file={self._state}/accounts.pub",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            "--default-not-ready-toleration-seconds=2",
            "--default-unreachable-toleration-seconds=2",
        )

    def stop_api(self) -> None:
        """Kill the API server."""
        self._machine.run("sh", "-c", "kill -9 $(pidof kube-apiserver)")
        self.running["kube-apiserver"].wait(_COMMAND_S)

    def start_controllers(self) -> None:
        """Start what asks the API server, once that one answers."""
        api = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false")
        self._start("kube-scheduler", *api)
        self._start(
            "kube-controller-manager",
            *api,
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={NOT_READY_S}s",
            f"--service-account-private-key-file={self._state}/accounts.key",
            f"--root-ca-file={self._state}/certificates/apiserver.crt",
        )
        names = Path(__file__).with_name("names.py")
        self._start(sys.executable, str(names), NAMES_ADDRESS, f"https://{API_ADDRESS}", TOKEN)

    def _start(self, program: str, *words: str) -> None:
        name = "names" if program == sys.executable else program
        output = self._state / "logs" / f"{name}.log"
        environment = {"PATH": f"{self._programs.path}:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.running[name] = self._machine.start((program, *words), environment=environment, output=output)

    def _write_secrets(self) -> None:
        private, public = self._state / "accounts.key", self._state / "accounts.pub"
        for words in (
            ("genrsa", "-out", str(private), "2048"),
            ("rsa", "-in", str(private), "-pubout", "-out", str(public)),
        ):
            subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=_COMMAND_S)
        (self._state / "tokens").write_text(f"{TOKEN},admin,1,system:masters\n")
        self.kubeconfig.write_text(f"""\
apiVersion: v1
kind: Config
clusters: [{{name: tests, cluster: {{server: "https://{API_ADDRESS}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: {TOKEN}}}}}]
contexts: [{{name: tests, context: {{cluster: tests, user: admin}}}}]
current-context: tests
""")
