"""Volcano with the NPU plugin, played: groups of pods are placed together, and pods with a fault deleted."""

import time
from collections.abc import Iterator

from .api import GROUPS, NODES, PODS, Api, Thing, annotations, asked_npus, is_going, labels

SCHEDULER = "volcano"
GROUP = "scheduling.k8s.io/group-name"
_POLICY_PATH = "huawei.com/recover_policy_path"
_ENDED = frozenset({"Succeeded", "Failed"})
_ON = "on"
_NPUS_OF_A_NODE = 8
_HOST = "kubernetes.io/hostname"
_Place = tuple[str, list[int]]


class Board:
    """The nodes that are ready, and the numbers of the NPUs that nothing has there."""

    def __init__(self, nodes: list[Thing], pods: list[Thing]) -> None:
        self.free = {each["metadata"]["name"]: set(range(_NPUS_OF_A_NODE)) for each in nodes if _is_ready(each)}
        self._pods = [each for each in pods if _is_bound(each)]
        for each in self._pods:
            self.free.get(each["spec"]["nodeName"], set()).difference_update(_devices(each))

    def place(self, pod: Thing) -> _Place | None:
        """Take the last free NPUs of a node on which a pod may be."""
        _, asked = asked_npus(pod)
        for node, free in sorted(self.free.items()):
            if len(free) >= asked and self._may_be(pod, node):
                chosen = sorted(free)[len(free) - asked :]
                free.difference_update(chosen)
                self._pods.append({**pod, "spec": {**pod["spec"], "nodeName": node}})
                return node, chosen
        return None

    def _may_be(self, pod: Thing, node: str) -> bool:
        """Say whether what is required of hosts allows one: the labels of others there, and its own name."""
        affinity = pod["spec"].get("affinity") or {}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        for term in affinity.get("podAntiAffinity", {}).get(required, ()):
            selected = term["labelSelector"]["matchLabels"].items()
            if any(each["spec"]["nodeName"] == node and selected <= labels(each).items() for each in self._pods):
                return False
        terms = affinity.get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", ())
        avoided = [each["values"] for term in terms for each in term["matchExpressions"] if each["key"] == _HOST]
        return not any(node in values for values in avoided)


class Volcano:
    """Looks at all groups, again and again. `remaining`: how many more failed pods it deletes, by PodGroup."""

    def __init__(self, api: Api, remaining: dict[str, int]) -> None:
        self._api = api
        self._remaining = remaining
        self._have_run: set[str] = set()

    def session(self) -> None:
        """Delete pods with a fault, admit groups, and place pods."""
        pods = [each for each in self._api.items(PODS) if each["spec"].get("schedulerName") == SCHEDULER]
        board = Board(self._api.items(NODES), pods)
        for group in self._api.items(GROUPS):
            own = [each for each in pods if annotations(each).get(GROUP) == group["metadata"]["name"]]
            phase = group.get("status", {}).get("phase", "")
            if phase == "Running":
                self._have_run.add(group["metadata"]["name"])
            if group["metadata"]["name"] in self._have_run:
                self._delete_faulty(group, own, board)
            if phase in {"Inqueue", "Running"}:
                self._place(group, own, board)
            self._say(group, own, phase)

    def _say(self, group: Thing, own: list[Thing], phase: str) -> None:
        """Write down what a group is: without a place for its least number it waits to be admitted again."""
        placed = sum(_is_bound(each) for each in own)
        now = {"": "Pending", "Pending": "Inqueue"}.get(phase, phase)
        if placed >= group["spec"]["minMember"]:
            now = "Running"
        elif phase == "Running":
            now = "Pending"
        if now != phase:
            print(f"{group['metadata']['name']}: {phase or 'new'} -> {now}", flush=True)
            self._api.change(f"{GROUPS}/{group['metadata']['name']}/status", {"status": {"phase": now}})

    def _place(self, group: Thing, own: list[Thing], board: Board) -> None:
        """Place all pods that wait and have a place, if at least so many run then as the group says."""
        waiting = [each for each in own if not each["spec"].get("nodeName") and not is_going(each)]
        found = [(each, place) for each in waiting if (place := board.place(each)) is not None]
        if sum(_is_bound(each) for each in own) + len(found) < group["spec"]["minMember"]:
            return
        for pod, (node, devices) in found:
            name = pod["metadata"]["name"]
            resource, _ = asked_npus(pod)
            given = ",".join(f"Ascend910-{each}" for each in devices)
            written = {resource: given, "predicate-time": str(time.time_ns())}
            self._api.change(f"{PODS}/{name}", {"metadata": {"annotations": written}})
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self._api.send("POST", f"{PODS}/{name}/binding", binding)
            print(f"{name}: {node}, {given}", flush=True)

    def _delete_faulty(self, group: Thing, own: list[Thing], board: Board) -> None:
        """Delete pods as the labels of the group say: those with a fault, or all of them."""
        if labels(group).get("fault-scheduling") not in {"grace", "force"}:
            return
        name = group["metadata"]["name"]
        remaining = self._remaining.setdefault(name, int(labels(group).get("fault-retry-times", 0)))
        faulty = list(_faulty(own, board, remaining))
        if not faulty:
            return
        if any(each["status"]["phase"] == "Failed" for each in faulty):
            self._remaining[name] -= 1
        for pod in faulty if _alone(group, faulty) else own:
            lost = pod["spec"]["nodeName"] not in board.free
            forced = lost or labels(group)["fault-scheduling"] == "force"
            print(f"{pod['metadata']['name']}: deleted{' by force' if forced else ''}", flush=True)
            self._api.delete(f"{PODS}/{pod['metadata']['name']}", 0 if forced else None)


def _faulty(own: list[Thing], board: Board, remaining: int) -> Iterator[Thing]:
    """Yield the pods on nodes that are not ready, and those that have failed while failures are still answered."""
    for pod in own:
        lost = _is_bound(pod) and pod["spec"]["nodeName"] not in board.free
        failed = pod["status"]["phase"] == "Failed" and remaining > 0 and not is_going(pod)
        if lost or failed:
            yield pod


def _alone(group: Thing, faulty: list[Thing]) -> bool:
    """Say whether only the pods with a fault are deleted."""
    if annotations(group).get(_POLICY_PATH) == "pod":
        return True
    if any(annotations(each).get("hccl/rankIndex") == "0" for each in faulty):
        return False
    return _ON in {labels(group).get(key) for key in ("pod-rescheduling", "process-recover-enable")}


def _is_ready(node: Thing) -> bool:
    conditions = {each["type"]: each["status"] for each in node["status"]["conditions"]}
    return conditions.get("Ready") == "True" and not node["spec"].get("unschedulable")


def _is_bound(pod: Thing) -> bool:
    return "nodeName" in pod["spec"] and pod["status"]["phase"] not in _ENDED


def _devices(pod: Thing) -> list[int]:
    resource, _ = asked_npus(pod)
    return [int(each.rpartition("-")[2]) for each in annotations(pod).get(resource, "").split(",") if each]
