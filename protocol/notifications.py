"""Notices, by which webhooks tell people about a job: their kinds, one of them, and how a webhook is doing."""

import msgspec

from .compat import StrEnum


class NoticeKind(StrEnum):
    """An event of a job that a person may want to be told of. A policy names them."""

    ASKED = "asked"  # the job does not get on without a person
    BUDGET = "budget"  # most of a budget is spent
    NO_SPARE = "no_spare"  # no spare node is left
    UNGUARDED = "unguarded"  # the job was without a controller
    CHECKPOINT_OLD = "checkpoint_old"
    GOODPUT_LOW = "goodput_low"
    ENDED = "ended"


class Notice(msgspec.Struct, frozen=True):
    """One thing to be told. `id`: the same in each try. `at_s`: when it was decided, wall-clock seconds.

    `subject` says which of several things of the kind it is about: a budget, a node. `text` is for people.
    """

    id: str
    kind: NoticeKind
    subject: str
    text: str
    at_s: float


class WebhookStatus(msgspec.Struct, frozen=True):
    """A webhook as the leading controller knows it. `trouble`: why its last try failed; empty: it did not.

    `waiting`: notices that it has yet to get.
    """

    name: str
    waiting: int = 0
    trouble: str = ""
