"""Shows incidents where operators of Kubernetes look: as Events of the job's Deployment and of the pods with faults.

What could not be shown costs nothing but that: it is tried again, and a refusal is logged once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from ...protocol.errors import MidstepError
from ..base import EndedIncident, EndedIncidents
from .api import Api, RequestRefused
from .deployment import OwnDeployment
from .readings import PodReading

LOOK_S = 3.0
LONGEST_MESSAGE = 1024  # characters, which is what the API takes
_UID_DIGITS = 8  # that tell the objects of a job from those of an earlier one of its name
_SOURCE = "midstep"

_log = logging.getLogger(__name__)


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
    """Asks the controller for incidents that are over, and shows each once."""

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
