"""The Deployment of a job's controller, which owns the pods: what is written on it, and incidents shown as its Events.

Annotations hold what has to outlive this process.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from ...protocol.errors import MidstepError, PlatformError
from ...protocol.messages import EndJob
from ..base import EndedIncident, EndedIncidents
from . import names
from .api import Api, RequestRefused, pause_s
from .fleet import PodReading

MOST_AVOIDED = 64  # hosts, the newest
TRIES = 8
LOOK_S = 3.0
LONGEST_MESSAGE = 1024  # characters, which is what the API takes
_UID_DIGITS = 8  # that tell the objects of a job from those of an earlier one of its name
_SOURCE = "midstep"

_log = logging.getLogger(__name__)


class OwnDeployment:
    """The Deployment, read once and changed by patches. `avoided`: hosts on which no new pod of the job should be."""

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name
        self._reference: dict[str, Any] | None = None
        self.avoided: tuple[str, ...] = ()
        self.incidents = 0  # how many are written on it

    async def reference(self) -> dict[str, Any]:
        """Return what makes it the owner of another object. Raises RequestRefused, Unavailable."""
        if self._reference is None:
            found = await self._api.deployment(self._name)
            if found is None:
                raise RequestRefused(f"there is no Deployment {self._name} that could own a pod")
            written = found["metadata"].get("annotations") or {}
            for host in filter(None, written.get(names.AVOIDED, "").split(",")):
                self.avoid(host)
            count = written.get(names.INCIDENTS, "")
            self.incidents = int(count) if count.isdecimal() else 0
            self._reference = names.owner_reference("Deployment", "apps/v1", self._name, found["metadata"]["uid"])
        return self._reference

    def avoid(self, host: str) -> None:
        """Take note of a host that new pods have to keep away from."""
        others = (each for each in self.avoided if each != host)
        self.avoided = (*others, host)[-MOST_AVOIDED:]

    async def write(self) -> None:
        """Write down which hosts are avoided, for the next platform process."""
        await self._patch({"metadata": {"annotations": {names.AVOIDED: ",".join(self.avoided)}}})

    async def write_incident(self, number: int, text: str) -> None:
        """Write down the last incident, in a line; the next platform process shows those after it."""
        self.incidents = number
        await self._patch({"metadata": {"annotations": {names.INCIDENTS: str(number), names.LAST_INCIDENT: text}}})

    async def end(self, end: EndJob) -> None:
        """Write down how the job has ended, and have no controller any more."""
        annotations = {names.EXIT_CODE: str(end.exit_code), names.REASON: end.reason}
        await self._patch({"metadata": {"annotations": annotations}, "spec": {"replicas": 0}})

    async def _patch(self, patch: dict[str, Any]) -> None:
        for failures in range(TRIES):
            try:
                await self._api.patch_deployment(self._name, patch)
            except RequestRefused as error:
                _log.error("%s", error)
                return
            except PlatformError as error:
                _log.warning("%s", error)
                await asyncio.sleep(pause_s(failures))
            else:
                return
        _log.error("the Deployment %s was not changed", self._name)


def events_of(
    incident: EndedIncident, owner: Mapping[str, Any], pods: Mapping[str, PodReading], namespace: str, now_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the Events that show an incident, the one of the job first. `pods`: those that are there, by node. Pure."""
    job = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["name"], "uid": owner["uid"]}
    known = (pods[node] for node in incident.nodes if node in pods)
    involved = [job, *({"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid} for pod in known)]
    at = datetime.fromtimestamp(now_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    for each in involved:
        yield {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{each['name']}.{owner['uid'][:_UID_DIGITS]}.incident-{incident.number}",
                "namespace": namespace,
            },
            "involvedObject": {**each, "namespace": namespace},
            "type": "Warning" if incident.stopped else "Normal",
            "reason": _reason(incident),
            "message": incident.text[:LONGEST_MESSAGE],
            "source": {"component": _SOURCE},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }


def _reason(incident: EndedIncident) -> str:
    """Return what was done, as Kubernetes writes reasons: RecoverInPlace."""
    return "".join(word.capitalize() for word in incident.rung.split("_")) or "Dismissed"


class IncidentEvents:
    """Shows each incident that is over once, where operators of Kubernetes look: as Events of the job and its pods.

    An Event that cannot be made costs nothing else: it is tried again, and a refusal is logged once.
    """

    def __init__(
        self, api: Api, own: OwnDeployment, incidents: EndedIncidents, pod_of: Callable[[str], PodReading | None]
    ) -> None:
        self._api = api
        self._own = own
        self._incidents = incidents
        self._pod_of = pod_of
        self._refused = False

    async def follow(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Show what has ended since the last look. Never raises: it is tried again at the next one."""
        try:
            owner = await self._own.reference()
            ended = await self._incidents(self._own.incidents)
            for incident in ended:
                pods = {node: pod for node in incident.nodes if (pod := self._pod_of(node)) is not None}
                for event in events_of(incident, owner, pods, self._api.namespace, time.time()):
                    await self._show(event)
            if ended:
                await self._own.write_incident(ended[-1].number, ended[-1].text)
        except MidstepError as error:  # no controller that serves, or no API
            _log.debug("incidents are not shown for now: %s", error)

    async def _show(self, event: dict[str, Any]) -> None:
        try:
            await self._api.create(event)
        except RequestRefused as error:
            if not self._refused:
                _log.warning("incidents are not shown as Events: %s", error)
            self._refused = True
