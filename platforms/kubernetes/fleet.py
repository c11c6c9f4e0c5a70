"""Reads pods and hosts from the API's objects, and tells which nodes are lost, are going, or stay after all. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ...protocol.compat import StrEnum
from ...protocol.messages import NodeGoing, NodeLost, NodeStaying
from . import names

Word = NodeLost | NodeGoing | NodeStaying
# Whether an agent lives is heard from itself: these say only what Kubernetes has not heard.
_NOT_A_REMOVAL = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
# Taints that say that a host will be removed, though they evict nothing themselves.
_REMOVALS = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})
_NO_EXECUTE = "NoExecute"
_SIGNALS = 128
_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})
_STARTED_AGAIN = "CrashLoopBackOff"  # how it has ended says more


class PodPhase(StrEnum):
    """The phase of a pod, as far as it matters here."""

    PENDING = "Pending"
    RUNNING = "Running"
    ENDED = "Ended"  # Succeeded or Failed: its agent has ended


class PodReading(msgspec.Struct, frozen=True):
    """A node's pod. `end`: how it ended, in words. `going_s`: it is being deleted, and gets so long from then on."""

    node: str
    name: str
    phase: PodPhase
    host: str = ""
    address: str = ""
    end: str = ""
    going_s: float | None = None
    waits_for: str = ""  # why it does not run yet
    uid: str = ""


class _Member(msgspec.Struct):
    """A node of the job, and what the controller was told of it."""

    pod: PodReading | None = None  # None: its pod was asked for, and has not been seen
    deleted: bool = False  # by the controller, which knows that it is gone
    lost: bool = False
    going: str = ""


class HostReading(msgspec.Struct, frozen=True):
    """A machine of the cluster. `leaving`: why pods will leave it, or empty."""

    name: str
    leaving: str = ""


class PodFleet:
    """All nodes that this platform has had. What is seen goes in, what the controller has to know comes out, once."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._leaving: dict[str, str] = {}  # host -> why
        self.ended = False  # the job: agents leave by themselves

    def nodes(self) -> list[str]:
        """Return the nodes that are there, or on their way."""
        return [name for name, member in self._members.items() if not member.deleted and not member.lost]

    def pods(self) -> list[str]:
        """Return the names of all pods that are in the API, whatever their nodes are."""
        return [member.pod.name for member in self._members.values() if member.pod is not None]

    def pod(self, node: str) -> PodReading | None:
        """Return the pod of a node that is in the API."""
        member = self._members.get(node)
        return None if member is None else member.pod

    def has_running(self) -> bool:
        """Say whether the agent of some pod has not ended."""
        return any(
            member.pod is not None and member.pod.phase is not PodPhase.ENDED for member in self._members.values()
        )

    def is_running(self, node: str) -> bool:
        """Say whether the pod of a node runs."""
        member = self._members.get(node)
        return member is not None and member.pod is not None and member.pod.phase is PodPhase.RUNNING

    def is_known(self, node: str) -> bool:
        """Say whether there is a node of this name, or was one."""
        return node in self._members

    def expect(self, node: str) -> None:
        """Take note that a pod is about to be made for a node."""
        self._members.setdefault(node, _Member())

    def forget(self, node: str) -> None:
        """Take note that there will be no pod for a node after all."""
        member = self._members.get(node)
        if member is not None and member.pod is None:
            del self._members[node]

    def delete(self, node: str) -> PodReading | None:
        """Take note that the controller has a node deleted; return the pod that it has, if any."""
        member = self._members.setdefault(node, _Member())
        member.deleted = True
        return member.pod

    def isolates(self, node: str) -> str:
        """Return the host that a node is left on by the controller's own will, or "".

        A host that Kubernetes itself empties, or whose pod ended or was deleted by others, may be used again.
        """
        member = self._members.get(node)
        pod = None if member is None else member.pod
        if member is None or pod is None or member.lost or member.going or pod.phase is not PodPhase.RUNNING:
            return ""
        return pod.host

    def take_pod(self, pod: PodReading, now: float) -> list[Word]:
        """Take a pod as it is now."""
        if not pod.node:
            return []
        member = self._members.setdefault(pod.node, _Member())
        member.pod = pod
        if pod.phase is PodPhase.ENDED:
            return self._lost(pod.node, f"its pod ended: {pod.end}", now)
        return self._look(pod.node)

    def take_removed(self, pod: PodReading, now: float) -> list[Word]:
        """Take that a pod is not in the API any more."""
        member = self._members.setdefault(pod.node, _Member())
        member.pod = None
        return self._lost(pod.node, "its pod was deleted", now)

    def take_all(self, pods: Iterable[PodReading], now: float) -> list[Word]:
        """Take a listing: what has been seen and is not in it was removed meanwhile."""
        listed = {pod.node: pod for pod in pods if pod.node}
        gone = [member.pod for name, member in self._members.items() if member.pod is not None and name not in listed]
        words = [word for pod in listed.values() for word in self.take_pod(pod, now)]
        return [*words, *(word for pod in gone for word in self.take_removed(pod, now))]

    def take_host(self, host: HostReading) -> list[Word]:
        """Take a host as it is now."""
        if host.leaving:
            self._leaving[host.name] = host.leaving
        else:
            self._leaving.pop(host.name, None)
        there = [name for name, member in self._members.items() if member.pod and member.pod.host == host.name]
        return [word for name in there for word in self._look(name)]

    def take_hosts(self, hosts: Iterable[HostReading]) -> list[Word]:
        """Take a listing of hosts."""
        return [word for host in hosts for word in self.take_host(host)]

    def _look(self, node: str) -> list[Word]:
        """Return what follows from a pod that has not ended, and from its host."""
        member = self._members[node]
        pod = member.pod
        if pod is None or member.deleted or member.lost or self.ended:
            return []
        why, within_s = self._leaving.get(pod.host, ""), None
        if pod.going_s == 0:  # by force: it is about to be lost
            return []
        if pod.going_s is not None:
            why, within_s = "its pod is being deleted", pod.going_s
        if why == member.going:
            return []
        member.going = why
        return [NodeGoing(node=node, reason=why, within_s=within_s)] if why else [NodeStaying(node=node)]

    def _lost(self, node: str, reason: str, now: float) -> list[Word]:
        member = self._members[node]
        if member.deleted or member.lost or self.ended:
            return []
        member.lost = True
        return [NodeLost(node=node, reason=reason, at_s=now)]


def read_pod(pod: Mapping[str, Any]) -> PodReading:
    """Return what the pod of an agent is."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    phase = _phase(status)
    going = metadata.get("deletionTimestamp") is not None
    return PodReading(
        node=(metadata.get("labels") or {}).get(names.NODE, ""),
        name=metadata["name"],
        phase=phase,
        host=spec.get("nodeName") or "",
        address=status.get("podIP") or "",
        end=_end(status) if phase is PodPhase.ENDED else "",
        going_s=float(metadata.get("deletionGracePeriodSeconds") or 0) if going else None,
        waits_for=_obstacle(status) if phase is PodPhase.PENDING else "",
        uid=metadata.get("uid") or "",
    )


