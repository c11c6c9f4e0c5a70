"""All requests of operators: of those who own the run directory, and of those on other machines."""

from collections.abc import Iterator

from .control_requests import Reply, Request
from .control_socket import ControlServer
from .remote_operators import OperatorWire, RemoteAsker, RemoteOperators

Asker = str | RemoteAsker
"""Who is to be answered: a connection to the control socket, or one from another machine."""


class OperatorRequests:
    """Hands out the requests of both, and brings the answers back."""

    def __init__(self, control: ControlServer, wire: OperatorWire) -> None:
        """`control` stays its creator's to close. Requests from other machines come in when `wire` is received from."""
        self._control = control
        self._remote = RemoteOperators(wire)

    @property
    def refused(self) -> dict[str, int]:
        """What was refused so far, by reason."""
        return {**self._control.refused, **self._remote.refused}

    @property
    def pending(self) -> bool:
        """Whether there is something to do now."""
        return self._control.pending or self._remote.next_s() == 0.0

    def next_due(self, now: float) -> float | None:
        """Return when a request that waits may be answered; None: none waits."""
        left_s = self._remote.next_s()
        return None if left_s is None else now + left_s

    def fileno(self) -> int:
        """Return the descriptor of the control socket; the wire has its own."""
        return self._control.fileno()

    def requests(self) -> Iterator[tuple[Asker, Request]]:
        """Yield a bounded number of requests, with whom to answer."""
        yield from self._control.requests()
        yield from self._remote.requests()

    def answer(self, asker: Asker, reply: Reply) -> None:
        """Answer; nothing happens if the asker is gone."""
        if isinstance(asker, RemoteAsker):
            self._remote.answer(asker, reply)
        else:
            self._control.answer(asker, reply)
