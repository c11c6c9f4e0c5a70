"""Has the job's story read for operators, in a process of its own: to play a journal takes seconds of computing.

The journal is read and not what this controller remembers, so the story is whole after a takeover, too. It comes back
in words: the orders themselves hold the secrets of ranks and of their environment.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from ...protocol.time_limit import within
from ..opening import ControllerPlace
from .control_requests import Refused, Reply, StoryReply, StoryRequest
from .story_excerpt import StoryOrder

READ_S = 30.0  # then it is killed; millions of events are read in that
MOST_WAITING = 3  # requests; one more is being answered

_log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(StoryReply | Refused).decode
_encode = msgspec.msgpack.Encoder().encode

Answer = Callable[[Reply], None]


class Storyteller:
    """Answers requests for the story while `run` runs, one after the other."""

    def __init__(self, program: Sequence[str], place: ControllerPlace) -> None:
        """`program`: reads a StoryOrder from its input and prints the answer, both as MessagePack."""
        self._program = tuple(program)
        self._place = place
        self._asked: asyncio.Queue[tuple[StoryRequest, Answer]] = asyncio.Queue(MOST_WAITING)

    def tell(self, request: StoryRequest, answer: Answer) -> None:
        """Answer later, in the loop's thread, or at once that too many have asked."""
        try:
            self._asked.put_nowait((request, answer))
        except asyncio.QueueFull:
            answer(Refused("others have asked for the story, and are not answered yet; try again in some seconds"))

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            request, answer = await self._asked.get()
            answer(await self._read(request))

    async def _read(self, request: StoryRequest) -> Reply:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            return Refused(f"the story cannot be read: {self._program[0]} cannot be run: {error.strerror}")
        try:
            printed, _ = await within(READ_S, process.communicate(_encode(self._order(request))))
        except TimeoutError:
            return Refused(f"to read the story takes more than {READ_S:g} s; type it where the job's journal is")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        try:
            reply: StoryReply | Refused = _decode(printed)
        except msgspec.MsgspecError:
            _log.error("the process that reads the story ended with status %s and without it", process.returncode)
            return Refused(f"the process that reads the story ended with status {process.returncode}; see the log")
        return reply

    def _order(self, request: StoryRequest) -> StoryOrder:
        place = self._place
        folder = None if place.shared is None else str(place.shared.path)
        return StoryOrder(str(place.job_directory), place.etcd, folder, request.incident)
