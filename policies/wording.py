"""How ranks, nodes and faults are named in reasons, so that all reports read the same."""

from collections.abc import Iterable

from ..protocol.types import FaultKind, FaultReport

LONGEST_WORDS = 300  # of an exception, in a reason
_LISTED = 8  # a reason stays one line, also for ten thousand ranks

# Past tense, so that it fits one rank and many.
_HAPPENED = {
    FaultKind.EXCEPTION: "raised an exception",
    FaultKind.EXIT: "ended",
    FaultKind.STALL: "stopped making progress",
    FaultKind.COMMUNICATION: "had a collective fail",
    FaultKind.LINK_UP: "could not build its communicators",
    FaultKind.UNRESPONSIVE: "did not answer in time",
    FaultKind.CORRUPTION: "came back with corrupt state",
    FaultKind.NODE_LOST: "went away",
    FaultKind.START_FAILED: "could not be started",
    FaultKind.DEVICE: "had a device fault",
    FaultKind.MEMORY: "had an uncorrectable memory error",
    FaultKind.MEMORY_MULTI_BIT: "had a multi-bit memory error",
    FaultKind.LINK: "had a link between devices fail",
    FaultKind.OUT_OF_MEMORY: "ran out of memory",
    FaultKind.NODE: "had a fault of the machine",
    FaultKind.SWITCH: "had a switch fail",
    FaultKind.NETWORK: "had a network fault",
    FaultKind.STORAGE: "had a storage fault",
    FaultKind.NODE_JOINED: "joined a world that was smaller than asked for",
    FaultKind.DETECTOR: "could not be looked at",
}


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 1, 3`, or the first eight with how many there are in all."""
    return _listed("rank", [str(rank) for rank in sorted(ranks)])


def nodes_text(nodes: Iterable[str]) -> str:
    """Return `node a`, `nodes a, b`, or the first eight with how many there are in all."""
    return _listed("node", sorted(nodes))


def faults_text(faults: Iterable[FaultReport]) -> str:
    """Return what happened to which ranks, each sort once: `rank 3 ended; node a went away`."""
    seen: dict[tuple[FaultKind, str], set[int | str]] = {}
    for fault in faults:
        who = fault.rank if fault.rank is not None else fault.node
        level = f" of level {fault.level}" if fault.kind is FaultKind.DEVICE else ""
        key = (fault.kind, _HAPPENED[fault.kind] + level)
        seen.setdefault(key, set()).update(() if who is None else (who,))
    parts = []
    for (_, happened), whom in seen.items():
        ranks = [rank for rank in whom if isinstance(rank, int)]
        nodes = [node for node in whom if isinstance(node, str)]
        subjects = ([ranks_text(ranks)] if ranks else []) + ([nodes_text(nodes)] if nodes else [])
        parts.append(f"{' and '.join(subjects) or 'a rank'} {happened}")
    return "; ".join(parts)


def last_words(faults: Iterable[FaultReport]) -> str:
    """Return what the newest exception among the faults says, in one line; empty: there is none."""
    raised = [fault for fault in faults if fault.kind is FaultKind.EXCEPTION]
    return summary_line(max(raised, key=lambda fault: fault.at_s).detail)[:LONGEST_WORDS] if raised else ""


def summary_line(text: str) -> str:
    """Return the last line of a traceback, or the first of anything else."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1].strip() if lines[0].startswith("Traceback") else lines[0].strip()


def one_line(text: str, longest: int = 1000) -> str:
    """Return `text` without line breaks and control characters, and cut."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def _listed(noun: str, names: list[str]) -> str:
    if not names:
        return f"no {noun}"
    plural = "" if len(names) == 1 else "s"
    if len(names) <= _LISTED:
        return f"{noun}{plural} {', '.join(names)}"
    return f"{noun}s {', '.join(names[:_LISTED])}, ... ({len(names)} in all)"
