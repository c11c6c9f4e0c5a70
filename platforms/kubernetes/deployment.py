"""The Deployment of a job's controller: it owns the pods, and has written on it what has to outlive this process."""

import asyncio
import logging
from typing import Any

from ...protocol.errors import PlatformError
from ...protocol.messages import EndJob
from . import names
from .api import Api, RequestRefused
from .watching import pause_s

MOST_AVOIDED = 64  # hosts, the newest
TRIES = 8

_log = logging.getLogger(__name__)


class OwnDeployment:
    """What is known of the Deployment. `avoided`: hosts on which no new pod of the job should be."""

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
