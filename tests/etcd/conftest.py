"""A real etcd for the tests of this folder, and a job in it for each."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from midstep.controller.etcd.place import EtcdPlace, parse_place

from .server import Server, require_etcd

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One member for all tests that do it no harm."""
    require_etcd()
    server = Server(tmp_path_factory.mktemp("etcd"))
    yield server
    server.close()


@pytest.fixture
def place(shared_server: Server) -> EtcdPlace:
    """Where a new job can be."""
    return parse_place(shared_server.url, f"job-{secrets.token_hex(4)}")


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start an etcd of one's own, `start_server(3)` for a cluster."""
    require_etcd()
    with ExitStack() as started:

        def start(members: int = 1, *options: str) -> Server:
            server = Server(tmp_path, members, *options)
            started.callback(server.close)
            return server

        yield start
