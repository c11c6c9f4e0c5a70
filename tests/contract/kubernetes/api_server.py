"""A small API server of Kubernetes that a test commands: it keeps objects, tells watchers, and fails when told to."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
_KINDS = {
    "configmaps": "ConfigMap",
    "deployments": "Deployment",
    "leases": "Lease",
    "nodes": "Node",
    "pods": "Pod",
    "secrets": "Secret",
    "services": "Service",
}
_READY_S = 60.0
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


class ApiServer:
    """Pods, Deployments and whatever else is made, by the last parts of their paths. `failures`: the next answers."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}  # (plural, name)
        self.asked: list[str] = []
        self.failures: list[int] = []
        self.most_pods = 1000
        self.on_lost_machines: set[str] = set()  # pods that stay when they are deleted
        self.forbidden: set[tuple[str, str, str]] = set()  # verb, resource, and the name of an object or ""
        self.printed: dict[str, list[str]] = {}  # what each pod has printed, in seconds one after the other
        self._version = 0
        self._told: list[tuple[int, str, str, Object]] = []  # version, plural, operation, object
        self._watchers: list[tuple[str, asyncio.StreamWriter]] = []

    def put(self, plural: str, found: Object, operation: str = "MODIFIED") -> None:
        """Change an object, as somebody else would, and tell watchers."""
        self._version += 1
        found["metadata"] = {**found["metadata"], "resourceVersion": str(self._version)}
        self.objects[plural, found["metadata"]["name"]] = found
        self._tell(plural, operation, found)

    def remove(self, plural: str, name: str) -> None:
        """Take an object away, and what it owns, except for pods whose machine is off."""
        found = self.objects.pop((plural, name), None)
        if found is None:
            return
        self._version += 1
        metadata = {**found["metadata"], "resourceVersion": str(self._version)}
        self._tell(plural, "DELETED", {**found, "metadata": metadata})
        for (kind, other), each in list(self.objects.items()):
            owners = {owner["name"] for owner in each["metadata"].get("ownerReferences", ())}
            if name in owners and other not in self.on_lost_machines:
                self.remove(kind, other)

    def print(self, pod: str, line: str) -> None:
        """Have a pod print a line, and show it to who follows that."""
        lines = self.printed.setdefault(pod, [])
        lines.append(f"2026-01-01T00:00:{len(lines):02}.000000000Z {line}")
        for name, writer in self._watchers:
            if name == pod and not writer.is_closing():
                _chunk(writer, lines[-1].encode())

    def end_watches(self, status: int | None = None) -> None:
        """Cut all watches; with a status, after saying that."""
        for _, writer in self._watchers:
            if status is not None:
                self._send(writer, {"type": "ERROR", "object": _status(status)})
            writer.close()
        self._watchers.clear()

    def pods(self) -> dict[str, Object]:
        """Return all pods by their names."""
        return {name: found for (plural, name), found in self.objects.items() if plural == "pods"}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _tell(self, plural: str, operation: str, found: Object) -> None:
        self._told.append((self._version, plural, operation, found))
        for kind, writer in self._watchers:
            if kind == plural and not writer.is_closing():
                self._send(writer, {"type": operation, "object": found})

    @staticmethod
    def _send(writer: asyncio.StreamWriter, line: Object) -> None:
        _chunk(writer, json.dumps(line).encode())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n")[0].split(" ")
        sizes = [line.partition(":")[2] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = await reader.readexactly(int(sizes[0])) if sizes else b""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.asked.append(f"{method} {path}")
        if self.failures:
            await _write(writer, self.failures[0], _status(self.failures.pop(0)))
            return True
        if path.endswith("/log"):
            pod = path.split("/")[-2]
            writer.write(_STREAM)
            for line in self.printed.get(pod, []):
                _chunk(writer, line.encode())
            if self.objects.get(("pods", pod), {}).get("status", {}).get("phase") != "Running":
                writer.write(b"0\r\n\r\n")
                return True
            self._watchers.append((pod, writer))
            await reader.read()
            return False
        if "watch" in query:
            writer.write(_STREAM)
            plural = path.rpartition("/")[2]
            self._watchers.append((plural, writer))
            listed = int(query.get("resourceVersion", ["0"])[0])
            for version, kind, operation, found in self._told:
                if kind == plural and version > listed:
                    self._send(writer, {"type": operation, "object": found})
            await reader.read()  # until the other end is gone
            return False
        sent = json.loads(body) if body else {}
        reviewed = path.endswith("/selfsubjectaccessreviews")
        code, found = self._review(sent) if reviewed else self._do(method, path, query, sent)
        await _write(writer, code, found)
        return True

    def _review(self, review: Object) -> tuple[int, Object]:
        asked = review["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"], asked.get("name") or "") not in self.forbidden
        return 201, {**review, "status": {"allowed": allowed}}

    def _make(self, plural: str, name: str, body: Object) -> tuple[int, Object]:
        key = (plural, name)
        full = plural == "pods" and len(self.pods()) >= self.most_pods
        if ("create", plural, "") in self.forbidden or (full and key not in self.objects):
            return 403, _status(403)
        if key in self.objects:
            return 409, _status(409)
        self.put(plural, {**body, "metadata": {**body["metadata"], "uid": f"uid-{name}"}}, "ADDED")
        return 201, self.objects[key]

    def _update(self, plural: str, name: str, body: Object) -> tuple[int, Object]:
        if ("update", plural, "") in self.forbidden:
            return 403, _status(403)
        if body["metadata"].get("resourceVersion") != self.objects[plural, name]["metadata"]["resourceVersion"]:
            return 409, _status(409)
        self.put(plural, body)
        return 200, self.objects[plural, name]

    def _do(self, method: str, path: str, query: dict[str, list[str]], body: Object) -> tuple[int, Object]:
        parts = path.split("/")
        listed = parts[-1] in _KINDS or parts[-2:-1] == ["namespaces"] or method == "POST"
        plural, name = (parts[-1], body.get("metadata", {}).get("name", "")) if listed else (parts[-2], parts[-1])
        key = (plural, name)
        if method == "POST":
            return self._make(plural, name, body)
        if listed:
            found = [each for (kind, _), each in self.objects.items() if kind == plural]
            return 200, {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": found}
        if key not in self.objects:
            return 404, _status(404)
        if method == "DELETE":
            self.remove(plural, name)
            return 200, _status(200)
        if method == "PUT":
            return self._update(plural, name, body)
        if method == "PATCH":
            self.put(plural, _merged(self.objects[key], body))
        return 200, self.objects[key]


def _chunk(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(b"%x\r\n%b\n\r\n" % (len(line) + 1, line))


def _merged(base: Object, patch: Object) -> Object:
    return {
        **base,
        **{
            key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in patch.items()
        },
    }


def _status(code: int) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": f"status {code}", "metadata": {}}


async def _write(writer: asyncio.StreamWriter, code: int, found: Object) -> None:
    data = json.dumps(found).encode()
    head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[ApiServer, Path]]:
    """Serve within, and write a kubeconfig that leads there."""
    api = ApiServer()
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = folder / "kubeconfig"
    config.write_text(
        f'{{"clusters": [{{"name": "c", "cluster": {{"server": "http://127.0.0.1:{port}"}}}}], "current-context": "c", '
        '"users": [{"name": "u", "user": {"token": "t"}}], '
        '"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}]}'
    )
    try:
        yield api, config
    finally:
        api.end_watches()
        server.close()


class ApiThread:
    """An API server in a thread, for clients that wait for their answers. `config`: its kubeconfig."""

    def __init__(self, folder: Path) -> None:
        """Serve until `close`."""
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(_READY_S)

    async def _serve(self) -> None:
        async with served(self._folder) as (self.api, self.config):
            self._ended = asyncio.Event()
            self._ready.set()
            await self._ended.wait()

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_READY_S)
        self._loop.close()


def lease(name: str) -> Object:
    """Return a Lease that nothing has held yet."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}
