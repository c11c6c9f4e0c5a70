"""How ranks, nodes and faults are named in reasons, logs and reports, so that all of them read the same."""

import signal
from collections.abc import Iterable
from typing import NamedTuple

from .types import FaultKind, FaultReport, RankProgress

LONGEST_WORDS = 300  # of an exception, in a reason
BY_ITSELF = "the process ended with status"  # begins the detail of the fault
_OWN_ERRORS = "midstep.protocol.errors.ConfigurationError: "  # as a traceback names them; their text says enough
_LISTED = 8  # a reason stays one line, also for ten thousand ranks


class FaultWords(NamedTuple):
    """How one kind of fault is called: as a noun, and as what happened to one rank or to many."""

    name: str
    happened: str


FAULT_WORDS = {
    FaultKind.EXCEPTION: FaultWords("exception", "raised an exception"),
    FaultKind.REFUSED: FaultWords("refused", "asks for something that midstep refuses"),
    FaultKind.EXIT: FaultWords("process ended", "ended"),
    FaultKind.STALL: FaultWords("stall", "stopped making progress"),
    FaultKind.COMMUNICATION: FaultWords("collective failed", "had a collective fail"),
    FaultKind.LINK_UP: FaultWords("link-up failed", "could not build its communicators"),
    FaultKind.UNRESPONSIVE: FaultWords("unresponsive", "did not answer in time"),
    FaultKind.CORRUPTION: FaultWords("corruption", "came back with corrupt state"),
    FaultKind.ODD_COPY: FaultWords("odd copy", "held something else than the other holders, or memory that changed"),
    FaultKind.COPIES_DIFFER: FaultWords("copies differ", "held another copy than its only other holder"),
    FaultKind.WRONG_GRADIENT: FaultWords("wrong gradient", "computed another gradient than repetitions of its step"),
    FaultKind.GRADIENTS_DIFFER: FaultWords("gradients differ", "computed another gradient than its peer"),
    FaultKind.NODE_LOST: FaultWords("node lost", "went away"),
    FaultKind.START_FAILED: FaultWords("start failed", "could not be started"),
    FaultKind.DEVICE: FaultWords("device fault", "had a device fault"),
    FaultKind.MEMORY: FaultWords("uncorrectable memory error", "had an uncorrectable memory error"),
    FaultKind.MEMORY_MULTI_BIT: FaultWords("multi-bit memory error", "had a multi-bit memory error"),
    FaultKind.LINK: FaultWords("link failed", "had a link between devices fail"),
    FaultKind.OUT_OF_MEMORY: FaultWords("out of memory", "ran out of memory"),
    FaultKind.NODE: FaultWords("machine fault", "had a fault of the machine"),
    FaultKind.SWITCH: FaultWords("switch fault", "had a switch fail"),
    FaultKind.NETWORK: FaultWords("network fault", "had a network fault"),
    FaultKind.STORAGE: FaultWords("storage fault", "had a storage fault"),
    FaultKind.NODE_JOINED: FaultWords("node joined", "joined a world that was smaller than asked for"),
    FaultKind.SLOW: FaultWords("slow", "computed more slowly than others with equal work"),
    FaultKind.SLOW_LINK: FaultWords("slow link", "had slower connections than others"),
    FaultKind.SLOW_INPUT: FaultWords("slow input", "waited longer for its data loader than others"),
    FaultKind.RULE: FaultWords("broken rule", "reported a value, or printed a line, that breaks a rule"),
    FaultKind.REQUESTED: FaultWords("requested", "was to be stopped at a step boundary"),
    FaultKind.DETECTOR: FaultWords("unreadable document", "could not be looked at"),
}


def describe_clock(clock: RankProgress | None) -> str:
    """Say in words what a rank is doing; None: its node did not answer."""
    if clock is None:
        return "its node does not answer"
    held = ", stopped by a signal" if clock.suspended else ""
    held += f", at rest for {clock.rest_s:.1f} s" if clock.rest_s else ""
    return f"in {clock.activity} for {clock.activity_age_s:.1f} s{held}"


def describe_exit(status: int, *, out_of_memory: bool = False) -> str:
    """Say in words how a process ended; negative numbers are signals."""
    if out_of_memory:
        return "the process was killed by the kernel for lack of memory"
    if status >= 0:
        return f"{BY_ITSELF} {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the process was ended by {name}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers in order, runs of three and more joined: `0-3, 7, 9`; of more than eight runs the first ones."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return _cut(parts, sum(map(len, runs)))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as words: `rank 3`, `ranks 0-3, 7`, `no rank`; of very many the first ones, and how many in all."""
    numbers = set(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {numbers_text(numbers)}" if numbers else "no rank"


def nodes_text(nodes: Iterable[str]) -> str:
    """Return nodes as words: `node a`, `nodes a, b`, `no node`; of very many the first ones, and how many in all."""
    names = sorted(nodes)
    return f"node{'' if len(names) == 1 else 's'} {_cut(names, len(names))}" if names else "no node"


def _cut(parts: list[str], total: int) -> str:
    more = f", ... ({total} in all)" if len(parts) > _LISTED else ""
    return ", ".join(parts[:_LISTED]) + more


def faults_text(faults: Iterable[FaultReport]) -> str:
    """Return what happened to which ranks, each sort once: `rank 3 ended; node a went away`."""
    seen: dict[tuple[FaultKind, str], set[int | str]] = {}
    for fault in faults:
        who = fault.rank if fault.rank is not None else fault.node
        level = f" of level {fault.level}" if fault.kind is FaultKind.DEVICE else ""
        key = (fault.kind, FAULT_WORDS[fault.kind].happened + level)
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


def failed_script(faults: Iterable[FaultReport]) -> str:
    """Say how the first process that ended by itself, as a script that fails does, ended, and why; empty: none has.

    What the others say follows from that: their peer is gone.
    """
    ended = [fault for fault in faults if fault.kind is FaultKind.EXIT and fault.output and BY_ITSELF in fault.detail]
    if not ended:
        return ""
    first = min(ended, key=lambda fault: fault.at_s)
    rank = "a rank" if first.rank is None else ranks_text([first.rank])
    words = exception_line(first.output).removeprefix(_OWN_ERRORS).rstrip(".")[:LONGEST_WORDS]
    return f"{rank}: {first.detail}: {words}" if words else f"{rank}: {first.detail}"


def exception_line(output: str) -> str:
    """Return the line with the exception of the last traceback in what a process has printed; else its last line."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    traces = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    after = lines[traces[-1] + 1 :] if traces else []
    raised = next((line for line in after if not line.startswith(" ")), "")
    return raised or (lines[-1].strip() if lines else "")


def summary_line(text: str) -> str:
    """Return the last line of a traceback, or the first of anything else."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    traced = bool(lines) and lines[0].startswith("Traceback")
    return (lines[-1] if traced else next(iter(lines), "")).strip()


def one_line(text: str, longest: int = 1000) -> str:
    """Return `text` without line breaks and control characters, and cut."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(letter if letter.isprintable() else " " for letter in cut)
