"""The job's story for operators elsewhere: as much of it as one answer holds, read by a process of its own.

To play a journal takes seconds of computing, so `Storyteller` has a program read it. The program reads the journal and
not what this controller remembers, so the story is whole after a takeover, too. It comes back in words: the orders
themselves hold the secrets of ranks and of their environment.

An operator asks for an incident to learn what led to it, so of one its first events are kept, and of the whole job the
latest. How many are left out is counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ...protocol.compat import within
from ...protocol.own_programs import end
from ..etcd.place import EtcdPlace
from ..journal.reading import read_story
from ..opening import ControllerPlace
from ..story import StoryEntry
from .control_requests import Refused, Reply, StoryReply, StoryRequest

MOST_EVENTS = 20_000
MOST_BYTES = 4 * 1024 * 1024
LONGEST_EVENT = 65_536  # characters: an order to all of 10,000 ranks names each of them
_CUT = " ... (cut)"


class StoryOrder(msgspec.Struct, frozen=True):
    """A request to read a story: where the journal is, and the number of an incident, or all of it.

    The journal is in the folder, unless `etcd` has it.
    """

    folder: str
    etcd: EtcdPlace | None
    incident: int | None


def story_of(order: StoryOrder) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. Raises JournalError."""
    return read_story(order.etcd or order.folder)


def excerpt(story: Iterable[StoryEntry], incident: int | None, tell: Callable[[StoryEntry], str]) -> StoryReply:
    """Return what of a story fits one answer. `tell`: an event in words. Reads the story to its end."""
    counted = _Counted(story)
    if incident is not None:
        return _beginning((entry for entry in counted if incident in entry.incidents), tell, counted)
    latest = deque(counted, maxlen=MOST_EVENTS)
    told, room = deque[str](), MOST_BYTES
    for entry in reversed(latest):
        text = _bounded(tell(entry))
        room -= len(text.encode())
        if room < 0:
            break
        told.appendleft(text)
    return StoryReply(tuple(told), counted.first, earlier_left_out=counted.count - len(told))


def _beginning(story: Iterable[StoryEntry], tell: Callable[[StoryEntry], str], counted: "_Counted") -> StoryReply:
    told: list[str] = []
    room, left_out = MOST_BYTES, 0
    for entry in story:
        if left_out or len(told) >= MOST_EVENTS:
            left_out += 1
            continue
        text = _bounded(tell(entry))
        room -= len(text.encode())
        if room >= 0:
            told.append(text)
        else:
            left_out = 1
    return StoryReply(tuple(told), counted.first, later_left_out=left_out)


class _Counted:
    """A story that is read once: how many events it has had so far, and the number of the first."""

    def __init__(self, story: Iterable[StoryEntry]) -> None:
        self._story = story
        self.count = 0
        self.first = 1

    def __iter__(self) -> Iterator[StoryEntry]:
        for entry in self._story:
            if not self.count:
                self.first = entry.number
            self.count += 1
            yield entry


def _bounded(text: str) -> str:
    return text if len(text) <= LONGEST_EVENT else f"{text[:LONGEST_EVENT]}{_CUT}"


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
            await end(process)
        try:
            reply: StoryReply | Refused = _decode(printed)
        except msgspec.MsgspecError:
            _log.error("the process that reads the story ended with status %s and without it", process.returncode)
            return Refused(f"the process that reads the story ended with status {process.returncode}; see the log")
        return reply

    def _order(self, request: StoryRequest) -> StoryOrder:
        place = self._place
        folder = place.job_directory if place.shared is None else place.shared.path
        return StoryOrder(str(folder), place.etcd, request.incident)
