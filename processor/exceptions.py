"""Find the fault behind an exception of the train thread, and say what follows. Pure, but for a file that is read.

The same RuntimeError can mean that this process was stopped on purpose, that its memory is damaged, that a link broke
or that another rank failed. What follows differs: nothing, a repair in the living process, another try, a replacement.
Whatever no pattern knows stays what it is, an exception of the train function, and its text goes into the report.

What a driver or a collective library says when a device fails is text, and the text changes with its versions. So the
texts are data (`configs/exceptions.yaml`). A job's policy can have patterns of its own, in the same form: they are
tried first.
"""

import enum
import logging
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources

import msgspec

from ..protocol import errors
from ..protocol.faults import ExceptionPattern as Pattern
from ..protocol.plain_yaml import read_yaml
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
FILE = "exceptions.yaml"
FORMAT_VERSION = 1
HISTORY_UPDATES = 10_000  # that are remembered to tell which of them came after an error of memory
_log = logging.getLogger("midstep")


class Link(msgspec.Struct, frozen=True):
    """One exception of a chain: the names of its class and of those it derives from, and its message."""

    types: tuple[str, ...]
    text: str


class Reaction(enum.Enum):
    """The reaction of the train thread to an exception of the train function."""

    WAIT = "wait"  # a consequence of another rank's fault, or of being stopped: wait for orders, report nothing
    REPORT = "report"  # report it, stay alive, and wait for orders
    LEAVE = "leave"  # report it, and end with the exception: this process is to be replaced


class Finding(msgspec.Struct, frozen=True):
    """The meaning of an exception. `kind` None: no fault, the device was stopped.

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
        """True if a pattern fitted."""
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

    What midstep itself refuses as wrong settings it refuses again, in any process. With `retry_unknown` the process may
    mend an unknown exception by repeating the step, unless it is one of midstep's.
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
    for link in chain:
        if {errors.ConfigurationError.__name__, errors.MidstepError.__name__} <= {*link.types}:
            meaning = "what the script or the policy asks for cannot be done"
            return Finding("refused", FaultKind.REFUSED, FaultLevel.SOFTWARE, False, meaning, link.text)
    kind, text = ("an exception", "") if not chain else (chain[0].types[0], chain[0].text)
    return Finding(
        pattern=UNKNOWN,
        kind=FaultKind.EXCEPTION,
        level=FaultLevel.SOFTWARE,
        mendable=retry_unknown and not any(errors.MidstepError.__name__ in link.types for link in chain),
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
    if finding.kind in {None, FaultKind.COMMUNICATION, FaultKind.REFUSED}:
        return Reaction.REPORT
    return Reaction.LEAVE


def fault_in_recovery(error: Exception, patterns: Sequence[Pattern]) -> FaultKind | None:
    """Return what has failed when rebuild, repair or rollback raised this; None if it is not midstep's own error.

    A callback whose own collective has failed is not at fault for that: a peer is, or its device was stopped.
    """
    if isinstance(error, errors.CallbackFailed):
        finding = classify(chain_of(error), patterns)
        if finding.known and finding.kind in {None, FaultKind.COMMUNICATION}:
            return FaultKind.COMMUNICATION
    kinds: tuple[tuple[type[Exception], FaultKind], ...] = (
        (errors.LinkUpFailed, FaultKind.LINK_UP),
        (errors.CallbackFailed, FaultKind.EXCEPTION),
        (errors.RecoveryError, FaultKind.CORRUPTION),
        (errors.CheckpointError, FaultKind.CORRUPTION),
        (errors.CommunicatorError, FaultKind.COMMUNICATION),
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


class PatternFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    version: int
    patterns: tuple[Pattern, ...]


def parse_patterns(text: str, source: str) -> tuple[Pattern, ...]:
    """Return the patterns of a YAML text, in order. Raises ConfigurationError naming `source` and every mistake."""
    try:
        file = msgspec.convert(read_yaml(text), PatternFile)
    except (errors.YamlError, msgspec.ValidationError) as error:
        raise errors.ConfigurationError(f"{source}: {error}") from error
    mistakes = [] if file.version == FORMAT_VERSION else [f"version: found {file.version}; allowed: {FORMAT_VERSION}"]
    seen: set[str] = set()
    for pattern in file.patterns:
        mistakes += [f"pattern {pattern.name}: {mistake}" for mistake in pattern.mistakes()]
        if pattern.name in seen:
            mistakes.append(f"pattern {pattern.name}: the name stands twice")
        seen.add(pattern.name)
    if mistakes:
        raise errors.ConfigurationError("\n".join(f"{source}: {mistake}" for mistake in mistakes))
    return file.patterns


def known_patterns() -> tuple[Pattern, ...]:
    """Return the patterns that come along with midstep, whatever is installed."""
    return parse_patterns(resources.files("midstep.configs").joinpath(FILE).read_text(), FILE)


@cache
def patterns_here() -> tuple[Pattern, ...]:
    """Return the patterns that hold for the libraries of this process. Reads a file, once.

    Runs in the fork server, too: a process that is forked from it has them. Raises ConfigurationError.
    """
    versions = {}
    for library in ("torch", "torch_npu"):
        try:
            versions[library] = metadata.version(library).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return tuple(pattern for pattern in known_patterns() if pattern.holds_for(versions))


def spread_since(updates: Sequence[tuple[int, int]], time_us: int | None) -> int | None:
    """Return the first step whose update may be made of what an error at `time_us` spoilt; None if there is none.

    `updates` are the last ones: step, and when its update began. An error of unknown time is taken for older than the
    last update, one that is older than all of them for older than anything.
    """
    if not updates:
        return None
    if time_us is None:
        return updates[-1][0]
    if time_us < updates[0][1]:
        return 0 if len(updates) == HISTORY_UPDATES else updates[0][0]
    return next((step for step, began_us in updates if began_us >= time_us), None)
