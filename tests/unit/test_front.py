"""Clients wait for their turn at the authenticator, and may be gone when it comes."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.protocol.connection import ConnectionLimits
from midstep.protocol.front import Front
from midstep.protocol.transport import allow_many_connections

CLIENTS = 500
LIMIT_S = 30.0
GREETING, HELLO, INITIATE = b"\xff" + bytes(63), b"\x04\x02hi", b"\x04\x02in"


class Proof:
    """An authenticator whose answer to the second client takes until it is told to give it."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self._calls = 0

    def __call__(self) -> tuple[int, str | None]:
        self._calls += 1
        if self._calls == 2:
            self.asked.set()
            assert self.may_answer.wait(LIMIT_S)
        return self._calls, None


@pytest.fixture
def router() -> Iterator[socket.socket]:
    """The private end of a router, which accepts what the front brings."""
    allow_many_connections()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(f"\0{secrets.token_hex()}")
        made.listen(CLIENTS)
        made.settimeout(LIMIT_S)
        yield made


def test_hundreds_that_are_gone_when_their_turn_comes_end_no_front(router: socket.socket, tmp_path: Path) -> None:
    """As in a job of thousands of nodes whose machine is too busy for their handshakes."""
    listener, proof = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), Proof()
    listener.bind(str(tmp_path / "front"))
    front = Front(listener, router.getsockname().decode(), ConnectionLimits(2 * CLIENTS, CLIENTS, CLIENTS), proof)
    with contextlib.ExitStack() as stack:
        stack.callback(front.close)
        stack.callback(proof.may_answer.set)

        def connect() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.settimeout(LIMIT_S)
            client.connect(str(tmp_path / "front"))
            client.sendall(GREETING + HELLO + INITIATE)
            brought = stack.enter_context(router.accept()[0])
            brought.settimeout(LIMIT_S)
            assert brought.recv(len(GREETING + HELLO), socket.MSG_WAITALL) == GREETING + HELLO
            return client, brought

        ends = [connect() for _ in range(CLIENTS)]
        ends[0][1].close()  # its turn is over, and the next one asks
        assert proof.asked.wait(LIMIT_S)
        for _, brought in ends[1:]:
            brought.close()
        proof.may_answer.set()
        for client, _ in ends:
            assert client.recv(1) == b""
        connect()
        front.check()
