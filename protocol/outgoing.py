"""A message that waits to be acknowledged, and for how long before it is sent again."""

from .messages import Envelope

RETRY_S = 0.5
RETRY_PER_RANK_S = 0.0002  # what a controller takes to answer one of all ranks that report at the same time


def retry_of(world_size: int) -> float:
    """Return after how long without an answer a message is sent again in a job of so many ranks.

    In a large one an answer takes its time while all ranks report at once, and what is said twice takes more of it.
    """
    return RETRY_S + RETRY_PER_RANK_S * world_size


class Outgoing:
    """A message that is not acknowledged yet."""

    __slots__ = ("due_s", "envelope", "give_up_s", "posted_s", "sent_s", "wait_s")

    def __init__(self, envelope: Envelope, now: float, wait_s: float, give_up_s: float) -> None:
        self.envelope = envelope
        self.posted_s = self.sent_s = now
        self.wait_s = wait_s
        self.give_up_s = give_up_s
        self.due_s = now + wait_s
