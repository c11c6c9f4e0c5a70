"""What a mailbox makes of an envelope that arrived."""

import msgspec

from .messages import Envelope


class Taken(msgspec.Struct, frozen=True):
    """What became of an envelope that arrived.

    `reply`, if there is one, must be sent now. `new_session`: the first word of this session of its sender, so the
    sender is new or has been restarted.
    """

    deliver: bool
    refused: str | None = None
    reply: Envelope | None = None
    new_session: bool = False
