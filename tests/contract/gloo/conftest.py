"""Real ranks for the tests of communicators: forked processes, and a store that none of them can take down."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it in every rank
from tests.contract.makers import MAKERS, Maker
from torch._C._distributed_c10d import TCPStore

from midstep.communicators.base import Communicator
from midstep.communicators.dns import disable_dns_in_this_process
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.protocol.types import Rendezvous

WORD_S = 30.0
_FORK = multiprocessing.get_context("fork")


class Rank:
    """A rank, as its own process sees it."""

    def __init__(self, number: int, world_size: int, store: Rendezvous, line: Connection, maker: Maker) -> None:
        self.number = number
        self.world_size = world_size
        self.store = store
        self.maker = maker
        self._line = line

    def say(self, word: Any) -> None:
        self._line.send(("said", word))

    def hear(self) -> Any:
        assert self._line.poll(WORD_S), "the test said nothing"
        return self._line.recv()

    def join(self, generation: int = 0, *, connected: bool = True, collective_s: float = 20.0) -> GlooCommunicator:
        """Make gloo's communicator and the default group."""
        communicator = GlooCommunicator()
        self.init(communicator, generation, connected=connected, collective_s=collective_s)
        return communicator

    def init(
        self, communicator: Communicator, generation: int = 0, *, connected: bool = True, collective_s: float = 20.0
    ) -> None:
        """Make the default group with a communicator."""
        communicator.init(
            rank=self.number,
            world_size=self.world_size,
            generation=generation,
            store=self.store if connected else None,
            collective_s=collective_s,
            link_up_s=20.0,
        )


Program = Callable[[Rank], None]


class Ranks:
    """The ranks of one test, as the test sees them."""

    def __init__(self, maker: Maker = MAKERS["gloo"]) -> None:
        self.maker = maker
        self._lines: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        self._everything: list[Any] = []
        self._store_line, line = _FORK.Pipe()
        self._fork(_serve_store, line)
        self.store = Rendezvous("127.0.0.1", self._store_line.recv(), "of this test")

    def _fork(self, target: Callable[..., None], *args: Any) -> Any:
        process = _FORK.Process(target=target, args=args, daemon=True)
        process.start()
        self._everything.append(process)
        return process

    def start(self, number: int, world_size: int, program: Program) -> None:
        """Have a new process hold rank `number`."""
        line, theirs = _FORK.Pipe()
        self._processes[number] = self._fork(_run, program, Rank(number, world_size, self.store, theirs, self.maker))
        theirs.close()
        self._lines[number] = line

    def start_all(self, world_size: int, program: Program) -> None:
        for number in range(world_size):
            self.start(number, world_size, program)

    def say(self, word: Any, *numbers: int) -> None:
        for number in numbers or self._lines:
            self._lines[number].send(word)

    def hear(self, number: int) -> Any:
        """Return the next word of a rank; its exception, if that is what comes, fails the test."""
        assert self._lines[number].poll(WORD_S), f"rank {number} said nothing for {WORD_S} s"
        kind, word = self._lines[number].recv()
        assert kind == "said", f"rank {number} raised\n{word}"
        return word

    def hear_all(self) -> list[Any]:
        return [self.hear(number) for number in sorted(self._lines)]

    def signal(self, number: int, what: signal.Signals) -> None:
        os.kill(self._processes[number].pid, what)
        if what is signal.SIGKILL:
            self._processes[number].join(5)
            self._lines.pop(number).close()

    def end(self) -> None:
        for process in self._everything:
            process.kill()
            process.join(5)
        for line in self._lines.values():
            line.close()
        self._store_line.close()


def _serve_store(line: Connection) -> None:
    disable_dns_in_this_process()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line.send(store.port)
    signal.pause()


def _run(program: Program, rank: Rank) -> None:
    torch.set_num_threads(1)
    try:
        if rank.maker.torch_device != "cpu":
            torch.set_default_device(rank.maker.torch_device)
        program(rank)
    except BaseException:
        rank._line.send(("raised", traceback.format_exc()))
    os._exit(0)


@pytest.fixture
def ranks(maker: Maker) -> Iterator[Ranks]:
    """Ranks that have what the maker makes."""
    made = Ranks(maker)
    yield made
    made.end()


@pytest.fixture(scope="module")
def module_ranks(maker: Maker) -> Iterator[Ranks]:
    """The same for all tests of a module."""
    made = Ranks(maker)
    yield made
    made.end()
