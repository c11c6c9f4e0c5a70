"""Looks for nodes that have gone silent, as often as it is worth it, and says so in the log."""

import logging

from ..protocol.messages import NodeLost
from .liveness import Liveness
from .recovery.events import HoldEnded

LOOKS_IN_INTERVAL = 10  # each goes through all nodes, and a busy controller has hundreds of turns in a second

_log = logging.getLogger(__name__)


class SilenceWatch:
    """Asks `liveness` in the controller's turns."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._not_before_s = 0.0

    def is_due(self, now: float) -> bool:
        """Say whether it is time to look again."""
        return now >= self._not_before_s

    def look(self, now: float) -> tuple[HoldEnded | NodeLost, ...]:
        """Return what follows from the silence of nodes, once. Call it when everything that has arrived was read."""
        self._not_before_s = now + self._liveness.interval_s / LOOKS_IN_INTERVAL
        held = self._liveness.hold
        events = self._liveness.judge(now)
        for event in events:
            _log.warning("%s", event.text if isinstance(event, HoldEnded) else f"node {event.node}: {event.reason}")
        if held is None and self._liveness.hold is not None:
            _log.warning("%s", self._liveness.hold.text(now))
        return events
