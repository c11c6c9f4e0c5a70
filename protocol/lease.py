"""A Lease as those see it that are elected by it, and those that can read and change it."""

import msgspec


class HeldLease(msgspec.Struct, frozen=True):
    """A Lease as it was read. `holder` "": none leads. `version`: another one after each change."""

    holder: str
    duration_s: int
    version: str
