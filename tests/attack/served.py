"""A router in a process of its own, with few descriptors: what strangers do to it is seen from outside."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from midstep.protocol.keys import JobKeys
from midstep.protocol.transport import DealerSocket, wait

PATIENCE_S = 30.0
DESCRIPTORS = 256
A, B = "node/a", "node/b"
REFUSED = b"what was refused?"

_SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
import msgspec
from midstep.protocol.keys import JobKeys
from midstep.protocol.transport import RouterSocket, wait
router = RouterSocket("tcp://127.0.0.1:0", curve=JobKeys.load_server(sys.argv[1]))
print(router.endpoint, flush=True)
while True:
    wait([router], (), 0.2)
    for received in router.receive():
        with open("/dev/null"):  # as a journal needs its files
            asked = received.data == b"what was refused?"
            router.send(received.identity, msgspec.json.encode(router.refused) if asked else received.data[:1000])
"""


class Client:
    """An agent that says something and expects to hear it again."""

    def __init__(self, endpoint: str, keys: Path, identity: str) -> None:
        self.socket = DealerSocket(endpoint, identity=identity, curve=JobKeys.load_client(keys, identity))
        self._said = 0

    def ask(self, question: bytes = b"", limit_s: float = PATIENCE_S) -> bytes | None:
        """Say something until it is answered; return the answer, None when none came in time."""
        self._said += 1
        question = question or b"%d" % self._said
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            self.socket.send(question)
            wait([self.socket], (), 0.3)
            for received in self.socket.receive():
                if received.data == question or (question == REFUSED and received.data.startswith(b"{")):
                    return received.data
        return None


class Served:
    """The process, and how it is reached."""

    def __init__(self, keys: Path, descriptors: int, identities: Sequence[str]) -> None:
        JobKeys.create(keys, identities)
        self.keys = keys
        self.clients: list[Client] = []
        arguments = [sys.executable, "-c", _SERVER, str(keys), str(descriptors)]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        self.port = int(self.endpoint.rpartition(":")[2])

    def client(self, identity: str) -> Client:
        self.clients.append(Client(self.endpoint, self.keys, identity))
        return self.clients[-1]

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def close(self) -> None:
        for client in self.clients:
            client.socket.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def served(directory: Path, descriptors: int = DESCRIPTORS, identities: Sequence[str] = (A, B)) -> Iterator[Served]:
    """Run a router, with so many descriptors and keys for `identities`."""
    here = Served(directory / "keys", descriptors, identities)
    try:
        yield here
    finally:
        here.close()


@contextmanager
def descriptors_here(count: int) -> Iterator[int]:
    """Let this process have `count` descriptors, or as many as the system grants; yield that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = min(max(soft, count), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    try:
        yield granted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
