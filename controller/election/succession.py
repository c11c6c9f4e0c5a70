"""The next leader, as an admin wants it: a controller that is preferred, and a pause in which no standby takes over.

It is kept where the controllers meet, beside the lead itself, since it counts when no controller leads that could be
asked. Both end by themselves: a preferred controller may have died, and a pause may have been forgotten.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from ...protocol.errors import JournalError
from ...protocol.private_files import replace_file
from ..etcd.client import Etcd, delete, put
from ..etcd.place import EtcdPlace

PREFERRED_S = 3  # to a preferred controller the lead is left for so long
NAME = "succession.json"


class Succession(Protocol):
    """The wishes that the leader writes and standbys read. All methods raise JournalError when that cannot be done."""

    def prefer(self, name: str) -> None:
        """Leave the lead to this controller for PREFERRED_S."""

    def pause(self, leader: str, for_s: int) -> None:
        """Let no standby but `leader`, which may have been restarted, take over for so long; 0: end the pause."""

    def paused_until_s(self) -> float:
        """Return when the pause ends, in wall-clock seconds; 0: there is none."""

    def admits(self, name: str, *, standby: bool) -> bool:
        """Say whether a controller may take a lead that is free. A pause holds up only those that stand by."""


class SuccessionRecord(msgspec.Struct, frozen=True):
    """The wish of an admin. Wall-clock seconds: one from the future, after a clock was set back, does not count."""

    preferred: str = ""
    preferred_from_s: float = 0.0
    leader: str = ""
    paused_from_s: float = 0.0
    paused_until_s: float = 0.0


_decode = msgspec.json.Decoder(SuccessionRecord).decode


class FileSuccession:
    """In a file of the run directory, for the controllers of one host."""

    def __init__(self, run_directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = run_directory / NAME
        self._clock = clock

    def prefer(self, name: str) -> None:
        """Leave the lead to this controller; see `Succession`."""
        self._write(msgspec.structs.replace(self._read(), preferred=name, preferred_from_s=self._clock()))

    def pause(self, leader: str, for_s: int) -> None:
        """Let no standby take over; see `Succession`."""
        now = self._clock()
        wishes = msgspec.structs.replace(
            self._read(), leader=leader, paused_from_s=now, paused_until_s=now + for_s if for_s else 0.0
        )
        self._write(wishes)

    def paused_until_s(self) -> float:
        """Return when the pause ends; see `Succession`."""
        wishes = self._read()
        return wishes.paused_until_s if wishes.paused_from_s <= self._clock() < wishes.paused_until_s else 0.0

    def admits(self, name: str, *, standby: bool) -> bool:
        """Say whether a controller may lead; see `Succession`. What cannot be read keeps none from it."""
        wishes, now = self._read(), self._clock()
        if wishes.preferred and 0 <= now - wishes.preferred_from_s < PREFERRED_S:
            return name == wishes.preferred
        return not standby or name == wishes.leader or not wishes.paused_from_s <= now < wishes.paused_until_s

    def _read(self) -> SuccessionRecord:
        try:
            return _decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return SuccessionRecord()

    def _write(self, wishes: SuccessionRecord) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(wishes))
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be written: {error.strerror}. Make room there.") from error


class Pause(msgspec.Struct, frozen=True):
    """The key of a pause. `until_s`: for people; it is the lease that counts."""

    leader: str
    until_s: float


_decode_pause = msgspec.json.Decoder(Pause).decode


class EtcdSuccession:
    """In etcd, for the controllers of all machines: keys that end by themselves, by leases that etcd alone measures.

    For one thread.
    """

    def __init__(self, place: EtcdPlace) -> None:
        self._place = place
        self._etcd = Etcd(place)

    def prefer(self, name: str) -> None:
        """Leave the lead to this controller; see `Succession`."""
        self._etcd.change([], [put(self._place.preferred, name.encode(), self._etcd.grant(PREFERRED_S))])

    def pause(self, leader: str, for_s: int) -> None:
        """Let no standby take over; see `Succession`."""
        if not for_s:
            self._etcd.change([], [delete(self._place.pause)])
            return
        value = msgspec.json.encode(Pause(leader, time.time() + for_s))
        self._etcd.change([], [put(self._place.pause, value, self._etcd.grant(for_s))])

    def paused_until_s(self) -> float:
        """Return when the pause ends; see `Succession`."""
        pause = self._pause()
        return 0.0 if pause is None else pause.until_s

    def admits(self, name: str, *, standby: bool) -> bool:
        """Say whether a controller may lead; see `Succession`."""
        preferred = self._etcd.get(self._place.preferred)
        if preferred is not None:
            return preferred.value == name.encode()
        pause = self._pause() if standby else None
        return pause is None or pause.leader == name

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._etcd.close()

    def _pause(self) -> Pause | None:
        known = self._etcd.get(self._place.pause)
        if known is None:
            return None
        try:
            return _decode_pause(known.value)
        except msgspec.MsgspecError:
            return None
