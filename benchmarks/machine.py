"""Measure what one incident costs the recovery machine, and how that grows with the job.

    python benchmarks/machine.py [--ranks 100 1000 10000 100000] [--repeats 5] [--json FILE]

A rank is killed in a running job; every other rank reports a broken collective, quiesces, rejoins, resumes and commits
the first new step. All events are made beforehand by a played fleet, so that nothing but `RecoveryMachine.handle` is
measured, in seconds of CPU.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from midstep.controller.recovery.events import Event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.forecast.fault_trace import Model
from midstep.forecast.fleet import Fleet
from midstep.policies.schema import default_policy
from midstep.protocol.messages import FaultReported, ProcessExited
from midstep.protocol.types import FaultKind, FaultReport, JobSettings, JobSpec, RunningProcess

RANKS_PER_NODE = 8
SPARES = 2
VICTIM = 3
SETTLED_S = 10_000.0
Record = list[tuple[Event, float]]


def job_of(nodes: int, spares: int = SPARES) -> JobSpec:
    """Return a job on so many nodes."""
    return JobSpec(
        job="benchmark", command=("train.py",), is_module=False, no_python=False, environment={},
        working_directory="/", job_directory="/", world_size=nodes * RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE,
        nodes=nodes, spare_nodes=spares, max_restarts=0, settings=JobSettings(),
    )  # fmt: skip


def new_machine(nodes: int) -> RecoveryMachine:
    """A job to which nothing has happened yet."""
    return RecoveryMachine(default_policy(), job_of(nodes))


def news_of_a_kill(machine: RecoveryMachine, victim: int, now: float) -> list[Event]:
    """Return the first events of an incident: all other ranks complain, then the victim's agent says what it was."""
    generation = machine.generation
    lost = machine.state.world.holders[victim]
    news: list[Event] = [
        FaultReported(
            FaultReport(
                FaultKind.COMMUNICATION, now, f"rank/{holder.rank}", "connection closed by peer", holder.rank,
                holder.node, generation, holder.incarnation,
            )
        )
        for holder in machine.state.world.holders
        if holder is not lost
    ]  # fmt: skip
    process = RunningProcess(victim, lost.pid, lost.incarnation, generation)
    return [*news, ProcessExited(lost.node, process, -9, now, expected=False)]


def play(nodes: int) -> tuple[Record, Record]:
    """Return the events of the start, and those of the incident, each with its time."""
    record: Record = []
    machine = new_machine(nodes)
    fleet = Fleet(machine, Model(), nodes_to_come=0, handled=lambda event, actions: record.append((event, fleet.now)))
    fleet.after(0.0, lambda: [fleet.join(f"node{number}") for number in range(nodes + SPARES)])
    fleet.run_until(SETTLED_S)
    if machine.phase is not Phase.RUNNING:
        raise RuntimeError(f"the job does not run: {machine.phase}")
    start = record[:]
    record.clear()
    fleet.feed(news_of_a_kill(machine, VICTIM, fleet.now))
    fleet.run_until(2 * SETTLED_S)
    if machine.phase is not Phase.RUNNING or machine.incidents[-1].replaced != (VICTIM,):
        raise RuntimeError(f"the job has not recovered as it should: {machine.phase}")
    return start, record


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Measure one size, rounded up to whole nodes."""
    nodes = -(-ranks // RANKS_PER_NODE)
    start, incident = play(nodes)
    took_s = []
    for _ in range(repeats):
        machine = new_machine(nodes)
        for event, at_s in start:
            machine.handle(event, at_s)
        gc.collect()
        began_s = time.process_time()
        for event, at_s in incident:
            machine.handle(event, at_s)
        took_s.append(time.process_time() - began_s)
    median_s = statistics.median(took_s)
    return {
        "ranks": nodes * RANKS_PER_NODE, "nodes": nodes, "events": len(incident), "repeats": repeats,
        "cpu_s": median_s, "cpu_s_least": min(took_s), "cpu_s_greatest": max(took_s),
        "cpu_us_per_event": 1e6 * median_s / len(incident), "cpu_us_per_rank": 1e6 * median_s / nodes / RANKS_PER_NODE,
    }  # fmt: skip


def main() -> int:
    """Measure all sizes; print a table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'ranks':>8} {'events':>8} {'CPU s, median (least-greatest)':>34} {'us per event':>13} {'us per rank':>12}")
    for ranks in options.ranks:
        row = measure(ranks, options.repeats)
        rows.append(row)
        spread = f"{row['cpu_s']:.4f} ({row['cpu_s_least']:.4f}-{row['cpu_s_greatest']:.4f})"
        print(
            f"{row['ranks']:>8} {row['events']:>8} {spread:>34} "
            f"{row['cpu_us_per_event']:>13.2f} {row['cpu_us_per_rank']:>12.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"python": sys.version.split()[0], "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
