"""Keep what speaks against the use of a node: the book of hardware faults that stand, and checks that are not passed.

Pure bookkeeping for the recovery machine. The book has one entry for each fault that was asserted and has not
recovered. Detectors repeat themselves, see the same thing twice, and speak of nodes that the job has nothing to do
with; the book keeps what each of them said last, tells news from repetition, counts how often a code came on a device,
and answers what speaks against a node.

In its check a node computes a matrix product by itself, and exchanges bytes with a partner. A product that fails speaks
against its own node. An exchange that fails speaks against both nodes, so each is paired again, with a node that is
known to be good where there is one; a node whose exchange fails a second time is left.
"""

from dataclasses import dataclass, field

import msgspec

from ...policies.fault_codes import TREATMENTS, Treatment
from ...policies.schema import TooOften
from ...protocol.incidents import StandingFault
from ...protocol.messages import NodeChecked
from ...protocol.types import Assertion, FaultLevel, FaultReport

MAX_STANDING = 10_000  # a cluster's documents speak of all its nodes; the oldest entry goes
MAX_OF_ONE = 5_000  # of one detector: its own oldest goes, so that none can push out what others have seen
MAX_PUT_OFF = 1000  # faults that wait for a world
MAX_COUNTED = 10_000  # devices and codes whose occurrences are counted
SAME_EVENT_S = 35.0  # `npu-smi` is asked every 5 s and has 30 s to answer; another detector may have told at once
RAISED = FaultLevel.MANUALLY_SEPARATE_NPU  # of a fault that came too often; it stays so until that recovers
_TOO_OFTEN = "are too often"  # ends its meaning: detectors report this level, too

# Nothing but the detector's word that it is over makes such a device good again, however it was asserted.
_LASTING = frozenset({Treatment.LEAVE, Treatment.CLOSE})
UNFIT = frozenset(Treatment) - {Treatment.NOTE}  # a fault that keeps a node without ranks from being chosen

Key = tuple[str, ...]


# --- faults that stand ------------------------------------------------------------------------------------------------


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
    _seen_by: dict[Key, str] = field(default_factory=dict)  # the latest of these times

    def enter(self, report: FaultReport, now: float) -> tuple[FaultReport, bool]:
        """Enter what occurred; return it, at a higher level if it came too often, and whether it is news.

        It is news when the detector had not said it before, or says now that it is worse.
        """
        key = _key(report)
        known = self.faults.get(key)
        if known is None:
            report = self._counted(report, now)
        elif known.report.level is RAISED or TREATMENTS[report.level] is TREATMENTS[known.report.level]:
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
        return next(iter(self.on(node, frozenset({Treatment.RESTART}), self.device_of(node, rank))), None)

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
        code = (report.code or "").lower()
        rules = [rule for rule in self.too_often if code in {each.lower() for each in rule.codes}]
        times = self._noted((report.node or "", str(report.device), code), report.seen_by, now) if rules else []
        for rule in rules:
            recent = sum(now - at_s <= rule.window_s for at_s in times)
            if recent >= rule.times:
                meaning = f"{recent} times within {rule.window_s:g} s, {rule.times} {_TOO_OFTEN}"
                meaning = f"{report.meaning}; {meaning}" if report.meaning else meaning
                return msgspec.structs.replace(report, level=RAISED, meaning=meaning)
        return report

    def _noted(self, key: Key, seen_by: str, now: float) -> list[float]:
        """Note an occurrence, unless another detector has just told of the same; return when there was one."""
        times = self._times.setdefault(key, [])
        if not times or self._seen_by.get(key) == seen_by or now - times[-1] > SAME_EVENT_S:
            times.append(now)
            self._seen_by[key] = seen_by
        del times[: -max(rule.times for rule in self.too_often)]
        while len(self._times) > MAX_COUNTED:
            oldest = next(iter(self._times))
            del self._times[oldest]
            self._seen_by.pop(oldest, None)  # a snapshot of an earlier release has none
        return times


def came_too_often(report: FaultReport) -> bool:
    """Say whether the job itself has raised the level of a fault."""
    return report.level is RAISED and report.meaning.endswith(_TOO_OFTEN)


def _key(report: FaultReport) -> Key:
    if report.fault_id:
        return (report.seen_by, report.fault_id)
    return (report.seen_by, report.node or "", str(report.device), report.code or report.level.value)


# --- checks of nodes, before they get ranks ---------------------------------------------------------------------------


