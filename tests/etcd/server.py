"""An etcd of the tests: one member, or a cluster, on this machine's loopback; killed, frozen and started again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import requests

PROGRAM = "etcd"
CONTROL = "etcdctl"
REQUIRED = "MIDSTEP_REQUIRE_ETCD"  # set where the tests have to run: a skipped one is a failed one then
READY_S = 30.0
_LOOPBACK = "127.0.0.1"


def require_etcd() -> None:
    """Skip the test where there is no etcd, with what to do; fail it where the environment says that it has to run."""
    missing = [program for program in (PROGRAM, CONTROL) if shutil.which(program) is None]
    if not missing:
        return
    reason = f"no {' and no '.join(missing)} here: on Debian `apt-get install etcd-server etcd-client`"
    if os.environ.get(REQUIRED):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens at."""
    sockets = [socket.create_server((_LOOPBACK, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Member:
    """One member. What it has acknowledged outlives it."""

    def __init__(self, directory: Path, name: str, ports: tuple[int, int], cluster: str, *options: str) -> None:
        client, peer = (f"http://{_LOOPBACK}:{port}" for port in ports)
        self.port = ports[0]
        self._log = directory / f"{name}.log"
        self._command = [
            PROGRAM,
            *("--name", name, "--data-dir", str(directory / name)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; one that it is to stop at stops all of its threads before this returns."""
        assert self._process is not None
        self._process.send_signal(number)
        give_up_s = time.monotonic() + READY_S
        while number is signal.SIGSTOP and not _stopped(self._process.pid):
            assert time.monotonic() < give_up_s, "etcd runs on after SIGSTOP"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill it, and wait for its end. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(READY_S)
            self._process = None

    def wait(self) -> None:
        """Wait until it is well: it listens before it knows who leads."""
        give_up_s = time.monotonic() + READY_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://{_LOOPBACK}:{self.port}/health", timeout=5.0).ok:
                    return
            time.sleep(0.02)
        raise AssertionError(f"etcd does not get well:\n{self._log.read_text()[-3000:]}")


def _stopped(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


class Server:
    """An etcd with some members."""

    def __init__(self, directory: Path, members: int = 1, *options: str) -> None:
        ports = free_ports(2 * members)
        peers = ",".join(f"m{number}=http://{_LOOPBACK}:{ports[2 * number + 1]}" for number in range(members))
        self.members = [
            Member(directory, f"m{number}", (ports[2 * number], ports[2 * number + 1]), peers, *options)
            for number in range(members)
        ]
        for member in self.members:
            member.wait()

    @property
    def url(self) -> str:
        """Its address, as --store takes it."""
        return f"etcd://{','.join(f'{_LOOPBACK}:{member.port}' for member in self.members)}"

    def close(self) -> None:
        """End all members."""
        for member in self.members:
            member.kill()
