"""A detector that watches ConfigMaps in the API of Kubernetes, where MindCluster's own detectors leave faults."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import msgspec

from ...detectors.documents import NO_SERIALS, Document, documents_in, has_documents
from ...detectors.files import Snapshots
from ...detectors.reading import Report
from ...platforms.kubernetes.api import Api, watch
from ...protocol.types import detector_address

_REMOVED = "DELETED"


class ConfigMapDetector:
    """Watches the ConfigMaps of some namespaces. Use as `await watch(report)`; the API is closed by its owner."""

    def __init__(self, api: Api, name: str, namespaces: Sequence[str], serials: Mapping[str, str] = NO_SERIALS) -> None:
        """Prepare to watch. `name`: of the detector. `serials`: nodes by other names that documents have for them."""
        self._api = api
        self._namespaces = tuple(dict.fromkeys(namespaces))
        self._serials = serials
        self._snapshots = Snapshots(detector_address(name))
        self._known: set[str] = set()  # ConfigMaps that have been read, with their namespaces

    async def watch(self, report: Report) -> None:
        """Report the faults that stand, then every change, until cancelled."""
        await asyncio.gather(*(self._watch(namespace, report) for namespace in self._namespaces))

    async def _watch(self, namespace: str, report: Report) -> None:
        def take_all(found: list[dict[str, Any]]) -> None:
            named = {_name(namespace, each) for each in found}
            for each in found:
                self._take(namespace, each, report)
            for name in sorted(self._known):
                if name.startswith(f"{namespace}/") and name not in named:
                    self._gone(name, report)

        def take(operation: str, found: dict[str, Any]) -> None:
            if operation == _REMOVED:
                self._gone(_name(namespace, found), report)
            else:
                self._take(namespace, found, report)

        listing = partial(self._api.config_maps, namespace)
        events = partial(self._api.watch_config_maps, namespace)
        await watch(f"ConfigMaps of {namespace}", listing, events, on_all=take_all, on_event=take)

    def _take(self, namespace: str, found: dict[str, Any], report: Report) -> None:
        data, name = found.get("data") or {}, _name(namespace, found)
        if name not in self._known and not has_documents(data):
            return
        self._known.add(name)
        content = {"kind": "ConfigMap", "metadata": {"name": found["metadata"]["name"]}, "data": data}
        documents = documents_in(PurePath(name), msgspec.json.encode(content), self._serials)
        self._report([Document(name, ""), *documents], report)  # it is there, if it was gone before

    def _gone(self, name: str, report: Report) -> None:
        if name not in self._known:
            return
        reports = self._snapshots.forget(name, time.time())
        if reports is None:
            self._report([Document(name, "", error="is gone; the faults that it last had stay in force")], report)
            return
        self._known.discard(name)
        for each in reports:
            report(each)

    def _report(self, documents: Sequence[Document], report: Report) -> None:
        for each in self._snapshots.take(documents, time.time()):
            report(each)


def _name(namespace: str, found: Mapping[str, Any]) -> str:
    return f"{namespace}/{found['metadata']['name']}"
