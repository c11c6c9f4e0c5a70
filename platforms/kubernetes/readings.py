"""What a pod or a host is right now, read from its object in the API. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...protocol.enums import StrEnum
from . import names

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
# Whether an agent lives is heard from itself: these say only what Kubernetes has not heard.
_NOT_A_REMOVAL = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
# Taints that say that a host will be removed, though they evict nothing themselves.
_REMOVALS = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})
_NO_EXECUTE = "NoExecute"
_SIGNALS = 128


class PodPhase(StrEnum):
    """Where a pod stands."""

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


class HostReading(msgspec.Struct, frozen=True):
    """A machine of the cluster. `leaving`: why pods will leave it, or empty."""

    name: str
    leaving: str = ""


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
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason') or 'not scheduled'}: {condition.get('message') or ''}"
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None and waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
            return f"{waiting['reason']}: {waiting.get('message') or ''}"
    return ""
