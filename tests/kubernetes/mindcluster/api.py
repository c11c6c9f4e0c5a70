"""The API as the played programs ask it: plain objects, and None where there is nothing or something else has won."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

_LIMIT_S = 10.0
_UNIMPORTANT = frozenset({404, 409})  # it is gone, or has changed: the next round sees what is there
NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
ENDPOINTS = f"/api/v1/namespaces/{NAMESPACE}/endpoints"
NODES = "/api/v1/nodes"
JOBS = f"/apis/mindxdl.gitee.com/v1/namespaces/{NAMESPACE}/ascendjobs"
GROUPS = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups"
Thing = dict[str, Any]


class Api:
    """Objects of one namespace. Methods raise OSError."""

    def __init__(self, server: str, token: str) -> None:
        self._server = server
        self._token = token

    def items(self, path: str) -> list[Thing]:
        """Return all objects of a kind."""
        found = self.send("GET", path)
        return [] if found is None else list(found["items"])

    def change(self, path: str, patch: Thing) -> None:
        """Change an object by a merge patch."""
        self.send("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, path: str, grace_s: int | None = None) -> None:
        """Delete an object, with its own time of grace or another one."""
        self.send("DELETE", path, {} if grace_s is None else {"gracePeriodSeconds": grace_s})

    def send(self, method: str, path: str, body: Thing | None = None, kind: str = "application/json") -> Thing | None:
        """Send a request, and return what is answered."""
        request = urllib.request.Request(
            self._server + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S, context=ssl._create_unverified_context()) as reply:
                answer: Thing = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            if error.code in _UNIMPORTANT:
                return None
            raise OSError(f"{method} {path}: {error}: {error.read().decode(errors='replace')}") from error


def is_going(thing: Thing) -> bool:
    """Say whether an object is being deleted."""
    return "deletionTimestamp" in thing["metadata"]


def labels(thing: Thing) -> dict[str, str]:
    """Return the labels of an object."""
    return thing["metadata"].get("labels") or {}


def annotations(thing: Thing) -> dict[str, str]:
    """Return the annotations of an object."""
    return thing["metadata"].get("annotations") or {}


def asked_npus(pod: Thing) -> tuple[str, int]:
    """Return the name and the number of the NPUs that a pod, or its template, asks for; none: an empty name."""
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, amount in (resources.get("requests") or {}).items():
            if name.startswith("huawei.com/"):
                return name, int(amount)
    return "", 0
