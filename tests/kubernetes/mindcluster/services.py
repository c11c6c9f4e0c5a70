"""What a kube-proxy does: connections to the own addresses of Services reach their pods. For AscendJobs' Services."""

import asyncio
import contextlib
import subprocess

from .api import ENDPOINTS, SERVICES, Api, Thing, labels

_OF_JOBS = "training.kubeflow.org/job-name"
_CHUNK_BYTES = 65_536


class ServiceProxy:
    """Takes the addresses onto this machine. Its connections are those of the running loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._taken: dict[str, list[asyncio.Server]] = {}

    async def look(self) -> None:
        """Listen for Services that have come."""
        for service in await asyncio.to_thread(self._api.items, SERVICES):
            address = service["spec"]["clusterIP"]
            if _OF_JOBS in labels(service) and address not in self._taken:
                subprocess.run(["ip", "addr", "replace", f"{address}/16", "dev", "eth0"], check=True)
                self._taken[address] = [
                    await self._listen(service["metadata"]["name"], address, port) for port in service["spec"]["ports"]
                ]

    async def _listen(self, name: str, address: str, port: Thing) -> asyncio.Server:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                target = await asyncio.to_thread(self._target, name)
                if target is None:
                    return
                onward, back = await asyncio.open_connection(target, port["port"])
                with contextlib.closing(back):
                    ways = [asyncio.create_task(_copy(*each)) for each in ((reader, back), (onward, writer))]
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in ways:
                        way.cancel()

        return await asyncio.start_server(carry, address, port["port"])

    def _target(self, name: str) -> str | None:
        found = self._api.send("GET", f"{ENDPOINTS}/{name}") or {}
        addresses = [each["ip"] for subset in found.get("subsets", ()) for each in subset.get("addresses", ())]
        return addresses[0] if addresses else None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