def read_host(node: Mapping[str, Any], conditions: Collection[str] = ()) -> HostReading:
    """Return what a Node object of the API says of pods that are there. `conditions`: those that end their stay."""
    name, spec = node["metadata"]["name"], node.get("spec") or {}
    taints = [taint for taint in spec.get("taints") or () if taint["key"] not in _NOT_A_REMOVAL]
    reasons = [f"has the taint {taint['key']}" for taint in taints if _removes(taint)]
    reasons += [
        f"has the condition {each['type']}: {each.get('message') or each.get('reason') or 'no message'}"
        for each in (node.get("status") or {}).get("conditions") or ()
        if each["type"] in conditions and each.get("status") == "True"
    ]
    if spec.get("unschedulable"):
        return HostReading(name, f"{name} is cordoned")
    return HostReading(name, f"{name} {reasons[0]}" if reasons else "")


def _removes(taint: Mapping[str, Any]) -> bool:
    return taint.get("effect") == _NO_EXECUTE or taint["key"] in _REMOVALS


def _phase(status: Mapping[str, Any]) -> PodPhase:
    if status.get("phase") in {"Succeeded", "Failed"}:
        return PodPhase.ENDED
    return PodPhase.RUNNING if status.get("phase") == "Running" else PodPhase.PENDING


def _end(status: Mapping[str, Any]) -> str:
    """Say how a pod has ended: by whose will, or with what its agent's container has."""
    if status.get("reason"):  # Evicted, NodeLost, Preempting, UnexpectedAdmissionError ...
        return f"{status['reason']}: {status.get('message') or 'no message'}"
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None and container.get("name") == names.AGENT:
            return _of_container(ended)
    return f"phase {status.get('phase')}"


def _of_container(ended: Mapping[str, Any]) -> str:
    code, reason = ended.get("exitCode", 0), ended.get("reason") or ""
    how = f"signal {ended.get('signal') or code - _SIGNALS}" if code > _SIGNALS else f"exit code {code}"
    return f"{how}, {reason}" if reason not in {"", "Error", "Completed"} else how


def _obstacle(status: Mapping[str, Any]) -> str:
    return _unscheduled(status) or next((why for _, why, _ in _containers(status) if why), "")


def _unscheduled(status: Mapping[str, Any]) -> str:
    """Return why the scheduler has found no host for a pod; empty when it has, or has not looked yet."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason') or 'not scheduled'}: {condition.get('message') or ''}"
    return ""


def _containers(status: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each container of a pod: its name, why it waits (empty: no reason that matters), and how it has ended."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason") or ""
        why = "" if reason in _NORMAL else f"{reason}: {waiting.get('message') or ''}"
        yield container.get("name", ""), why, state.get("terminated") or {}


class Trouble(msgspec.Struct, frozen=True):
    """A container that does not get on. `ended`: its program has failed; else it could not be started."""

    container: str
    text: str
    ended: bool = False


def troubles(pod: Mapping[str, Any]) -> Iterator[Trouble]:
    """Yield what keeps a pod from running, as a user has to read it."""
    status = pod.get("status") or {}
    if unscheduled := _unscheduled(status):
        yield Trouble("pod", unscheduled)
    for name, waits_for, ended in _containers(status):
        if waits_for and not waits_for.startswith(_STARTED_AGAIN):
            yield Trouble(name, waits_for)
        if ended.get("exitCode") and pod["metadata"].get("deletionTimestamp") is None:
            yield Trouble(name, f"ended with exit code {ended['exitCode']}", ended=True)
