"""How long the last rank waits for its orders in a job that no test machine can hold: simulated, with measured costs.

    python benchmarks/scale_forecast.py [--ranks 1000,4000,10000,100000] [--rank-us 700] [--json FILE]

The recovery machine is the real one, and so are its events and orders. What is simulated is time: the controller does
one thing after the other, and each event that it takes in and each order that it sends keeps it for as long as
`scale.py` has measured. A rank of an incident is four events and three orders with their acknowledgements, so one of
these takes a seventh of the CPU time for each rank. Ranks answer at once. The first sizes are there to be compared with
`scale.py`: only what was measured says whether the rest can be believed.
"""

import gc
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import figures

from midstep.benchmarks.machine import RANKS_PER_NODE, VICTIM, job_of, news_of_a_kill
from midstep.benchmarks.turns import patient_policy
from midstep.controller.recovery.events import Action, Event, Send
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.forecast.fault_trace import Model
from midstep.forecast.fleet import Fleet
from midstep.protocol.messages import Quiesce, Rejoin, Resume

PARTS = 7  # of what a rank costs: events taken in, and orders sent
ANSWER_S = 0.001  # of a rank
SETTLED_S = 10_000.0
ORDERS = (Quiesce, Rejoin, Resume)
AT_ONCE = Model(step_s=ANSWER_S, stop_s=ANSWER_S, start_s=ANSWER_S, rejoin_s=ANSWER_S)


class BusyFleet(Fleet):
    """A fleet whose controller takes time. `sent_s`: when the last order of each kind had left."""

    def __init__(self, machine: RecoveryMachine, part_s: float) -> None:
        super().__init__(machine, AT_ONCE, nodes_to_come=0, handled=lambda event, actions: None)
        self.part_s = part_s
        self.sent_s: dict[type, float] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Take events in one after another, and send what follows from each."""
        for event in events:
            self.now += self.part_s
            actions = self.machine.handle(event, self.now)
            for action in actions:
                self._send(action)
            if actions:
                self._answer(actions)

    def _send(self, action: Action) -> None:
        if isinstance(action, Send):
            self.now += self.part_s
            self.sent_s[type(action.body)] = self.now


def measure(ranks: int, rank_s: float) -> dict[str, Any]:
    """Simulate the loss of a rank at one size, rounded up to whole nodes."""
    nodes = -(-ranks // RANKS_PER_NODE)
    machine = RecoveryMachine(patient_policy(), job_of(nodes, spares=0))
    fleet = BusyFleet(machine, 0.0)
    fleet.after(0.0, lambda: [fleet.join(f"node{number}") for number in range(nodes)])
    fleet.run_until(SETTLED_S)
    fleet.part_s, began_s = rank_s / PARTS, fleet.now
    *complaints, exited = news_of_a_kill(machine, VICTIM, fleet.now)
    middle = len(complaints) // 2  # where the word of the lost rank's agent comes
    fleet.feed([*complaints[:middle], exited, *complaints[middle:]])
    fleet.run_until(began_s + SETTLED_S)
    if machine.phase is not Phase.RUNNING or machine.incidents[-1].replaced != (VICTIM,):
        raise click.ClickException(f"the job has not recovered as it should: {machine.phase}")
    last = {f"{kind.__name__.lower()}_s": fleet.sent_s[kind] - began_s for kind in ORDERS}
    return {"ranks": nodes * RANKS_PER_NODE, **last}


@click.command(help=__doc__)
@click.option("--ranks", "sizes", default="1000,4000,10000,100000", show_default=True, help="Sizes of the job.")
@click.option("--rank-us", default=700.0, show_default=True, help="CPU time of an incident for each rank.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures to FILE.")
def main(sizes: str, rank_us: float, path: Path | None) -> None:
    """Simulate all sizes; print a table, and write JSON where it is asked for."""
    print(f"{'ranks':>8} {'Quiesce s':>12} {'Rejoin s':>12} {'Resume s':>12}")
    rows = []
    for size in map(int, sizes.split(",")):
        rows.append(row := measure(size, rank_us / 1e6))
        print(
            f"{row['ranks']:>8} {row['quiesce_s']:>12.2f} {row['rejoin_s']:>12.2f} {row['resume_s']:>12.2f}", flush=True
        )
        gc.collect()
    if len(rows) > 1:
        growth = math.log(rows[-1]["resume_s"] / rows[0]["resume_s"]) / math.log(rows[-1]["ranks"] / rows[0]["ranks"])
        print(f"the last Resume grows with the power {growth:.2f} of the ranks")
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rank_us": rank_us, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
