"""A status server as that of Kubeflow's trainer, over TLS, as strict as it is and as the API server behind it.

It takes a POST at the place of one TrainJob, with the token that is good now, of at most 64 KiB, with one JSON value in
which every field has the type and the bounds of the TrainJob's CRD.
"""

import json
import re
import shutil
import ssl
import subprocess
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PLACE = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/gpt/status"
MOST_BYTES = 1 << 16
MOST_METRICS = 256
MOST_CHARACTERS = 64
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
has_openssl = shutil.which("openssl") is not None


class Invalid(Exception):
    """The API server would not take this."""


def checked(told: Any) -> dict[str, Any]:
    """The status of a report that is valid. Raises Invalid."""
    if not isinstance(told, dict) or set(told) != {"trainerStatus"} or not isinstance(told["trainerStatus"], dict):
        raise Invalid("it is no report")
    status: dict[str, Any] = told["trainerStatus"]
    most = {"progressPercentage": 100, "estimatedRemainingSeconds": 2**31 - 1}
    if not set(status) <= {*most, "metrics", "lastUpdatedTime"}:
        raise Invalid(f"unknown fields among {sorted(status)}")
    for name, limit in most.items():
        if name in status and not (type(status[name]) is int and 0 <= status[name] <= limit):
            raise Invalid(f"{name} is {status[name]!r}")
    metrics = status.get("metrics", [])
    if not isinstance(metrics, list) or len(metrics) > MOST_METRICS:
        raise Invalid("metrics are no list, or too many")
    for metric in metrics:
        if set(metric) != {"name", "value"}:
            raise Invalid(f"a metric with {sorted(metric)}")
        if not all(isinstance(text, str) and 1 <= len(text) <= MOST_CHARACTERS for text in metric.values()):
            raise Invalid(f"a metric {metric!r}")
    if not _TIME.fullmatch(str(status.get("lastUpdatedTime"))):
        raise Invalid("lastUpdatedTime is required when trainerStatus is present")
    datetime.fromisoformat(status["lastUpdatedTime"].replace("Z", "+00:00"))
    return status


def make_certificate(root: Path) -> tuple[Path, Path]:
    """Make a certificate of `localhost` that is its own CA, and its key."""
    root.mkdir(parents=True, exist_ok=True)
    certificate, key = root / "ca.crt", root / "key.pem"
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=of a test"]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made, *files], check=True, capture_output=True, timeout=60.0)
    return certificate, key


class StatusServerOfTrainer:
    """Serves until it is closed. `ill`: it answers 503; `hangs`: it takes requests and does not answer."""

    def __init__(self, root: Path) -> None:
        """Make a certificate, a CA file and a token file below `root`."""
        self.ca_file, key = make_certificate(root)
        self.token_file = root / "token"
        self.ill = self.hangs = False
        self.taken: list[dict[str, Any]] = []
        self.refused: list[tuple[int, str]] = []
        self.token = ""
        self.rotate()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if server.hangs:
                    server.refused.append((0, "it hangs"))
                    time.sleep(60.0)
                    return
                code, why = server._judged(self.path, self.headers.get("Authorization", ""), self._body())
                if code != 200:
                    server.refused.append((code, why))
                body = json.dumps({"kind": "Status", "message": why, "code": code} if why else {}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _body(self) -> bytes:
                return self.rfile.read(min(MOST_BYTES + 1, int(self.headers.get("Content-Length", "0"))))

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca_file, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"https://localhost:{self._server.server_port}{PLACE}"

    def rotate(self) -> None:
        """Have another token be good from now on, as kubelet does each hour; the file has it, readable for all."""
        self.token = f"eyJh.{time.monotonic_ns()}.sig"
        fresh = self.token_file.with_suffix(".new")
        fresh.write_text(self.token)
        fresh.chmod(0o644)
        fresh.replace(self.token_file)

    @property
    def environment(self) -> dict[str, str]:
        """What the trainer sets in containers."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.ca_file),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token_file),
        }

    def metrics(self) -> dict[str, str]:
        """The metrics of the latest report that was taken."""
        return {each["name"]: each["value"] for each in self.taken[-1].get("metrics", [])} if self.taken else {}

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def _judged(self, path: str, authorization: str, body: bytes) -> tuple[int, str]:
        if path != PLACE:
            return 404, "Not found"
        if authorization != f"Bearer {self.token}":
            return 403, "Forbidden"
        if len(body) > MOST_BYTES:
            return 413, "Payload too large"
        if self.ill:
            return 503, "Internal error"
        try:
            self.taken.append(checked(json.loads(body)))
        except (ValueError, Invalid) as error:
            return 422, str(error)
        return 200, ""
