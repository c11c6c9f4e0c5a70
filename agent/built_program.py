"""A process that is built ahead, from the inside: the script runs up to its train function and stops there for a rank.

What a replacement does between its fork and its first step is mostly the user's own: the script's imports, its model,
its optimizer. None of it depends on the fault, so a process can have done it before there is one. It takes no part in
the job until then: it has a black box of its own that nothing reads, and no line to its agent but the channel.
"""

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import NoReturn

import msgspec

from ..processor import built_ahead
from ..protocol.blackbox import BlackBox
from ..protocol.environment import SETTINGS
from ..protocol.types import JobSettings
from . import channel
from .program import hold_rank, run_program


def build_program(request: channel.RunProgram, end: socket.socket, log: int) -> NoReturn:
    """Run a program up to its train function, wait there for the rank, and then be its process.

    A program that ends before that ends this process, as in any other one. `log` is for what it prints until then.
    """
    settings = msgspec.json.decode(request.environment[SETTINGS], type=JobSettings)
    unread = BlackBox.create(int(request.environment["RANK"]), settings.black_box_bytes)
    black_box = os.dup(unread.fd)  # the program attaches it, and then it is the program's to close
    unread.close()
    built_ahead.hold_back(partial(_await_rank, end))
    run_program(request, black_box=black_box, log=log)


def _await_rank(end: socket.socket) -> Mapping[str, str]:
    """Say that the program is built, and wait for the rank. End when the agent closes the channel instead."""
    channel.send(end, channel.ProgramBuilt())
    while (received := channel.receive(end)) is not None and isinstance(received[0], channel.Ping):
        channel.send(end, channel.Pong())
    end.close()
    if received is None:
        os._exit(os.EX_OK)
    order, fds = received
    if not isinstance(order, channel.TakeRank) or len(fds) != 2:
        os._exit(os.EX_USAGE)
    sys.stdout.flush()
    sys.stderr.flush()
    hold_rank(order.environment, black_box=fds[0], log=fds[1])
    return os.environ
