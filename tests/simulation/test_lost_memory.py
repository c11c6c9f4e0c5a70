"""Lost memory that a process and a detector both report, in either order, is one fault: no process is replaced."""

import random

from midstep.controller.recovery.state import Phase
from midstep.protocol.types import RestoreSource, Rung
from midstep.testing.simulation.process_faults import lose_memory_and_report
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

SEEDS = 500


def jobs_that_can_mend() -> list[SimulatedWorld]:
    """Return jobs in which nothing else happens, and nothing keeps a process from mending itself, played to the end."""

    def plan(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
        world.injector.when_well(lose_memory_and_report)

    jobs = []
    for seed in range(SEEDS):
        world = SimulatedWorld(seed, plan=plan)
        setting, policy = world.setting, world.policy
        allowed = policy.rung(Rung.RETRY_STEP) is not None and RestoreSource.REPLICA in policy.restore
        copies = setting.size > 1 and setting.replicas >= setting.size and not setting.plain
        heard = setting.loss == 0.0 and setting.delay_s < 0.01 and not setting.checkpoint_every
        if allowed and not policy.roles and copies and heard and setting.total_steps >= 20:
            world.run()
            jobs.append(world)
    return jobs


def test_no_process_is_replaced_for_lost_memory_that_a_detector_sees_too() -> None:
    jobs = jobs_that_can_mend()
    incidents = [incident for world in jobs for incident in world.machine.incidents]
    assert {incident.rung for incident in incidents} == {Rung.RETRY_STEP}
    assert {incident.replaced for incident in incidents} == {()}
    seen_by = {report.seen_by.partition("/")[0] for incident in incidents for report in incident.reports}
    assert seen_by == {"node", "rank"}


def test_a_machine_that_does_not_wait_for_the_process_is_caught() -> None:
    module = "midstep.controller.recovery.blame"
    with applied(Mutant("", module, "return holder.resilient and holder.state in AT_WORK", "return False")):
        jobs = jobs_that_can_mend()
    assert any(incident.replaced for world in jobs for incident in world.machine.incidents)
