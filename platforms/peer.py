"""The connection of a platform with the controller: orders come in, reports go out, also to the next one."""

import asyncio
import logging
import time
from collections.abc import Sequence

from ..protocol.discovery import GIVE_UP_S, Lookup
from ..protocol.keys import ClientKeys
from ..protocol.link import Absence, ControllerLink
from ..protocol.mailbox import Mailbox
from ..protocol.messages import CreateNode, DeleteNode, EndJob, Envelope, KillNode, Report
from ..protocol.token import FullToken
from ..protocol.transport import DealerSocket
from ..protocol.types import PLATFORM
from .base import Platform

RETRY_MAX_S = 2.0
FLUSH_S = 2.0  # for what is still unacknowledged at the end

_log = logging.getLogger(__name__)


class PlatformPeer:
    """Carries the messages of one platform. Construct it in the running loop, then `serve` the platform and
    `introduce` it; `close` it in the end.

    `endpoints`: where controllers may listen, tcp://; several are tried in turn. `lookup`: as in ControllerLink.
    `absent` is set once no controller was there for `leave_s`.
    """

    def __init__(
        self,
        job: str,
        endpoints: Sequence[str],
        keys: ClientKeys,
        *,
        session: int = 0,
        lookup: Lookup | None = None,
        leave_s: float = float("inf"),
    ) -> None:
        self._platform: Platform | None = None
        self.absent = asyncio.Event()
        self.ended = asyncio.Event()  # the job is over
        self._link = ControllerLink(
            Mailbox(
                job=job,
                address=PLATFORM,
                session=session or time.time_ns(),
                retry_max_s=RETRY_MAX_S,
                give_up_s=GIVE_UP_S,
            ),
            DealerSocket(endpoints[0], identity=PLATFORM, curve=keys),
            on_command=self._command,
            on_new_controller=self.introduce,
            lookup=lookup or (lambda: None),
        )
        self._absence: Absence | None = None
        if lookup is None:
            # One that is beside its own controller, and leaves with it, does not serve another one.
            self._absence = Absence(self._link, endpoints, self.absent.set, follows=leave_s == float("inf"))
            self._absence.leave_s = leave_s

    @property
    def endpoint(self) -> str:
        """The endpoint at which the controller is believed to listen."""
        return self._link.endpoint

    def serve(self, platform: Platform) -> None:
        """Hand the controller's orders to a platform from now on. Called before the loop runs on."""
        self._platform = platform

    def post(self, body: Report) -> None:
        """Tell the controller something; it is sent again until it has arrived."""
        self._link.post(body)

    def introduce(self) -> None:
        """Say what there is, so that a controller knows whom it can ask, and what is on its way already.

        Called once there is all that is to be there without being asked for; then for each new controller.
        """
        if self._platform is not None:
            self._link.post(self._platform.describe())

    async def close(self) -> None:
        """Give what was posted last a moment to arrive, and stop talking. Idempotent."""
        await self._link.flush(FLUSH_S)
        self.disconnect()

    def disconnect(self) -> None:
        """Stop talking at once. Idempotent."""
        if self._absence is not None:
            self._absence.close()
        self._link.close()

    def _command(self, envelope: Envelope) -> None:
        platform = self._platform
        assert platform is not None, "orders arrive in the loop, after `serve`"
        match envelope.body:
            case CreateNode() as command:
                platform.create_node(command)
            case DeleteNode() as command:
                platform.delete_node(command)
            case KillNode() as command:
                platform.kill_node(command)
            case EndJob() as command:
                platform.end_job(command)
                self.ended.set()
            case other:
                _log.warning("a platform cannot carry out a %s", type(other).__name__)


def keys_from(token: FullToken, job: str) -> ClientKeys:
    """Return the keys with which a platform connects that has the job's token."""
    pair = token.platform_keys(job)
    return ClientKeys(PLATFORM, pair.public, pair.secret, token.controller_keys(job).public)
