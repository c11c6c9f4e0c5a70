"""Asks a job's controller to admit this node, until there is an answer.

libzmq says nothing to a client whose keys do not fit: it connects again for ever. So the handshakes are watched, and
who has another job's token is not left waiting.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from .codec import PROTOCOL_VERSION, envelopes_of, frame_of
from .discovery import each_address
from .errors import ConfigurationError, ForeignVersion, NotAdmitted, WireError
from .keys import ClientKeys
from .messages import (
    JOINING_FAMILY,
    ControllersListed,
    EnrolmentRefused,
    EnrolmentRequested,
    Envelope,
    NodeEnrolled,
    RefusedBecause,
)
from .nonblocking import HandshakeWatch
from .token import Invitation
from .transport import DealerSocket
from .types import CONTROLLER

ASK_S = 1.0  # between two requests
ATTEMPT_S = 5.0  # at one endpoint, before the next one is tried
UNREACHED_S = 1.0  # at one where nothing listens, if there are others
SAY_S = 15.0
NAME_FREE_S = 10.0  # a node that has died is given up by then, and its name is free
_POLL_MS = 100
_NONCE_BYTES = 8

_log = logging.getLogger(__name__)


class Admission(msgspec.Struct, frozen=True):
    """A node is admitted, by the controller at `endpoint`."""

    enrolled: NodeEnrolled
    endpoint: str


def ask_for_admission(
    endpoints: Sequence[str],
    invitation: Invitation,
    request: EnrolmentRequested,
    *,
    limit_s: float,
    wanted: Callable[[], bool] = lambda: True,
) -> Admission:
    """Ask until a controller admits this node, for up to `limit_s`, and while it is `wanted`. Blocks.

    Raises NotAdmitted when the token is not the job's, or the controller refuses; ConfigurationError when none answers.
    """
    now = time.monotonic()
    until_s, say_s, name_until_s = now + limit_s, now + SAY_S, now + NAME_FREE_S
    in_turn, leads, standing_by = _in_turn(endpoints), "", ""
    while (now := time.monotonic()) < until_s and wanted():
        endpoint, leads = leads or next(in_turn), ""
        with _Asking(endpoint, invitation, request) as asking:
            reached_by_s = now + (UNREACHED_S if len(endpoints) > 1 else ATTEMPT_S)
            answer = asking.answer(min(until_s, now + ATTEMPT_S), reached_by_s)
        if isinstance(answer, NodeEnrolled):
            return Admission(answer, endpoint)
        standing_by = ""
        if isinstance(answer, ControllersListed):
            standing_by = endpoint
            leads = answer.leads if answer.leads != endpoint else ""
            time.sleep(0.0 if leads else ASK_S)
        if isinstance(answer, EnrolmentRefused):
            in_use = answer.reason is RefusedBecause.NAME_IN_USE and time.monotonic() < name_until_s
            if not in_use and answer.reason is not RefusedBecause.LATER:
                raise NotAdmitted(f"the controller at {endpoint} does not admit this node: {answer.detail}.")
            time.sleep(ASK_S)
        if time.monotonic() >= say_s:
            say_s = time.monotonic() + SAY_S
            _log.warning("waiting for the controller of job %s at %s", invitation.job, ", ".join(endpoints))
    if standing_by:
        raise ConfigurationError(
            f"no controller of job {invitation.job} has led for {limit_s:.0f} s: the one at {standing_by} stands by. "
            "Look with `midstep status` there."
        )
    raise ConfigurationError(
        f"no controller of job {invitation.job} has answered at {', '.join(endpoints)} for {limit_s:.0f} s. Is it "
        "started, and can this machine reach it?"
    )


class _Asking:
    """One connection on which admission is asked for."""

    def __init__(self, endpoint: str, invitation: Invitation, request: EnrolmentRequested) -> None:
        self._endpoint = endpoint
        self._invitation = invitation
        identity = JOINING_FAMILY + secrets.token_hex(_NONCE_BYTES)
        keys = ClientKeys(identity, invitation.join.public, invitation.join.secret, invitation.server_public)
        self._watch = HandshakeWatch()
        self._socket = DealerSocket(endpoint, identity=identity, curve=keys, watch=self._watch)
        self._public_key = request.public_key
        envelope = Envelope(PROTOCOL_VERSION, invitation.job, identity, CONTROLLER, 0, 0, 1, 0, request)
        self._data = frame_of(envelope)

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def answer(self, until_s: float, reached_by_s: float) -> NodeEnrolled | EnrolmentRefused | ControllersListed | None:
        """Return what the controller says; None if it has said nothing by then, or nothing listens there.

        Raises NotAdmitted, also when it speaks another version of the protocol.

        One that stands by says where the others are.
        """
        poller = zmq.Poller()
        poller.register(self._socket.raw, zmq.POLLIN)
        poller.register(self._watch.monitor, zmq.POLLIN)
        asked_s = 0.0
        while (now := time.monotonic()) < until_s and (self._watch.reached or now < reached_by_s):
            if now - asked_s >= ASK_S and not self._socket.wants_to_send:
                asked_s = now
                self._socket.send(self._data)
            poller.poll(_POLL_MS)
            self._require_fit()
            for received in self._socket.receive():
                for body in self._bodies(received.data):
                    if isinstance(body, EnrolmentRefused | ControllersListed):
                        return body
                    if isinstance(body, NodeEnrolled) and body.public_key == self._public_key:
                        return body
        return None

    def _bodies(self, frame: bytes) -> list[object]:
        try:
            return [envelope.body for envelope in envelopes_of(frame)]
        except ForeignVersion as error:
            raise NotAdmitted(
                f"the controller of job {self._invitation.job} at {self._endpoint} cannot be understood: {error}"
            ) from error
        except WireError as error:
            _log.warning("refused: %s", error)
            return []

    def _require_fit(self) -> None:
        """Raise NotAdmitted when the handshakes fail."""
        self._watch.look()
        if self._watch.turned_away:
            raise NotAdmitted(
                f"the controller of job {self._invitation.job} at {self._endpoint} takes this token no longer: it was "
                "replaced (`midstep token --renew`). Take the one that the job has now."
            )
        if self._watch.misfit:
            raise NotAdmitted(
                f"the token is not that of job {self._invitation.job} at {self._endpoint}: all machines need the "
                "same token (--token-file, MIDSTEP_TOKEN) and the same name of the job (--rdzv-id)."
            )


def _in_turn(endpoints: Sequence[str]) -> Iterator[str]:
    """Yield all addresses in turn, for ever; names are looked up again for each turn."""
    while True:
        yield from each_address(endpoints)
