"""Bounds what a connection to the page can cost, and tells a browser what it may do with an answer.

A connection is worth little: there is a limit of them, one that asks for nothing is closed, and so is one that does not
read. All answers carry a policy that lets a browser load and run nothing but the page's own files.
"""

import asyncio

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 128
SILENT_S = 10.0  # a connection that has not asked for anything
SLOW_S = 10.0  # one that does not read what it is sent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BoundedProtocol(H11Protocol):
    """Closes connections beyond a limit, those that ask for nothing, and those that do not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._slow: asyncio.TimerHandle | None = None
        self._silent = self.loop.call_later(SILENT_S, self._abort_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget its limits."""
        for limit in (getattr(self, "_silent", None), getattr(self, "_slow", None)):
            if limit is not None:
                limit.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for a reader."""
        super().pause_writing()
        if self._slow is None:
            self._slow = self.loop.call_later(SLOW_S, self.transport.abort)

    def resume_writing(self) -> None:
        """End the wait."""
        slow = getattr(self, "_slow", None)
        if slow is not None:
            slow.cancel()
            self._slow = None
        super().resume_writing()

    def _abort_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class Guard:
    """Adds the headers to each answer, and refuses requests that call this server by another name."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        """`names`: as which a browser may call it; empty: any, as a cookie is needed then."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] == "http" and self._names and _host(scope) not in self._names:
            refused = PlainTextResponse("This page is served under another name.\n", 421)
            await refused(scope, receive, told)
        else:
            await self._app(scope, receive, told)


def _host(scope: Scope) -> str:
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    return host if host.endswith("]") else host.rpartition(":")[0] or host
