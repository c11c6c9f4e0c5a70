"""A scrape of a large job: what the controller's loop pays to publish its numbers, and how long a scraper waits.

The machine is the real one, brought to training by a played fleet; the server is the real one, scraped over HTTP.
"""

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from midstep import __version__
from midstep.controller.endpoints.metrics_server import MetricsServer, PublishedMetrics, metrics_place
from midstep.controller.liveness import ProgressBoard
from midstep.controller.metrics import MetricsBook, Observation
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.controller.time_account import TimeAccount
from midstep.forecast.fault_trace import Model
from midstep.forecast.fleet import Fleet
from midstep.policies.schema import default_policy
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.types import Activity, JobSettings, JobSpec, RankProgress

GOAL_S = 0.05
START_S = 600.0


def main() -> None:
    """Measure, and print a line for each number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options = parser.parse_args()
    measured = measure(options.nodes, options.ranks_per_node, options.times)
    if options.json:
        options.json.write_text(json.dumps(measured))
    print(f"{options.nodes * options.ranks_per_node} ranks, {options.times} times, median (worst), goal of a scrape "
          f"{1000 * GOAL_S:.0f} ms")  # fmt: skip
    for what, (median_s, worst_s) in measured.items():
        print(f"{what:<28}{1000 * median_s:9.2f} ms ({1000 * worst_s:.2f} ms)")


def measure(nodes: int, ranks_per_node: int, times: int) -> dict[str, tuple[float, float]]:
    """Return median and worst time of each part, in seconds."""
    machine, account = training(nodes, ranks_per_node)
    board, book, published = beaten(nodes, ranks_per_node), MetricsBook(__version__), PublishedMetrics()

    def publish() -> None:
        now = START_S
        seen = Observation(now, machine.state, board.reached(), account.until(now), account.windows(now), {}, 1)
        published.latest = book.snapshot(seen)

    publishing = _timed(publish, times)
    told = Queue[str]()
    server = MetricsServer(metrics_place("127.0.0.1:0", None), published, told.put)
    server.start()
    address = told.get(timeout=10.0)

    def scrape() -> None:
        with urllib.request.urlopen(address, timeout=10.0) as answer:
            answer.read()

    scraping = _timed(scrape, times)
    server.close()
    return {"publish, in the loop": publishing, "scrape, beside the loop": scraping}


def training(nodes: int, ranks_per_node: int) -> tuple[RecoveryMachine, TimeAccount]:
    """Return the machine of a large job that trains, and the account of its time."""
    job = JobSpec(
        job="large", command=("train.py",), is_module=False, no_python=False, environment={}, working_directory="/",
        job_directory="/", world_size=nodes * ranks_per_node, ranks_per_node=ranks_per_node, nodes=nodes,
        spare_nodes=4, max_restarts=0, settings=JobSettings(),
    )  # fmt: skip
    machine, account = RecoveryMachine(default_policy(), job), TimeAccount()
    fleet = Fleet(
        machine, Model(), nodes_to_come=0, handled=lambda event, _: account.follow(machine.state, event, fleet.now)
    )
    fleet.after(0.0, lambda: [fleet.join(f"node{number}") for number in range(nodes + 4)])
    fleet.run_until(START_S)
    assert machine.phase is Phase.RUNNING, machine.phase
    return machine, account


def beaten(nodes: int, ranks_per_node: int) -> ProgressBoard:
    """Return what the last heartbeats of all nodes have told."""
    board = ProgressBoard(world_size=nodes * ranks_per_node)
    for node in range(nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        clocks = (RankProgress(rank, 1, 1, 100, Activity.COMPUTING, 4, 0.0, 0.0, 0.5) for rank in ranks)
        board.take(NodeHeartbeat(f"node{node}", 0.0, tuple(clocks)))
    return board


def _timed(what: Callable[[], None], times: int) -> tuple[float, float]:
    took: list[float] = []
    for _ in range(times):
        began_s = time.perf_counter()
        what()
        took.append(time.perf_counter() - began_s)
    return statistics.median(took), max(took)


if __name__ == "__main__":
    main()
