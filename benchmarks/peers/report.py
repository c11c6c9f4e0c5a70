"""All that a comparison has found, as the tables of docs/benchmarks.md. Pure: results in, text out."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from . import schedule_table, summary, table
from .course import Course
from .kinds import Fault, Setting, Trial
from .outcome import Outcome
from .plan import Peer
from .results import Results
from .summary import PLAIN, Row

KEPT = Path(__file__).with_name("kept.json")  # what docs/benchmarks.md shows
KEPT_SHARDED = KEPT.with_name("kept-hsdp.json")
KEPT_SCHEDULED = KEPT.with_name("kept-scheduled.json")
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "peers.svg"
PICTURE_SCHEDULED = PICTURE.with_name("peers-scheduled.svg")


def places(*, scheduled: bool, sharded: bool) -> tuple[Path, Path | None]:
    """Return where the figures of docs/benchmarks.md are kept, and their picture."""
    if scheduled:
        return KEPT_SCHEDULED, PICTURE_SCHEDULED
    return (KEPT_SHARDED, None) if sharded else (KEPT, PICTURE)


def in_short(came: Outcome | Course) -> str:
    """Say how one run went."""
    if isinstance(came, Course):
        return f"{len(came.done_s)} steps in {came.done_s[-1]:.1f} s, {len(came.met)} faults, step {came.step_s:.2f} s"
    return f"excess {came.excess_s:.2f} s, step {came.step_s:.2f} s"


def rows_of(found: Results, peers: Mapping[str, Peer]) -> list[Row]:
    """Return a row for each peer and setting, for each fault and size that was tried with any of them."""
    tried = dict.fromkeys((each.trial.fault, each.trial.ranks) for each in found.attempts if not each.trial.drawn)
    rows = []
    for fault, ranks in tried:
        for name, peer in peers.items():
            for setting in Setting:
                trial = Trial(name, setting, fault, ranks)
                if fault is Fault.NONE or trial.tool == PLAIN:
                    continue
                cannot = found.not_installed.get(name) or peer.cannot.get((setting, fault), "")
                attempts = found.done(trial)
                if attempts or cannot:
                    digests = summary.undisturbed_digests(found.attempts, name, ranks)
                    rows.append(summary.row_of(trial, attempts, digests, cannot and f"not tried: {cannot}"))
    return rows


def without_logs(found: Results) -> Results:
    """Return the same, without what the programs of failed trials printed."""
    attempts = [msgspec.structs.replace(each, why=each.why.partition("\n")[0]) for each in found.attempts]
    return msgspec.structs.replace(found, attempts=attempts)


def page(found: Results, peers: Mapping[str, Peer]) -> str:
    """Return all tables, with the machine and its load: of one fault each, and of schedules."""
    if not found.attempts:
        return "Nothing has been measured so far.\n"
    foreign = summary.spread([attempt.foreign_cores for attempt in found.attempts])
    machine = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    rows = rows_of(found, peers)
    parts = [
        f"Machine: {machine}. Foreign cores before each run: {foreign}; {len(found.attempts)} runs.",
        table.ratios(rows, peers),
        table.faults(rows, peers),
        table.steps(summary.step_rows(found.attempts), peers),
        schedule_table.text(found, peers),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
