"""What is done while no controller stays up: try again, give the training up in order, or leave it alone.

Pure: times are arguments. None of it ends a healthy rank because controllers died often.
"""

import enum

from ...policies.schema import ControllerPolicy, WhenLost

STABLE_S = 5.0  # a controller that has served for so long stays up
STOP_TRIES = 3  # ordinary controllers that are started to stop a job, before the last resort


class NextStart(enum.Enum):
    """What is started next."""

    ORDINARY = "a controller"
    STOPPING = "a controller that stops the job"
    LAST_RESORT = "a controller with a copy of the journal in memory, that stops the job"
    NONE = "nothing: the job has to be ended without a controller"


class Outage:
    """The time since the last controller that stayed up, and what has been tried in it."""

    def __init__(self, policy: ControllerPolicy, now: float) -> None:
        """Begin without a controller."""
        self._policy = policy
        self._tries = 0
        self._last_resort_tried = False
        self._by_user = False
        self.since_s: float | None = now
        self.stopping = False  # every further controller is to stop the job

    def ended(self, now: float) -> None:
        """Note that a controller has ended, and the job is not over."""
        if self.since_s is None:
            self.since_s = now

    def stays_up(self) -> None:
        """Note that a controller has served for STABLE_S."""
        self.since_s = None
        self._tries = 0
        self._last_resort_tried = False

    def ask_to_stop(self) -> None:
        """End the job for the user: with a controller, or without one if there is no other way."""
        self.stopping = self._by_user = True

    def is_lost(self, now: float) -> bool:
        """Return whether there has been no controller for so long that the policy decides."""
        return self.since_s is not None and now - self.since_s >= self._policy.lost_after_s

    def next_attempt(self, now: float) -> NextStart:
        """Choose what is started next."""
        if self.stopping:
            return self._next_to_stop()
        if self.is_lost(now) and self._policy.when_lost is WhenLost.STOP and not self._last_resort_tried:
            self._last_resort_tried = True
            return NextStart.LAST_RESORT
        return NextStart.ORDINARY

    def _next_to_stop(self) -> NextStart:
        if self._tries < STOP_TRIES:
            self._tries += 1
            return NextStart.STOPPING
        if not self._last_resort_tried:
            self._last_resort_tried = True
            return NextStart.LAST_RESORT
        if not self._by_user:  # only the user ends ranks that nothing has saved
            self._tries = 0
            self._last_resort_tried = False
        return NextStart.NONE if self._by_user else NextStart.STOPPING
