"""How long a controller takes to come back, by the length of its job's journal.

    python benchmarks/controller_restart.py [--events 1000 10000 100000 400000] [--ranks 64] [--repeats 3] [--json FILE]

One job is played until its journal is long enough: ranks die one after another, and each time all others report,
quiesce, rejoin, resume and commit. The events are written with the real Journal, which is compacted as a controller
does it. Then its next controller is timed: opening (with the check for damage and the new term), and loading the newest
snapshot and the events after it. The start of the process itself comes on top and is given by itself.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midstep.benchmarks.machine import RANKS_PER_NODE, job_of, news_of_a_kill
from midstep.controller.journal.journal import Journal
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import Event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.controller.routes import Routes
from midstep.forecast.fault_trace import Model
from midstep.forecast.fleet import Fleet
from midstep.policies.schema import default_policy
from midstep.protocol.messages import FaultReported
from midstep.protocol.types import CONTROLLER, JobSpec, node_address, rank_address

BETWEEN_S = 7200.0  # from one incident to the next: no budget is ever spent
BATCH = 1000
SESSION = 1
Record = list[tuple[Event, float]]


def play(job: JobSpec, most: int) -> Record:
    """Return the events of a job to which incidents happen until there are `most` of them."""
    record: Record = []
    machine = RecoveryMachine(default_policy(), job)
    fleet = Fleet(machine, Model(), nodes_to_come=0, handled=lambda event, actions: record.append((event, fleet.now)))
    fleet.after(0.0, lambda: [fleet.join(f"node{number}") for number in range(job.nodes)])
    fleet.run_until(BETWEEN_S)
    number = 0
    while len(record) < most:
        if machine.phase is not Phase.RUNNING:
            raise RuntimeError(f"the job does not run: {machine.phase}")
        fleet.feed(news_of_a_kill(machine, number % job.world_size, fleet.now))
        number += 1
        fleet.run_until(fleet.now + BETWEEN_S)
    return record[:most]


def entries(record: Record) -> Iterator[tuple[JournalEntry, float]]:
    """Number the events as their senders do."""
    numbers: dict[str, int] = {}
    for event, at_s in record:
        sender = sender_of(event)
        numbers[sender] = numbers.get(sender, 0) + 1
        yield JournalEntry(event, sender, SESSION, numbers[sender]), at_s


def sender_of(event: Event) -> str:
    """Return whose word an event is."""
    if isinstance(event, FaultReported):
        return event.report.seen_by
    if (rank := getattr(event, "rank", None)) is not None:
        return rank_address(rank)
    if (node := getattr(event, "node", None)) is not None:
        return node_address(node)
    return CONTROLLER


def write(directory: Path, job: JobSpec, record: Record) -> float:
    """Write a journal and return how long that took."""
    found_journal(journal_path(directory), job, default_policy())
    began_s = time.perf_counter()
    with open_sqlite(journal_path(directory)) as journal:
        learned = known(journal)
        list(journal.load(learned.restore))
        numbered = list(entries(record))
        for first in range(0, len(numbered), BATCH):
            batch = numbered[first : first + BATCH]
            journal.append([entry for entry, _ in batch], batch[0][1])
            for entry, at_s in batch:
                learned.take(entry.event, at_s)
            journal.compact(learned.snapshot, quiet=learned.machine.is_quiet)
            journal.compact(
                learned.snapshot, quiet=True
            )  # a running controller has many more turns than one in a batch
    return time.perf_counter() - began_s


def known(journal: Journal) -> Learned:
    """Return what a controller knows at the founding of a journal's job."""
    return Learned(journal.founding.machine(), Routes(), Liveness(journal.founding.policy.heartbeat))


def timed(does: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long something took, and what came of it."""
    began_s = time.perf_counter()
    result = does()
    return time.perf_counter() - began_s, result


def restart(directory: Path) -> dict[str, float]:
    """Take the journal over as a controller does, and return the time of each part, and the CPU time of all."""
    gc.collect()
    cpu_s = time.process_time()
    open_s, journal = timed(lambda: open_sqlite(journal_path(directory)))
    with journal:
        learned, replayed = known(journal), 0

        def load() -> None:
            nonlocal replayed
            for event, at_s in journal.load(learned.restore):
                learned.take(event, at_s)
                replayed += 1
            list(journal.taken_in())

        load_s, _ = timed(load)
        snapshot_s, snapshot = timed(learned.snapshot)
    return {
        "open_s": open_s,
        "load_s": load_s,
        "replayed": replayed,
        "snapshot_s": snapshot_s,
        "snapshot_bytes": len(snapshot),
        "total_s": open_s + load_s,
        "cpu_s": time.process_time() - cpu_s,
    }


def measure(record: Record, job: JobSpec, repeats: int) -> dict[str, Any]:
    """Measure one length."""
    with tempfile.TemporaryDirectory(prefix="midstep-benchmark-") as name:
        directory = Path(name)
        write_s = write(directory, job, record)
        runs = [restart(directory) for _ in range(repeats)]
        size_bytes = journal_path(directory).stat().st_size
    row: dict[str, Any] = {"events": len(record), "ranks": job.world_size, "repeats": repeats, "size_bytes": size_bytes}
    row["write_s"] = write_s
    for key in runs[0]:
        values = [run[key] for run in runs]
        row[key], row[f"{key}_least"], row[f"{key}_greatest"] = statistics.median(values), min(values), max(values)
    row["cpu_us_per_event"] = 1e6 * row["cpu_s"] / max(1, row["replayed"])
    return row


def process_start_s(repeats: int) -> float:
    """Return how long Python takes to have a controller's modules ready."""
    command = [sys.executable, "-c", "import midstep.controller.service"]
    return statistics.median(timed(lambda: subprocess.run(command, check=True))[0] for _ in range(repeats))


def main() -> int:
    """Measure all lengths; print a table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[1000, 10_000, 100_000, 400_000])
    parser.add_argument("--ranks", type=int, default=64, help="rounded up to whole nodes of 8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_s = process_start_s(options.repeats)
    print(f"the process itself: {start_s:.2f} s")
    head = f"{'events':>8} {'MB':>7} {'open s':>8} {'replayed':>9} {'load s':>8} {'CPU s':>7}"
    print(f"{head} {'total s, median (least-greatest)':>34} snapshot kB, s to write")
    job = job_of(-(-options.ranks // RANKS_PER_NODE), spares=0)
    record = play(job, max(options.events))
    gc.freeze()  # a controller holds no such list of events, through which its collector would have to go
    rows = []
    for events in options.events:
        row = measure(record[:events], job, options.repeats)
        rows.append(row)
        spread = f"{row['total_s']:.3f} ({row['total_s_least']:.3f}-{row['total_s_greatest']:.3f})"
        print(
            f"{events:>8} {row['size_bytes'] / 1e6:>7.1f} {row['open_s']:>8.3f} {row['replayed']:>9.0f} "
            f"{row['load_s']:>8.3f} {row['cpu_s']:>7.3f} {spread:>34} "
            f"{row['snapshot_bytes'] / 1e3:>11.0f} {row['snapshot_s']:.3f}",
            flush=True,
        )
    if options.json is not None:
        data = {"python": sys.version.split()[0], "process_start_s": start_s, "rows": rows}
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
