"""Keep the book of lasting hardware faults: one entry for each that was asserted and has not recovered.

Pure bookkeeping for the recovery machine. Detectors repeat themselves, see the same thing twice, and speak of nodes
that the job has nothing to do with; the book keeps what each of them said last, tells news from repetition, counts how
often a code came on a device, and answers what speaks against a node.
"""

from dataclasses import dataclass, field

import msgspec

from ...policies.fault_codes import TREATMENTS, Treatment
from ...policies.schema import TooOften
from ...protocol.incidents import StandingFault
from ...protocol.types import Assertion, FaultLevel, FaultReport

MAX_STANDING = 10_000  # a cluster's documents speak of all its nodes; the oldest entry goes
MAX_OF_ONE = 5_000  # of one detector: its own oldest goes, so that none can push out what others have seen
MAX_PUT_OFF = 1000  # faults that wait for a world
MAX_COUNTED = 10_000  # devices and codes whose occurrences are counted

# Nothing but the detector's word that it is over makes such a device good again, however it was asserted.
_LASTING = frozenset({Treatment.LEAVE, Treatment.CLOSE})
UNFIT = frozenset(Treatment) - {Treatment.NOTE}  # a fault that keeps a node without ranks from being chosen

Key = tuple[str, ...]


@dataclass
class FaultBook:
    """All faults that stand, in the order in which they came. `devices_per_node`: those that ranks can be on.

    `visible`: of a node, the machine's numbers of its devices, in the order of local ranks.
    """

    devices_per_node: int
    too_often: tuple[TooOften, ...] = ()
    put_off: list[FaultReport] = field(default_factory=list)  # came while there was no world to recover
    visible: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: dict[Key, StandingFault] = field(default_factory=dict)
    _keys: dict[str, dict[Key, None]] = field(default_factory=dict)  # by detector, the oldest first
    _times: dict[Key, list[float]] = field(default_factory=dict)

    def enter(self, report: FaultReport, now: float) -> tuple[FaultReport, bool]:
        """Enter what occurred; return it, at a higher level if it came too often, and whether it is news.

        It is news when the detector had not said it before, or says now that it is worse.
        """
        key = _key(report)
        known = self.faults.get(key)
        if known is None:
            report = self._counted(report, now)
        elif TREATMENTS[report.level] is TREATMENTS[known.report.level] or _raised(known.report):
            self.faults[key] = msgspec.structs.replace(known, times=known.times + 1)
            return known.report, False
        if report.assertion is Assertion.OCCUR or TREATMENTS[report.level] in _LASTING:
            since_s = now if known is None else known.since_s
            self._stand(key, StandingFault(report, since_s, 1 if known is None else known.times + 1))
        return report, True

    def put_off_for_later(self, report: FaultReport) -> None:
        """Keep a fault for when there is a world again; of too many the oldest goes."""
        self.put_off = [*self.put_off[-MAX_PUT_OFF + 1 :], report]

    def take_put_off(self) -> list[FaultReport]:
        """Return the faults that were kept, once."""
        reports, self.put_off = self.put_off, []
        return reports

    def clear(self, report: FaultReport) -> StandingFault | None:
        """Remove what has recovered, and return it; None when the book does not have it."""
        return self._remove(_key(report))

    def on(self, node: str, treatments: frozenset[Treatment], device: int | None = None) -> list[FaultReport]:
        """Return what stands on a node and is to be treated so; with `device`, what concerns that one.

        A fault of a device that no rank can be on does not count.
        """
        return [
            fault.report
            for fault in self.faults.values()
            if fault.report.node == node
            and TREATMENTS[fault.report.level] in treatments
            and self.concerns_ranks(fault.report)
            and (device is None or fault.report.device in {None, device})
        ]

    def concerns_ranks(self, report: FaultReport) -> bool:
        """Say whether a rank can be on the device of a report, or the whole node is meant."""
        return report.device is None or report.device in self.devices_of(report.node)

    def devices_of(self, node: str | None) -> tuple[int, ...]:
        """Return the machine's number of the device of each local rank."""
        visible = self.visible.get(node or "", ())[: self.devices_per_node]
        return visible or tuple(range(self.devices_per_node))

    def device_of(self, node: str | None, rank: int) -> int:
        """Return the number of the device that a rank has on a node; one beyond those that it can see, if too few."""
        devices, place = self.devices_of(node), rank % self.devices_per_node
        return devices[place] if place < len(devices) else max(devices) + 1 + place

    def passing(self, node: str, rank: int) -> FaultReport | None:
        """Return a fault that has to end before a process of the rank is started on the node."""
        if not self.faults:
            return None
        device = self.device_of(node, rank)
        return next(iter(self.on(node, frozenset({Treatment.RESTART}), device)), None)

    def standing(self) -> tuple[StandingFault, ...]:
        """Return every entry, the oldest first."""
        return tuple(self.faults.values())

    def _stand(self, key: Key, fault: StandingFault) -> None:
        """Enter a fault as the latest, and strike out the oldest where there are too many."""
        self._remove(key)
        self.faults[key] = fault
        of_one = self._keys.setdefault(key[0], {})
        of_one[key] = None
        if len(of_one) > MAX_OF_ONE:
            self._remove(next(iter(of_one)))
        if len(self.faults) > MAX_STANDING:
            self._remove(next(iter(self.faults)))

    def _remove(self, key: Key) -> StandingFault | None:
        fault = self.faults.pop(key, None)
        if fault is not None:
            del self._keys[key[0]][key]
            if not self._keys[key[0]]:
                del self._keys[key[0]]
        return fault

    def _counted(self, report: FaultReport, now: float) -> FaultReport:
        """Note one more occurrence, and raise the level of what came too often."""
        most = max((rule.times for rule in self.too_often), default=1)
        for rule in self.too_often:
            if report.code is None or report.code.lower() not in {code.lower() for code in rule.codes}:
                continue
            key = (report.node or "", str(report.device), report.code.lower())
            times = self._times.setdefault(key, [])
            times.append(now)
            del times[:-most]
            while len(self._times) > MAX_COUNTED:
                del self._times[next(iter(self._times))]
            recent = sum(now - at_s <= rule.window_s for at_s in times)
            if recent >= rule.times:
                meaning = f"{recent} times within {rule.window_s:g} s, {rule.times} are too often"
                meaning = f"{report.meaning}; {meaning}" if report.meaning else meaning
                return msgspec.structs.replace(report, level=FaultLevel.MANUALLY_SEPARATE_NPU, meaning=meaning)
        return report


def _raised(report: FaultReport) -> bool:
    """Keep a level that counting has raised until the fault recovers, whatever its detector repeats."""
    return report.level is FaultLevel.MANUALLY_SEPARATE_NPU


def _key(report: FaultReport) -> Key:
    if report.fault_id:
        return (report.seen_by, report.fault_id)
    return (report.seen_by, report.node or "", str(report.device), report.code or report.level.value)
