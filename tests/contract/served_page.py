"""A page that is served in a thread, of a played job, and what asks for it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from midstep.cli.bundle import SupportBundle
from midstep.cli.page import server
from midstep.cli.page.jobs import Ask, JobAccess, PagedJobs
from midstep.cli.page.sections import Looked
from midstep.controller.endpoints.control_requests import Accepted, Reply, Request
from midstep.protocol.errors import MidstepError
from midstep.protocol.identities import Role
from midstep.protocol.incidents import JobStatus, NodeStatus, RankStatus

PATIENCE_S = 20.0
TOKEN = "open sesame"


def played(step: int = 7, name: str = "gpt") -> JobStatus:
    """A job of one rank."""
    return JobStatus(
        job=name,
        at_s=1000.0 + step,
        phase="running",
        generation=1,
        term=1,
        committed=step,
        median_step_s=0.1,
        ranks=(RankStatus(0, "node0", 4711, 1, "training", step, "computing"),),
        nodes=(NodeStatus("node0", "a", "active", (0,)),),
        budgets=(),
        incidents=(),
        ranks_asked=1,
    )


class Looks:
    """A job that is a step further at each look; how often it was looked at."""

    def __init__(self, padding: str = "") -> None:
        self.times = 0
        self.broken = ""
        self._padding = padding

    def __call__(self) -> Looked:
        self.times += 1
        if self.broken:
            raise MidstepError(self.broken)
        return Looked(played(self.times), policy=f"{self.times}{self._padding}")


@contextmanager
def serving(
    look: Callable[[], Looked],
    token: str = "",
    certificate: str = "",
    key: str = "",
    *,
    others: tuple[tuple[Role, str], ...] = (),
    ask: Ask | None = None,
    bundle: Callable[[], SupportBundle] | None = None,
    log: Callable[[int, int], str] | None = None,
) -> Iterator[int]:
    """Serve a page in a thread; yield its port. `others`: tokens of roles with buttons, which ask by `ask`."""
    with serving_all(PagedJobs(JobAccess(look, ask, bundle, log)), token, certificate, key, others) as port:
        yield port


@contextmanager
def serving_all(
    jobs: PagedJobs, token: str = "", certificate: str = "", key: str = "", others: tuple[tuple[Role, str], ...] = ()
) -> Iterator[int]:
    """Serve the page of some jobs in a thread; yield its port."""
    place = server.PagePlace("127.0.0.1", 0, token, certificate, key, others)
    listener = server.listening(place)
    serves = threading.Thread(target=server.serve, args=(jobs, place, listener, ended := threading.Event()))
    serves.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        ended.set()
        serves.join(PATIENCE_S)
        listener.close()
        assert not serves.is_alive()


def get(port: int, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask, and return status, headers and body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, named)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


class Asks:
    """A controller that takes whatever it is asked for."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Reply:
        self.requests.append(request)
        return Accepted("it is done")


ROLES = ((Role.OPERATOR, "open barley"), (Role.ADMIN, "open wheat"))


class Browser:
    """A browser that has brought the token of a role, and the script of the page in it."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        headers = get(port, "/login", "POST", f"token={token.replace(' ', '+')}")[1]
        self.cookie = headers["set-cookie"].partition(";")[0]
        self.told = json.loads(get(port, "/buttons", Cookie=self.cookie)[2])

    def press(self, button: str, values: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
        """Press a button; `headers` in the place of the browser's own. Return status and what is said."""
        body = json.dumps({"button": button, "by": "ann", "why": "the file server", "values": values or {}})
        own = {
            "Cookie": self.cookie,
            "Content_Type": "application/json",
            "Origin": f"http://127.0.0.1:{self._port}",
            "X_Midstep_Proof": self.told["proof"],
        }
        status, _, told = get(self._port, "/press", "POST", body, **{**own, **headers})
        return status, json.loads(told)["text"]


@contextmanager
def watching(port: int, cookie: str = "", job: str = "") -> Iterator[http.client.HTTPResponse]:
    """Open the stream of events."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(
            "GET", f"/events?job={job}" if job else "/events", headers={"Cookie": cookie} if cookie else {}
        )
        answer = connection.getresponse()
        assert answer.status == 200
        yield answer


def heard(stream: http.client.HTTPResponse, name: str) -> dict[str, object]:
    """Wait for an event, and return its data."""
    while True:
        line = stream.readline().decode().strip()
        if line == f"event: {name}":
            told: dict[str, object] = json.loads(stream.readline().decode().removeprefix("data: "))
            return told


def ends(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection: it would have more to say without end."""
    deadline_s = time.monotonic() + PATIENCE_S
    with suppress(ConnectionResetError):
        while connection.recv(1 << 20):
            if time.monotonic() > deadline_s:
                return False
    return True
