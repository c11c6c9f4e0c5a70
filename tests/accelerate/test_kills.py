"""A script with Accelerate loses its ranks in each part of a step: processes, steps and bits are kept."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Job, inject
from ..chaos.losing import Keep, calm_record, closing, incidents_of

TRAINING = Path(__file__).with_name("training.py")
RANKS = 2
STEPS = 20
PATIENCE_S = 300.0
KILLS = (
    inject(1, InjectionPoint.FORWARD, 3),
    inject(0, InjectionPoint.BACKWARD, 6),
    inject(1, InjectionPoint.COLLECTIVE, 9, life=2),
    inject(0, InjectionPoint.BARRIER, 12, life=2),
    inject(1, InjectionPoint.UPDATE, 15, life=3, action=FaultAction.STOP),
)


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Take a job and return it; it is killed in the end."""
    with closing() as taking:
        yield taking


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_script_with_accelerate_recovers_with_the_bits_of_an_undisturbed_run(
    keep: Keep, tmp_path: Path, precision: str
) -> None:
    """Two micro-batches in each step, clipped gradients, a scheduler; one rank after the other, in each part."""

    def start(name: str, faults: Sequence[ArmedFault], gates: Sequence[int]) -> Job:
        root = tmp_path / name
        arguments = [str(root / "records"), str(STEPS), precision]
        return keep(
            Job(root, nodes=1, ranks_per_node=RANKS, script=TRAINING, arguments=arguments, faults=faults, gates=gates)
        )

    calm = calm_record(start("calm", (), ()), PATIENCE_S)
    gates = [fault.step - 1 for fault in KILLS[1:] if fault.step is not None]
    job = start("hurt", KILLS, gates)
    for incident, kill in zip(incidents_of(job, gates, PATIENCE_S), KILLS, strict=True):
        assert_nobody_harmed(incident, {kill.rank}, ranks=RANKS)
    assert_same_numbers(job.record(), calm, ranks=RANKS)
