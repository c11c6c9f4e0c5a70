"""Checks a node in a process of its own: how long a matrix product takes, and an exchange with another node.

The product is computed on the job's device, and the exchange goes over the job's communicator, as a world of two ranks.
Both are small: they show a device or a link that does not work, or is slower by orders of magnitude, and measure
nothing. The agent starts `python -m midstep.agent.node_check AGENT_PID`, sends it a `CheckOrder`, and receives
`CheckFigures`.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from ..communicators import communicator_named
from ..communicators.libraries import HAS_TORCH
from ..devices import device_named
from ..platforms.processes import ChildReaper
from ..protocol.compat import within
from ..protocol.errors import AgentError, MidstepError
from ..protocol.messages import CheckNode, NodeChecked
from ..protocol.types import JobSettings
from . import channel
from .fork_server_host import receive, spawn
from .linux import die_with_parent, name_process

MATRIX_ROWS = 1024
PRODUCTS = 8
EXCHANGED_BYTES = 16 << 20
START_S = 60.0  # to import torch, and to wait for a partner that does so; no part of what is measured
_WITHOUT_DEVICE_OF_ITS_OWN = ("cpu", "fake")

_log = logging.getLogger(__name__)


class NodeChecker:
    """Carries out the controller's latest `CheckNode`. Belongs to the running loop."""

    def __init__(self, node: str, reaper: ChildReaper, *, post: Callable[[NodeChecked], object]) -> None:
        self._node = node
        self._reaper = reaper
        self._post = post
        self._check = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, check: CheckNode, settings: JobSettings, environment: Mapping[str, str]) -> None:
        """Begin a check in place of an earlier one; one that is under way is not begun again."""
        if check.check == self._check and self._task is not None and not self._task.done():
            return
        self.close()
        self._check = check.check
        self._task = asyncio.get_running_loop().create_task(self._run(check, settings, environment))

    def close(self) -> None:
        """End the check that is under way. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, check: CheckNode, settings: JobSettings, environment: Mapping[str, str]) -> None:
        limit_s = START_S + 2 * check.within_s
        try:
            figures = await within(limit_s, self._figures(channel.CheckOrder(check, settings), environment))
        except TimeoutError:
            figures = channel.CheckFigures(error=f"no answer within {limit_s:.0f} s")
        except AgentError as error:
            figures = channel.CheckFigures(error=str(error))
        _log.info("check %d of the node: %s", check.check, figures)
        self._post(NodeChecked(self._node, check.check, figures.product_s, figures.exchange_s, figures.error))

    async def _figures(self, order: channel.CheckOrder, environment: Mapping[str, str]) -> channel.CheckFigures:
        with self._reaper.expecting():
            pid, end = spawn("node_check", environment)
            process = self._reaper.watch(pid, lambda status: None)
        try:
            end.setblocking(False)
            channel.send(end, order)
            received = await receive(end)
        finally:
            end.close()
            process.kill()
        if received is None or not isinstance(received[0], channel.CheckFigures):
            raise AgentError("the process that checks the node has ended")
        return received[0]


def measure(order: channel.CheckOrder) -> channel.CheckFigures:
    """Carry out an order in this process. What fails is said in the figures."""
    product_s = exchange_s = None
    errors = []
    try:
        if order.settings.device not in _WITHOUT_DEVICE_OF_ITS_OWN:
            device_named(order.settings.device).prepare(0, os.environ, order.settings.link_up_s)
        if order.check.computes:
            product_s = _product(order.settings.device)
    except (RuntimeError, OSError, MidstepError) as error:
        errors.append(str(error))
    try:
        if order.check.store is not None:
            exchange_s = _exchange(order)
    except (RuntimeError, OSError, MidstepError) as error:
        errors.append(str(error))
    return channel.CheckFigures(product_s, exchange_s, "; ".join(errors))


def _product(device: str) -> float:
    """Return the seconds that a matrix product takes on a device, once it has done a small one. Raises RuntimeError."""
    place = "cpu" if device in _WITHOUT_DEVICE_OF_ITS_OWN else device
    if not HAS_TORCH:
        import numpy as np

        matrix = np.ones((MATRIX_ROWS, MATRIX_ROWS), dtype=np.float32)
        began_s = time.monotonic()
        right = all(float((matrix @ matrix)[0, -1]) == MATRIX_ROWS for _ in range(PRODUCTS))
    else:
        import torch

        float((torch.ones(8, 8, device=place) @ torch.ones(8, 8, device=place)).sum())
        ones = torch.ones(MATRIX_ROWS, MATRIX_ROWS, device=place)
        began_s = time.monotonic()
        right = all(float((ones @ ones)[0, -1]) == MATRIX_ROWS for _ in range(PRODUCTS))
    if not right:
        raise RuntimeError(f"a matrix product on the {place} is wrong")
    return time.monotonic() - began_s


def _exchange(order: channel.CheckOrder) -> float:
    """Return the seconds that an exchange with the partner takes, once both are there. Raises MidstepError."""
    check = order.check
    communicator = communicator_named(order.settings.communicator)
    try:
        communicator.init(
            rank=check.number,
            world_size=2,
            generation=check.check,
            store=check.store,
            collective_s=START_S + check.within_s,
            link_up_s=START_S,
        )
        communicator.barrier()
        began_s = time.monotonic()
        other = 1 - check.number
        communicator.swap(bytes(EXCHANGED_BYTES), other, other)
        return time.monotonic() - began_s
    finally:
        communicator.close()


def main() -> NoReturn:
    """Carry out the order that comes over the channel, and answer there."""
    die_with_parent(int(sys.argv[1]))
    name_process("midstep-check")
    end = socket.socket(fileno=channel.CHANNEL_FD)
    received = channel.receive(end)
    if received is not None and isinstance(received[0], channel.CheckOrder):
        channel.send(end, measure(received[0]))
    os._exit(os.EX_OK)  # threads of a communicator whose link-up has failed may still wait for its partner


if __name__ == "__main__":
    main()
