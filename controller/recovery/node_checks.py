"""Pair nodes for their checks, and judge their figures. Pure.

A node computes a matrix product by itself, and exchanges bytes with a partner. A product that fails speaks against its
own node. An exchange that fails speaks against both nodes, so each is paired again, with a node that is known to be
good where there is one; a node whose exchange fails a second time is left.
"""

from dataclasses import dataclass, field

from ...protocol.messages import NodeChecked


@dataclass
class Check:
    """One check under way. `checked`: those of `nodes` that it is about; the other one, in use, only exchanges."""

    number: int
    nodes: tuple[str, ...]
    checked: tuple[str, ...]
    answers: dict[str, NodeChecked] = field(default_factory=dict)

    def partner_of(self, name: str) -> str:
        """Return the other node; empty when there is none."""
        return next((other for other in self.nodes if other != name), "")


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
        if len(check.answers) < len(check.nodes):
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
        against = {name: _product_failure(check.answers[name], within_s) for name in check.checked}
        for name in check.checked:
            other = check.partner_of(name)
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


def _product_failure(answer: NodeChecked, within_s: float) -> str:
    if answer.product_s is None:
        return f"a matrix product failed: {answer.error or 'no reason is known'}"
    if answer.product_s > within_s:
        return f"a matrix product took {answer.product_s:.1f} s, more than {within_s:g} s (node_check.within_s)"
    return ""


def _exchange_failure(check: Check, partner: str, within_s: float) -> str:
    times = [answer.exchange_s for answer in check.answers.values()]
    took = max((time for time in times if time is not None), default=0.0)
    if None in times:
        error = next((answer.error for answer in check.answers.values() if answer.exchange_s is None), "")
        return f"an exchange with {partner} failed: {error or 'no reason is known'}"
    if took > within_s:
        return f"an exchange with {partner} took {took:.1f} s, more than {within_s:g} s (node_check.within_s)"
    return ""
