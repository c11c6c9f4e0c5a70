"""Serves the page: its files, the stream of what changes, the login where there is a token, and the buttons.

Files are read at the start, and nothing else of the machine can be asked for but what `JobAccess` gives of a job.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib import resources
from urllib.parse import parse_qs

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...controller.endpoints.control_requests import Accepted, Refused
from ...controller.endpoints.control_requests import Request as OperatorRequest
from ...protocol.errors import ConfigurationError, MidstepError
from ...protocol.identities import Role
from ..what_if import lines, what_if
from .buttons import InForce, Press, WrongPress, request_of, told_buttons
from .jobs import Ask, OpenJob, PagedJobs
from .limits import MOST_CONNECTIONS, BoundedProtocol, Guard
from .sections import node_data
from .sessions import COOKIE, SESSION_S, PageSession, Sessions, is_own

MOST_LOGIN_BYTES = MOST_PRESS_BYTES = 8192
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
BUNDLE_S = 10.0  # between two bundles, of all sessions together: each is seconds of work
_PLACE_OF_REFUSAL = b"<!-- refused -->"  # in the file of the login
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PagePlace(msgspec.Struct, frozen=True):
    """Where the page is served. `token`: what a viewer has to bring. `others`: that of roles with buttons.

    `closed`: to see it takes a token; without that and without `token`, who is on this machine sees it.
    """

    host: str
    port: int
    token: str = ""
    certificate: str = ""
    key: str = ""
    others: tuple[tuple[Role, str], ...] = ()
    closed: bool = False

    @property
    def is_open(self) -> bool:
        """True when to see it takes no token."""
        return not self.token and not self.closed

    @property
    def tokens(self) -> tuple[tuple[Role, str], ...]:
        """The tokens of all roles, the least first."""
        viewers = ((Role.VIEWER, self.token),) if self.token else ()
        return (*viewers, *sorted(self.others, key=lambda each: list(Role).index(each[0])))

    @property
    def is_secure(self) -> bool:
        """True when connections are encrypted."""
        return bool(self.certificate)


class EventStream:
    """Answers with the stream of what changes, until the viewer has gone."""

    def __init__(self, page: "Page") -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events. It ends when the connection does, which `BoundedProtocol` sees to for one that does not read."""
        request = Request(scope)
        if not self._page.admits(request):
            await PlainTextResponse("log in first\n", 401)(scope, receive, send)
            return
        try:
            job = await self._page.job_of(request)
        except MidstepError as error:
            await PlainTextResponse(f"{error}\n", 404)(scope, receive, send)
            return
        with job.live.viewer() as viewer:
            if viewer is None:
                await PlainTextResponse("too many pages are open\n", 503)(scope, receive, send)
                return
            sending = asyncio.create_task(self._send(viewer.events(), send))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, gone):
                    task.cancel()
                await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, events: AsyncIterator[bytes], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Page:
    """Answers requests: the files, the stream, the login, one node at a time, a bundle, and a press of a button."""

    def __init__(self, jobs: PagedJobs, place: PagePlace) -> None:
        self._jobs, self._place = jobs, place
        self._sessions = Sessions(place.tokens, is_open=place.is_open)
        self._asking = asyncio.Lock()
        self._next_bundle_s = 0.0
        folder = resources.files(__package__) / "static"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if each.name.endswith(tuple(_TYPES))}

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/", self._index),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/events", EventStream(self)),
            Route("/jobs", self._list),
            Route("/node", self._of_job(self._node)),
            Route("/buttons", self._of_job(self._buttons)),
            Route("/press", self._of_job(self._press), methods=["POST"]),
            Route("/bundle", self._of_job(self._bundled)),
            Route("/log", self._of_job(self._logged)),
            Route("/what-if", self._of_job(self._supposed)),
            Route("/static/{name}", self._static),
        ]
        names = frozenset({*LOOPBACK_NAMES, _in_address(self._place.host)}) if self._place.is_open else frozenset()
        return Guard(Starlette(routes=routes, lifespan=lambda _: self._jobs.running()), names)

    async def job_of(self, request: Request) -> OpenJob:
        """Return the job that a request is about. Raises MidstepError when there is none of that name."""
        return await self._jobs.of(request.query_params.get("job", ""))

    def _of_job(self, answer: Callable[[Request, OpenJob], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        """Return what answers requests about a job: for those who may see it, of a job that there is."""

        async def answered(request: Request) -> Response:
            if not self.admits(request):
                return _told("log in first", 401)
            try:
                job = await self.job_of(request)
            except MidstepError as error:
                return _told(str(error), 404)
            return await answer(request, job)

        return answered

    def admits(self, request: Request) -> bool:
        """Tell whether a request comes with what a viewer has to bring."""
        return self._sessions.holds(request.cookies.get(COOKIE, ""), time.monotonic())

    async def _index(self, request: Request) -> Response:
        if not self.admits(request):
            return RedirectResponse("/login", 303)
        return self._file("jobs.html" if self._jobs.has_list and "job" not in request.query_params else "page.html")

    async def _list(self, request: Request) -> Response:
        if not self.admits(request):
            return PlainTextResponse("log in first\n", 401)
        try:
            return JSONResponse(await self._jobs.told())
        except MidstepError as error:
            return _told(str(error), 502)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._file(name) if name in self._files else PlainTextResponse("no such file\n", 404)

    async def _node(self, request: Request, job: OpenJob) -> Response:
        looked = job.live.looked
        data = None if looked is None else node_data(looked.status, request.query_params.get("name", ""))
        return JSONResponse(data, 404 if data is None else 200)

    async def _buttons(self, request: Request, job: OpenJob) -> Response:
        session = self._session(request)
        role = Role.VIEWER if session is None or job.access.ask is None else session.role
        proof = "" if session is None else session.proof
        answer = {"role": str(role), "proof": proof, "login": session is None and self._sessions.asks}
        reads = session is not None and session.role is not Role.VIEWER
        access = job.access
        more = {"bundle": reads and access.bundle is not None, "log": reads and access.log is not None}
        more["list"] = self._jobs.has_list
        return JSONResponse({**answer, **more, "buttons": told_buttons(role)})

    def _session(self, request: Request) -> PageSession | None:
        return self._sessions.session(request.cookies.get(COOKIE, ""), time.monotonic())

    async def _press(self, request: Request, job: OpenJob) -> Response:
        """Ask the controller for what a button stands for, if this session may, and the page itself has sent it."""
        session, ask = self._session(request), job.access.ask
        if session is None or session.role is Role.VIEWER or ask is None:
            return _told("viewers have no buttons: log in with the token of another role", 403)
        if not is_own(request.headers, request.url.scheme, session):
            return _told("only the page itself presses its buttons: open it again", 403)
        if not self._sessions.may_press(time.monotonic()):
            return _told("too many presses: wait some seconds", 429)
        try:
            asked = request_of(await _press_in(request), session.role, _in_force(job))
        except (msgspec.MsgspecError, WrongPress, UnicodeError) as error:
            return _told(f"nothing was done: {error}", 400)
        except PermissionError as error:
            return _told(str(error), 403)
        return await self._asked(ask, asked)

    async def _bundled(self, request: Request, job: OpenJob) -> Response:
        """Answer with a support bundle, which has more of the job than viewers see."""
        refusal = self._refusal(request)
        if refusal is not None or job.access.bundle is None:
            return refusal or PlainTextResponse("there is no bundle of this job\n", 404)
        now = time.monotonic()
        if now < self._next_bundle_s:
            return PlainTextResponse("one was just made: wait some seconds\n", 429)
        self._next_bundle_s = now + BUNDLE_S
        made = await asyncio.to_thread(job.access.bundle)
        named = {"Content-Disposition": f'attachment; filename="{made.name}"'}
        return Response(made.data, media_type="application/gzip", headers=named)

    async def _logged(self, request: Request, job: OpenJob) -> Response:
        """Answer with the end of what a process of a rank has printed: logs are their owner's, and so for operators."""
        refusal = self._refusal(request)
        if refusal is not None or job.access.log is None:
            return refusal or PlainTextResponse("the logs lie with the job, on its machines\n", 404)
        rank, life = (_number(request.query_params.get(name, "")) for name in ("rank", "life"))
        if rank is None or life is None:
            return PlainTextResponse("rank and life: two numbers\n", 400)
        return PlainTextResponse(await asyncio.to_thread(job.access.log, rank, life))

    async def _supposed(self, request: Request, job: OpenJob) -> Response:
        """Answer what the loss of nodes and ranks would cost, by what was seen of the job last."""
        looked, asked = job.live.looked, request.query_params
        ranks = [_number(text) for text in asked.getlist("rank")]
        if looked is None or looked.in_force is None or None in ranks:
            return _told("the policy of the job is not known here, or that is no rank", 404)
        numbers = [rank for rank in ranks if rank is not None]
        suppose = partial(what_if, can_create_nodes=looked.can_create_nodes)
        try:
            found = await asyncio.to_thread(suppose, looked.status, looked.in_force, asked.getlist("node"), numbers)
        except ConfigurationError as error:
            return _told(str(error), 400)
        return JSONResponse({"lost": found.lost, "lines": list(lines(found))})

    def _refusal(self, request: Request) -> Response | None:
        """Refuse what takes the role of an operator, or comes from another site; None: it is answered."""
        session = self._session(request)
        if session is None or session.role is Role.VIEWER:
            return PlainTextResponse("that takes the role of an operator: log in with its token\n", 403)
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return PlainTextResponse("only the page itself asks for that: open it again\n", 403)
        return None

    async def _asked(self, ask: Ask, request: OperatorRequest) -> Response:
        try:
            async with self._asking:
                reply = await asyncio.to_thread(ask, request)
        except MidstepError as error:
            return _told(str(error), 502)
        if isinstance(reply, Accepted):
            return _told(reply.text, 200)
        return _told(reply.reason if isinstance(reply, Refused) else "the answer does not fit the request", 409)

    async def _login(self, request: Request) -> Response:
        now = time.monotonic()
        if request.method == "GET" or not self._sessions.asks:
            return self._file("login.html") if self._sessions.asks else RedirectResponse("/", 303)
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return PlainTextResponse("log in at the page itself\n", 403)
        if not self._sessions.may_try(now):
            return PlainTextResponse("too many wrong tokens: wait a minute\n", 429)
        body = await _body(request, MOST_LOGIN_BYTES)
        cookie = self._sessions.open(_typed_token(body or b""), now)
        if cookie is None:
            said = self._files["login.html"].replace(_PLACE_OF_REFUSAL, b'<p role="alert">This is not the token.</p>')
            return Response(said, 403, media_type="text/html")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE, cookie, max_age=int(SESSION_S), httponly=True, samesite="strict", secure=self._place.is_secure
        )
        return answer

    def _file(self, name: str) -> Response:
        kind = next(kind for suffix, kind in _TYPES.items() if name.endswith(suffix))
        return Response(self._files[name], media_type=kind)


async def _body(request: Request, most: int) -> bytes | None:
    """Return what was sent; None: too much."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return body


def _in_force(job: OpenJob) -> InForce | None:
    """Return the policy that a job goes by, as it was seen last."""
    looked = job.live.looked
    if looked is None or looked.in_force is None or looked.changes < 0:
        return None
    return InForce(looked.in_force, looked.changes)


async def _press_in(request: Request) -> Press:
    """Return what the page's script has sent. Raises WrongPress, MsgspecError."""
    body = await _body(request, MOST_PRESS_BYTES)
    if body is None or request.headers.get("content-type") != "application/json":
        raise WrongPress("that is no press of a button")
    return msgspec.json.decode(body, type=Press)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def _typed_token(body: bytes) -> str:
    """Return what was typed into the form; empty where it is none."""
    return "".join(parse_qs(body.decode("utf-8", "replace"), max_num_fields=4).get("token", [])[:1]).strip()


def _told(text: str, status: int) -> Response:
    return JSONResponse({"text": text}, status)


def listening(place: PagePlace) -> socket.socket:
    """Return a socket that listens. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.host, place.port))
        listener.listen(MOST_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"the page cannot be served at {_in_address(place.host)}:{place.port}: {error.strerror}. Choose another "
            "--listen; with port 0 the system chooses one."
        ) from error
    return listener


def address(place: PagePlace, listener: socket.socket) -> str:
    """Return what a browser is to open."""
    return f"http{'s' if place.is_secure else ''}://{_in_address(place.host)}:{listener.getsockname()[1]}/"


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class PageServer(uvicorn.Server):
    """Ends the streams when it is to end, which do not end by themselves."""

    def __init__(self, config: uvicorn.Config, jobs: PagedJobs) -> None:
        super().__init__(config)
        self._jobs = jobs

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is open, and serve no more."""
        self._jobs.end()
        await super().shutdown(sockets)


def serve(jobs: PagedJobs, place: PagePlace, listener: socket.socket, until: threading.Event | None = None) -> None:
    """Serve the page of jobs until a signal ends it, or `until` is set."""

    async def run() -> None:
        config = uvicorn.Config(
            Page(jobs, place).app(),
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            ssl_certfile=place.certificate or None,
            ssl_keyfile=place.key or None,
        )
        serving = asyncio.create_task((server := PageServer(config, jobs)).serve(sockets=[listener]))
        if until is not None:
            await asyncio.to_thread(until.wait)
            server.should_exit = True
        await serving

    asyncio.run(run())
