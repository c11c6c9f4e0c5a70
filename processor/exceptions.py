"""From an exception to the fault behind it: pure, by patterns that are data (`configs/exceptions.yaml`).

The same RuntimeError can mean that this process was stopped on purpose, that its memory is damaged, that a link broke
or that another rank failed. What follows differs: nothing, a repair in the living process, another try, a replacement.
Whatever no pattern knows stays what it is, an exception of the train function, and its text goes into the report.
"""

import enum
from collections.abc import Sequence

import msgspec

from ..protocol.errors import (
    CallbackFailed,
    CheckpointError,
    CommunicatorError,
    LinkUpFailed,
    MidstepError,
    RecoveryError,
)
from ..protocol.exception_pattern import ExceptionPattern as Pattern
from ..protocol.types import FaultKind, FaultLevel

# What an exception can only say of this process itself.
_OWN = frozenset(
    {
        FaultKind.DEVICE,
        FaultKind.MEMORY,
        FaultKind.MEMORY_MULTI_BIT,
        FaultKind.LINK,
        FaultKind.OUT_OF_MEMORY,
    }
)
_LONGEST_CHAIN = 10
_LONGEST_TEXT = 300
UNKNOWN = "unknown"


class Link(msgspec.Struct, frozen=True):
    """One exception of a chain: the names of its class and of those it derives from, and its message."""

    types: tuple[str, ...]
    text: str


class Reaction(enum.Enum):
    """What the train thread does about an exception of the train function."""

    WAIT = "wait"  # a consequence of another rank's fault, or of being stopped: wait for orders, report nothing
    REPORT = "report"  # report it, stay alive, and wait for orders
    LEAVE = "leave"  # report it, and end with the exception: this process is to be replaced


class Finding(msgspec.Struct, frozen=True):
    """What an exception means. `kind` None: no fault, the device was stopped.

    `pattern` is the name of the pattern that fitted, `unknown` if none did. `time_us` is the device's own time stamp of
    the error, where the text has one.
    """

    pattern: str
    kind: FaultKind | None
    level: FaultLevel
    mendable: bool
    meaning: str
    text: str
    time_us: int | None = None
    locate: bool = False  # memory is damaged: the device is to be asked where

    @property
    def known(self) -> bool:
        """Whether a pattern fitted."""
        return self.pattern != UNKNOWN


def chain_of(error: BaseException) -> tuple[Link, ...]:
    """Return an exception and what caused it, outermost first; at most ten, and each once."""
    links: list[Link] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(links) < _LONGEST_CHAIN:
        seen.add(id(current))
        links.append(Link(tuple(kind.__name__ for kind in type(current).__mro__), _text(current)))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return tuple(links)


def classify(chain: Sequence[Link], patterns: Sequence[Pattern], *, retry_unknown: bool = False) -> Finding:
    """Return what an exception means: the first pattern that fits it, else one that fits its cause, else unknown.

    With `retry_unknown` the process may mend an unknown one by repeating the step, unless midstep itself has raised it:
    what it refuses once it refuses again.
    """
    for link in chain:
        for pattern in patterns:
            found = _fits(pattern, link)
            if found is not None:
                fault = pattern.fault
                return Finding(
                    pattern=pattern.name,
                    kind=None if fault is None else fault.kind,
                    level=FaultLevel.SOFTWARE if fault is None else fault.level,
                    mendable=fault is not None and fault.mendable,
                    meaning=pattern.meaning,
                    text=_short(link.text),
                    time_us=found.time_us,
                    locate=fault is not None and fault.locate,
                )
    kind, text = ("an exception", "") if not chain else (chain[0].types[0], chain[0].text)
    return Finding(
        pattern=UNKNOWN,
        kind=FaultKind.EXCEPTION,
        level=FaultLevel.SOFTWARE,
        mendable=retry_unknown and not any(MidstepError.__name__ in link.types for link in chain),
        meaning=f"{kind} in the train function",
        text=_short(text),
    )


def reaction(finding: Finding, *, collateral: bool) -> Reaction:
    """Say what follows from an exception.

    `collateral`: this process was ordered to stop, or its communicators had failed before. Then an exception is taken
    for a consequence, unless it names something of this process's own: its memory, its links.
    """
    if finding.mendable and (finding.known or not collateral):
        return Reaction.REPORT
    if collateral and finding.kind not in _OWN:
        return Reaction.WAIT
    if finding.kind is None or finding.kind is FaultKind.COMMUNICATION:
        return Reaction.REPORT
    return Reaction.LEAVE


def fault_in_recovery(error: Exception) -> FaultKind | None:
    """Return what has failed when rebuild, repair or rollback raised this; None if it is not midstep's own error."""
    kinds: tuple[tuple[type[Exception], FaultKind], ...] = (
        (LinkUpFailed, FaultKind.LINK_UP),
        (CallbackFailed, FaultKind.EXCEPTION),
        (RecoveryError, FaultKind.CORRUPTION),
        (CheckpointError, FaultKind.CORRUPTION),
        (CommunicatorError, FaultKind.COMMUNICATION),
    )
    return next((kind for raised, kind in kinds if isinstance(error, raised)), None)


class _Fit(msgspec.Struct, frozen=True):
    time_us: int | None = None


def _fits(pattern: Pattern, link: Link) -> _Fit | None:
    if pattern.types and not set(pattern.types) & set(link.types):
        return None
    if pattern.text is not None and pattern.text not in link.text:
        return None
    if pattern.compiled is None:
        return _Fit()
    found = pattern.compiled.search(link.text)
    if found is None:
        return None
    stamp = found.groupdict().get("time_us")
    return _Fit(None if stamp is None else int(stamp))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's class may fail to describe itself; the fault must be reported nevertheless
        return f"{type(error).__name__} without a readable text"


def _short(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= _LONGEST_TEXT else f"{first[:_LONGEST_TEXT]}..."
