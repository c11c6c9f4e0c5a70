"""The runs under a schedule as rows and as Markdown, for the terminal and for docs/benchmarks.md. Pure."""

import statistics
from collections.abc import Mapping

import msgspec

from . import schedule
from .course import Course
from .kinds import Draw, Fault, Setting, Trial
from .plan import Peer
from .results import Results
from .summary import PLAIN, Bits, Spread, spread
from .table import BITS

HEAD = (
    "all steps, s", "without faults, s", "goodput", "lost, s", "faults met", "steps repeated", "processes restarted",
    "ranks at the end", "batches trained", "bits",
)  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """All runs of a tool under a schedule. `shown`: the last that came to the end, or else the last one."""

    trial: Trial
    shown: Course | None
    ended: int = 0
    attempts: int = 0
    total_s: Spread | None = None  # of those that came to the end
    undisturbed_s: float = 0.0  # for as many steps, 0: not measured
    goodput: float = 0.0
    bits: Bits = Bits.UNKNOWN
    why: str = ""  # it was not tried, or the last that did not come to the end


def undisturbed(drawn: Draw) -> Draw:
    """Return the draw of a run of as many steps without a fault."""
    return Draw(0, 0, drawn.steps, drawn.sorts)


def rows(found: Results, peers: Mapping[str, Peer], drawn: Draw, ranks: int) -> list[Row]:
    """Return a row for each tool and setting that was tried or cannot be: the quickest first, last what gave up."""
    made = [
        _row(found, Trial(name, setting, Fault.SCHEDULED, ranks, drawn), peer)
        for name, peer in peers.items()
        for setting in Setting
        if name != PLAIN
    ]
    return sorted((row for row in made if row.attempts or row.why), key=_order)


def _row(found: Results, trial: Trial, peer: Peer) -> Row:
    assert trial.drawn is not None
    attempts = found.done(trial)
    if not attempts:
        cannot = found.not_installed.get(trial.peer, "")
        return Row(trial, None, why=cannot and f"not tried: {cannot}")
    ended = [each.course for each in attempts if each.course is not None and not each.why]
    calm = _undisturbed(found, trial.peer, trial)
    failed = [each for each in attempts if each.why]
    row = Row(
        trial,
        ended[-1] if ended else failed[-1].course,
        len(ended),
        len(attempts),
        undisturbed_s=statistics.median(each.done_s[-1] for each in calm) if calm else 0.0,
        why=_gave_up(trial, failed[-1].why, failed[-1].course, peer) if failed else "",
    )
    if not ended:
        return row
    totals = spread([each.done_s[-1] for each in ended])
    digests = {each.digest for each in (*calm, *_undisturbed(found, PLAIN, trial))} - {""}
    bits = Bits.EQUAL if all(each.digest in digests for each in ended) else Bits.OTHER
    return msgspec.structs.replace(
        row,
        total_s=totals,
        goodput=statistics.median(each.goodput(trial.ranks) for each in ended),
        bits=bits if digests else Bits.UNKNOWN,
    )


def _undisturbed(found: Results, peer: str, trial: Trial) -> list[Course]:
    """Return the courses of a tool when nothing happens, whatever its setting."""
    assert trial.drawn is not None
    calm = (Trial(peer, setting, Fault.NONE, trial.ranks, undisturbed(trial.drawn)) for setting in Setting)
    return [each.course for kind in calm for each in found.done(kind) if each.course is not None and not each.why]


def _gave_up(trial: Trial, why: str, came: Course | None, peer: Peer) -> str:
    """Say how far a run came that did not come to the end, and what had happened to it last."""
    assert trial.drawn is not None
    first = why.partition("\n")[0]
    if came is None or not came.met:
        return first
    last = schedule.of(trial).faults[came.met[-1]]
    known = peer.cannot.get((trial.setting, last.fault), "")
    met = f"{last.fault.value} of rank {last.place}"
    done = f"gave up at step {len(came.done_s)} of {trial.drawn.steps} ({met}): {first}"
    return f"{done} ({known})" if known else done


def _order(row: Row) -> tuple[float, int]:
    return (row.total_s.median if row.total_s else float("inf"), -len(row.shown.done_s) if row.shown else 0)


def text(found: Results, peers: Mapping[str, Peer]) -> str:
    """Return a table for each schedule and size that was tried, with its faults."""
    tried = dict.fromkeys(
        (each.trial.drawn, each.trial.ranks) for each in found.attempts if each.trial.fault is Fault.SCHEDULED
    )
    return "\n\n".join(_table(found, peers, drawn, ranks) for drawn, ranks in tried if drawn is not None)


def _table(found: Results, peers: Mapping[str, Peer], drawn: Draw, ranks: int) -> str:
    planned = schedule.draw(drawn, ranks).faults
    title = f"{ranks} ranks, {drawn.steps} steps, {drawn.faults} faults of seed {drawn.seed}"
    listed = ", ".join(f"{each.step}/{each.place} {each.fault.value}" for each in planned)
    lines = [f"Faults, by step/rank: {listed}.", ""]
    lines += [f"| {title} | " + " | ".join(HEAD) + " |", "| --- |" + " --- |" * len(HEAD)]
    made = rows(found, peers, drawn, ranks)
    lines += [_line(row, peers, best=row is made[0]) for row in made]
    return "\n".join(lines)


def _line(row: Row, peers: Mapping[str, Peer], *, best: bool) -> str:
    name = f"{peers[row.trial.peer].title}, {row.trial.setting.value}"
    came = row.shown
    if came is None:
        return f"| {name} | {row.why} |" + " |" * (len(HEAD) - 1)
    assert row.trial.drawn is not None
    total = row.why
    if row.total_s is not None:
        total = f"**{row.total_s.median:.1f}**" if best else f"{row.total_s.median:.1f}"
        if row.ended > 1:
            total += f" ({row.total_s.least:.1f}-{row.total_s.greatest:.1f})"
        if row.why:
            total += f"; {row.attempts - row.ended} of {row.attempts} {row.why}"
    world = came.worlds[-1] if came.worlds else 0
    cells = [
        total,
        f"{row.undisturbed_s:.1f}" if row.undisturbed_s else "?",
        f"{row.goodput:.2f}" if row.total_s else "",
        f"{came.lost_s(row.trial.ranks):.1f}" if row.total_s else "",
        f"{len(came.met)} of {row.trial.drawn.faults}",
        str(came.steps_repeated),
        str(came.processes_restarted),
        str(world) if world == row.trial.ranks else f"**{world}**",
        f"{came.trained(row.trial.ranks):.0%}" if row.total_s else "",
        BITS[row.bits] if row.total_s else "",
    ]
    return f"| {name} | " + " | ".join(cells) + " |"
