"""What the recovery machine wants done. The driver does it, in order, after the event that caused it is durable."""

import msgspec

from ..protocol.messages import Command


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send a command and see that it arrives. `generation` is stamped on the envelope."""

    receiver: str
    body: Command
    generation: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Stop resending to a receiver: what was for it is void, or it is gone."""

    receiver: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The job is over: deliver what is outstanding, then leave with `exit_code`."""

    exit_code: int
    reason: str


class Log(msgspec.Struct, frozen=True, tag=True):
    """Write a line into the controller's log: what was decided, and why."""

    text: str


Action = Send | Forget | Finish | Log
