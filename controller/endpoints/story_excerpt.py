"""As much of a job's story as one answer holds, read from the journal wherever it is kept.

What led to an incident is what one asks an incident for, so of one its first events are kept. Of the whole job it is
the latest. How many are left out is counted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ..etcd.place import EtcdPlace
from ..journal.reading import read_story
from ..story import StoryEntry
from ..volume.reading import read_story as read_story_on_volume
from .control_requests import StoryReply

MOST_EVENTS = 20_000
MOST_BYTES = 4 * 1024 * 1024
LONGEST_EVENT = 65_536  # characters: an order to all of 10,000 ranks names each of them
_CUT = " ... (cut)"


class StoryOrder(msgspec.Struct, frozen=True):
    """Which story to read: where the journal is, and the number of an incident, or all of it.

    The journal is in the job directory, unless `etcd` or a `folder` has it.
    """

    job_directory: str
    etcd: EtcdPlace | None
    folder: str | None
    incident: int | None


def story_of(order: StoryOrder) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. Raises JournalError."""
    if order.folder is not None:
        return read_story_on_volume(Path(order.folder))
    if order.etcd is None:
        return read_story(order.job_directory)
    from ..etcd.reading import read_story as read_story_in_etcd

    return read_story_in_etcd(order.etcd)


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
