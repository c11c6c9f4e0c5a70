"""Why the containers of a pod do not run, as a user has to read it. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})


class Trouble(msgspec.Struct, frozen=True):
    """A container that does not get on. `ended`: its program has failed; else it could not be started."""

    container: str
    text: str
    ended: bool = False


def troubles(pod: Mapping[str, Any]) -> Iterator[Trouble]:
    """Yield what keeps a pod from running."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield Trouble("pod", f"{condition.get('reason')}: {condition.get('message')}")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, name = container.get("state") or {}, container.get("name", "")
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason", "") not in _NORMAL and waiting.get("reason") != "CrashLoopBackOff":
            yield Trouble(name, f"{waiting['reason']}: {waiting.get('message') or ''}")
        if ended.get("exitCode") and pod["metadata"].get("deletionTimestamp") is None:
            yield Trouble(name, f"ended with exit code {ended['exitCode']}", ended=True)
