"""What goes wrong, and when: drawn from the seed.

By the clock, at a place on a process's way, in a phase of the job, by how much the controller has seen, or each time
that all runs well again. New kinds of faults are functions in the modules beside this one, and a line in `DEEDS`.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..controller.recovery.state import Phase
from . import cluster_faults as cluster
from . import operator_faults as operator
from . import process_faults as processes
from . import storage_faults as storage

if TYPE_CHECKING:
    from .world import World

Deed = Callable[["World", random.Random], str]

DEEDS: tuple[tuple[int, Deed], ...] = (
    (6, processes.kill_rank),
    (3, processes.kill_newcomer),
    (3, processes.stop_rank),
    (2, processes.hang_rank),
    (1, processes.slow_down_rank),
    (3, processes.raise_in_rank),
    (3, processes.strike_rank),
    (2, processes.strike_and_tell),
    (1, processes.tear_update),
    (4, processes.lie),
    (3, processes.cut_link),
    (1, processes.freeze_collectives),
    (2, processes.flaky_links),
    (1, processes.corrupt),
    (1, processes.refuse_start),
    (1, processes.fail_save),
    (3, cluster.kill_node),
    (3, cluster.cut_off_node),
    (2, cluster.isolate_controller),
    (1, cluster.storm),
    (2, cluster.strike_store),
    (1, cluster.add_node),
    (1, cluster.hear_node),
    (3, cluster.device_fault),
    (1, cluster.node_fault),
    (3, cluster.unwell_node),
    (1, cluster.tire_platform),
    (1, cluster.refuse_again),
    (5, operator.crash_controller),
    (2, operator.freeze_controller),
    (1, operator.request_stop),
    (1, operator.inject),
    (1, operator.ask_to_kill_node),
)
_WEIGHTS = [weight for weight, _ in DEEDS]
_DEEDS = [deed for _, deed in DEEDS]

PLACES = ("ready", "updating", "quiesced", "joined", "rebuild", "repair", "rollback")
PHASES = tuple(phase for phase in Phase if phase is not Phase.ENDED)


FOCUSED = 12  # faults of a run that is about one phase


def plan(world: "World", chance: random.Random, focus: Phase | None = None) -> None:
    """Draw the faults of one run: the first somewhere in it, the next at any distance, down to nothing.

    With a `focus` most of them wait for that phase of the job.
    """
    delay_s = chance.uniform(0.0, 6.0)
    _plan_what_leads_to(world, chance, focus)
    for _ in range(FOCUSED if focus else chance.choice((1, 4, 9, 14, 20, 30, 40))):
        deed = chance.choices(_DEEDS, _WEIGHTS)[0]
        way = chance.random()
        if focus is not None and way < 0.8:
            world.strikes.in_phase(focus, chance.choice(_DEEDS))
        elif way < 0.1:
            world.strikes.at_place(chance.choice(PLACES), deed)
        elif way < 0.25:
            world.strikes.in_phase(chance.choice(PHASES), deed)
        elif way < 0.75:
            world.strikes.when_well(deed)
        elif way < 0.9:
            world.strikes.after(delay_s, deed)
        else:
            world.strikes.after_events(chance.randrange(1, 150), deed)
        delay_s += chance.choice((0.0, 0.01, 0.1, 0.5, 2.0, 20.0)) * chance.random()
    if focus is Phase.SAVING and world.policy.scale.min_nodes is None:  # else it never saves
        world.strikes.when_well(operator.request_stop)
    storage.plan(world)


def _plan_what_leads_to(world: "World", chance: random.Random, focus: Phase | None) -> None:
    """Draw the faults without which the job hardly gets into the phase, or to another size."""
    if focus is Phase.PAUSING:
        for _ in range(3):
            world.strikes.when_well(cluster.unwell_node)
    if focus is Phase.SUSPECTING:  # in the middle of a drain, too
        for _ in range(3):
            world.strikes.when_well(cluster.unwell_node)
            world.strikes.when_well(processes.cut_link)
    if world.policy.scale.min_nodes is not None:
        for deed in (cluster.kill_node, cluster.add_node) * chance.choice((1, 1, 2)):
            world.strikes.when_well(deed)
