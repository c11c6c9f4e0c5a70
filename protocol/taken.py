"""What a mailbox makes of an envelope that arrived."""

import msgspec

from .enums import StrEnum
from .messages import Envelope


class Refusal(StrEnum):
    """Why an envelope was not delivered. These are the keys of `Mailbox.refused`."""

    WRONG_VERSION = "wrong version"
    WRONG_JOB = "wrong job"
    WRONG_RECEIVER = "wrong receiver"
    OWN_ADDRESS = "own address"  # another process uses the name of this one
    NEGATIVE = "negative number"
    OLD_TERM = "old term"
    STALE_SESSION = "stale session"
    TOO_MANY_SENDERS = "too many senders"
    DUPLICATE = "duplicate"  # normal on a lossy wire
    UNKNOWN_ACK = "acknowledges another session"


class Taken(msgspec.Struct, frozen=True):
    """What became of an envelope that arrived.

    `reply`, if there is one, must be sent now. `new_session`: the first word of this session of its sender, so the
    sender is new or has been restarted.
    """

    deliver: bool
    refused: Refusal | None = None
    reply: Envelope | None = None
    new_session: bool = False
