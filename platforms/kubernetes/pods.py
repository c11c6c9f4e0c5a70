"""The pod of a node, as a manifest: an agent, alone on its host, that nothing but midstep brings back.

A part of a manifest that the user wrote is laid over midstep's own, as a strategic merge patch does.
"""

from collections.abc import Sequence
from typing import Any

from ...protocol import environment as environment_names
from . import names
from .settings import Settings

TOKEN_FOLDER = "/var/run/secrets/midstep"
JOIN_KEY = "join"
GRACE_S = 60
LEAVE_S = 15  # of GRACE_S: from SIGTERM to SIGKILL, for what its ranks have not moved from until then
_FOREVER_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# By which key the items of a list are the same one. Other lists are appended to.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
_REPLACED = {"command", "args"}


def agent_pod(
    settings: Settings,
    node: str,
    controllers: Sequence[str],
    *,
    avoid: Sequence[str] = (),
    owner: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a node's pod. `controllers`: HOST:PORT where they may listen. `avoid`: hosts."""
    job = settings.job
    metadata: dict[str, Any] = {
        "name": names.pod_name(job, node),
        "labels": names.labels(job, role=names.AGENT, node=node),
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    if settings.pod_group is not None:
        metadata["annotations"] = {names.GROUP: names.of_job(job)}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            **({} if settings.pod_group is None else {"schedulerName": names.VOLCANO}),
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": GRACE_S,
            # Whether a node is lost says midstep, by what it hears of its agent.
            "tolerations": [{"key": key, "operator": "Exists", "effect": "NoExecute"} for key in _FOREVER_TAINTS],
            "affinity": _affinity(job, avoid),
            "containers": [_agent(settings, node, controllers)],
            # The 64 MiB of a container are too few for data loaders with several processes.
            "volumes": [
                secret_volume(job, JOIN_KEY),
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                *volumes(settings),
            ],
        },
    }
    merged: dict[str, Any] = laid_over(manifest, settings.agent)
    return merged


def secret_volume(job: str, key: str) -> dict[str, Any]:
    """Return the volume with one token of the job's Secret."""
    items = [{"key": key, "path": "token"}]
    return {"name": "midstep-token", "secret": {"secretName": names.of_job(job), "items": items, "defaultMode": 0o400}}


def volumes(settings: Settings) -> list[dict[str, Any]]:
    """Return the volumes that the user has asked for."""
    return [
        {"name": f"volume-{number}", **_source(volume.source, is_host_path=volume.is_host_path)}
        for number, volume in enumerate(settings.volumes)
    ]


def mounts(settings: Settings) -> list[dict[str, Any]]:
    """Return where a container sees them, and the token."""
    asked = ({"name": f"volume-{n}", "mountPath": each.path} for n, each in enumerate(settings.volumes))
    return [{"name": "midstep-token", "mountPath": TOKEN_FOLDER, "readOnly": True}, *asked]


def from_field(name: str, path: str) -> dict[str, Any]:
    """Return a variable that has what the pod itself is."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _source(source: str, *, is_host_path: bool) -> dict[str, Any]:
    if is_host_path:
        return {"hostPath": {"path": source}}
    return {"persistentVolumeClaim": {"claimName": source}}


def _agent(settings: Settings, node: str, controllers: Sequence[str]) -> dict[str, Any]:
    arguments = {
        "--job": settings.job,
        "--node": node,
        "--controller": ",".join(controllers),
        "--host": f"$({names.POD_IP})",
        "--failure-domain": "$(HOST_NAME)",
        "--token-file": f"{TOKEN_FOLDER}/token",
        "--log-dir": "/tmp/midstep",
    }
    environment = [
        from_field(names.POD_IP, "status.podIP"),
        from_field("HOST_NAME", "spec.nodeName"),
        {"name": environment_names.GRACE_S, "value": str(LEAVE_S)},
    ]
    return {
        "name": names.AGENT,
        "image": settings.image,
        "command": ["midstep", "agent", "--show-output", *(word for each in arguments.items() for word in each)],
        "env": [*environment, *({"name": name, "value": value} for name, value in settings.environment.items())],
        "resources": {"limits": dict(settings.resources)} if settings.resources else {},
        "volumeMounts": [*mounts(settings), {"name": "shm", "mountPath": "/dev/shm"}],
        # A pod that is deleted keeps its ranks until they have moved at a step boundary, and ends then; SIGTERM comes
        # after this.
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"kill -USR1 1; exec sleep {GRACE_S - LEAVE_S}"]}}},
    }


def _affinity(job: str, avoid: Sequence[str]) -> dict[str, Any]:
    """Return where the pod may be: on no host with another agent of the job, nor on one that was left."""
    same = {"labelSelector": {"matchLabels": names.selected(job, names.AGENT)}, "topologyKey": names.HOST_LABEL}
    affinity: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same]}}
    if avoid:
        elsewhere = {"key": names.HOST_LABEL, "operator": "NotIn", "values": sorted(set(avoid))}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return affinity


def laid_over(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` with all that `over` says: fields of objects one by one, items of lists by their names.

    None takes a field away.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for key, value in over.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = laid_over(base[key], value, key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list) and field not in _REPLACED:
        return _items(base, over, _KEYS.get(field))
    return over


def _items(base: list[Any], over: list[Any], key: str | None) -> list[Any]:
    if key is None:
        return [*base, *(item for item in over if item not in base)]
    merged = {item[key]: item for item in base}
    for item in over:
        name = item.get(key)
        merged[name] = laid_over(merged[name], item) if name in merged else item
    return list(merged.values())
