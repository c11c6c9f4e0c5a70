"""Who may lead next, in etcd: keys that end by themselves, by leases of which etcd alone measures the time."""

import time

import msgspec

from ..election.succession import PREFERRED_S
from .client import Etcd, delete, put
from .place import EtcdPlace


class Pause(msgspec.Struct, frozen=True):
    """The key of a pause. `until_s`: for people; it is the lease that counts."""

    leader: str
    until_s: float


_decode = msgspec.json.Decoder(Pause).decode


class EtcdSuccession:
    """The wishes of admins, for the controllers of all machines. For one thread; see `Succession`."""

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
            return _decode(known.value)
        except msgspec.MsgspecError:
            return None