@dataclass
class Check:
    """One check under way. `checked`: those of `nodes` that it is about; the other one, in use, only exchanges."""

    number: int
    nodes: tuple[str, ...]
    checked: tuple[str, ...]
    answers: dict[str, NodeChecked] = field(default_factory=dict)

    def product_failure(self, name: str, within_s: float) -> str:
        """Return why a node's matrix product speaks against it; empty: it does not, or none has been heard of."""
        answer = self.answers.get(name)
        if name not in self.checked or answer is None:
            return ""
        return _failure("a matrix product", answer.product_s, answer.error, within_s)


@dataclass
class NodeChecks:
    """All checks that wait or run. `failed_with`: the partner of a node whose exchange has failed once."""

    last: int = 0
    waiting: list[str] = field(default_factory=list)
    running: list[Check] = field(default_factory=list)
    failed_with: dict[str, str] = field(default_factory=dict)

    def is_open(self, name: str) -> bool:
        """Return whether a node is still to pass its check."""
        return name in self.waiting or any(name in check.checked for check in self.running)

    def add(self, name: str) -> None:
        """Have a node checked."""
        if not self.is_open(name):
            self.waiting.append(name)

    def forget(self, name: str) -> None:
        """Drop a node that is gone; its partner is checked with another one."""
        self.failed_with.pop(name, None)
        if name in self.waiting:
            self.waiting.remove(name)
        for check in [each for each in self.running if name in each.nodes]:
            self.running.remove(check)
            self.waiting.extend(other for other in check.checked if other != name)

    def begin(self, good: list[str], *, alone: bool) -> Check | None:
        """Begin the next check that can begin; None when there is none.

        Args:
            good: Nodes that may be partners, the preferred ones first.
            alone: Whether a node is checked without a partner while there is none.
        """
        busy = {name for check in self.running for name in check.nodes}
        free = [name for name in good if name not in busy]
        for name in self.waiting:
            partner = self._partner(name, free)
            if partner or (alone and not good and not self.running and len(self.waiting) == 1):
                return self._begin(name, partner)
        return None

    def take(self, answer: NodeChecked, within_s: float) -> dict[str, str]:
        """Take in an answer. Returns the nodes decided on, each with the reason against it; empty: it has passed."""
        check = next((each for each in self.running if each.number == answer.check), None)
        if check is None or answer.node not in check.nodes:
            return {}
        check.answers[answer.node] = answer
        exchanges = answer.exchange_s is not None or not check.product_failure(answer.node, within_s)
        if len(check.answers) < len(check.nodes) and exchanges:  # else its partner would wait for it in vain
            return {}
        self.running.remove(check)
        return self._judge(check, within_s)

    def _partner(self, name: str, free: list[str]) -> str:
        others = [other for other in self.waiting if other != name]
        before = self.failed_with.get(name)
        candidates = [*others, *free] if before is None else [*free, *others]
        best = next((other for other in candidates if other != before), "")
        if best or self.running:
            return best
        return before if before in candidates else ""

    def _begin(self, name: str, partner: str) -> Check:
        nodes = (name, partner) if partner else (name,)
        self.last += 1
        check = Check(self.last, nodes, tuple(each for each in nodes if each in self.waiting))
        self.running.append(check)
        for each in check.checked:
            self.waiting.remove(each)
        return check

    def _judge(self, check: Check, within_s: float) -> dict[str, str]:
        verdicts: dict[str, str] = {}
        against = {name: check.product_failure(name, within_s) for name in check.checked}
        for name in check.checked:
            other = next((each for each in check.nodes if each != name), "")
            trouble = _exchange_failure(check, other, within_s) if other else ""
            if against[name] or not trouble:
                verdicts[name] = against[name]
            elif against.get(other):
                self.waiting.append(name)  # its partner is at fault
            elif name in self.failed_with:
                verdicts[name] = f"{trouble}, after one with {self.failed_with[name]} had failed"
            else:
                self.failed_with[name] = other
                self.waiting.append(name)
        for name in verdicts:
            self.failed_with.pop(name, None)
        return verdicts


def _exchange_failure(check: Check, partner: str, within_s: float) -> str:
    worst = max(check.answers.values(), key=lambda each: (each.exchange_s is None, each.exchange_s or 0.0))
    return _failure(f"an exchange with {partner}", worst.exchange_s, worst.error, within_s)


def _failure(what: str, took_s: float | None, error: str, within_s: float) -> str:
    """Return why a measurement speaks against a node; `took_s` is None where it failed. Empty: it does not."""
    if took_s is None:
        return f"{what} failed: {error or 'no reason is known'}"
    return f"{what} took {took_s:.1f} s, more than {within_s:g} s (node_check.within_s)" if took_s > within_s else ""
