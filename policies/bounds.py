"""Numbers of a policy, each with what it may be."""

from typing import Annotated

import msgspec

_LONGEST_S = 31_536_000  # a year: longer is a typing error, and infinity no deadline
_MOST = 1_000_000_000

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]
HangSeconds = Annotated[float, msgspec.Meta(ge=6, le=_LONGEST_S)]  # a journal that others read may hold it up for 5
Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Factor = Annotated[float, msgspec.Meta(gt=1, le=1000)]
BlackBoxBytes = Annotated[int, msgspec.Meta(ge=4096, le=1 << 30)]
