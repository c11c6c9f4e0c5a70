"""What pods and hosts mean for the controller: which nodes are lost, are going, or stay after all. Pure."""

from collections.abc import Iterable

import msgspec

from ...protocol.messages import NodeGoing, NodeLost, NodeStaying
from .readings import HostReading, PodPhase, PodReading

Word = NodeLost | NodeGoing | NodeStaying


class _Member(msgspec.Struct):
    """A node of the job, and what the controller was told of it."""

    pod: PodReading | None = None  # None: its pod was asked for, and has not been seen
    deleted: bool = False  # by the controller, which knows that it is gone
    lost: bool = False
    going: str = ""


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
