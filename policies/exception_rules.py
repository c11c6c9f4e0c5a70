"""The rules for a job's own patterns of exceptions (`exceptions:` of the policy), beyond their form."""

from collections.abc import Sequence

from ..protocol.faults import OF_JOB, ExceptionPattern
from ..protocol.types import FaultKind
from .reading import Problem

MAX_PATTERNS = 100  # they travel in the environment of each process
# What an exception in a process can stand for. The other kinds are seen from outside of it.
KINDS = frozenset(
    {
        FaultKind.EXCEPTION,
        FaultKind.COMMUNICATION,
        FaultKind.DEVICE,
        FaultKind.MEMORY,
        FaultKind.MEMORY_MULTI_BIT,
        FaultKind.LINK,
        FaultKind.OUT_OF_MEMORY,
    }
)


def exception_problems(patterns: Sequence[ExceptionPattern]) -> list[Problem]:
    """Return every rule that the patterns break, empty when they can be used."""
    problems = []
    if len(patterns) > MAX_PATTERNS:
        problems.append(Problem("exceptions", f"found {len(patterns)} patterns; allowed: up to {MAX_PATTERNS}"))
    names: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        key = f"exceptions[{index}]"
        problems += [Problem(key, mistake) for mistake in pattern.mistakes()]
        if pattern.name in names:
            problems.append(Problem(f"{key}.name", f"{pattern.name} is the name of exceptions[{names[pattern.name]}]"))
        names.setdefault(pattern.name, index)
        if pattern.library != OF_JOB or pattern.versions:
            said = "library and versions are for the patterns that come along with midstep; leave them out"
            problems.append(Problem(key, said))
        if pattern.fault is not None and pattern.fault.kind not in KINDS:
            allowed = ", ".join(sorted(KINDS))
            text = f"found {pattern.fault.kind}, which no exception stands for; allowed: {allowed}"
            problems.append(Problem(f"{key}.fault.kind", text))
    return problems
