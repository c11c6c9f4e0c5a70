"""Jobs with a sharded model: an undisturbed one, and one that loses ranks at chosen moments."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from midstep.protocol.types import ArmedFault

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import ROOMY, Job, Record
from ..losing import calm_record, closing, incidents_of
from .training import Setting

TRAINING = Path(__file__).with_name("training.py")
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh"]
POLICY: dict[str, Any] = {**ROOMY, "standby": {"preload": PRELOAD}, "checkpoint": {"every_steps": 4}}
WORLD = 4
PATIENCE_S = 240.0
HELD: dict[str, Any] = {"grace_s": PATIENCE_S, "suspended_s": 2.0}  # at a gate is no stall; stopped by a signal is one
StartSharded = Callable[..., Job]


class Loss(NamedTuple):
    """One incident: what happens, who is replaced for it, and the step at which all resume."""

    faults: tuple[ArmedFault, ...]
    replaced: set[int]
    resumed_step: int

    @property
    def gate(self) -> int:
        """The step in front of which ranks wait until the incident before is over."""
        return min(fault.step for fault in self.faults if fault.step is not None)


@pytest.fixture(scope="module")
def start_sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSharded]:
    """Start jobs of a setting, and kill what is left of them when the module's tests are over."""
    with closing() as keep:

        def start(
            setting: Setting,
            faults: Sequence[ArmedFault] = (),
            gates: Sequence[int] = (),
            policy: dict[str, Any] = POLICY,
            **options: Any,
        ) -> Job:
            root = tmp_path_factory.mktemp("sharded")
            records = root / "records"
            records.mkdir()
            for step in gates:
                (records / f"gate.{step}").touch()
            given = {**policy, "stall": HELD} if gates else policy
            arguments = [str(records), msgspec.json.encode(setting).decode()]
            return keep(Job(root, script=TRAINING, arguments=arguments, faults=faults, policy=given, **options))

        yield start


def undisturbed(start_sharded: StartSharded, setting: Setting) -> Record:
    """Return the record of a run to which nothing happens: on one node, which computes the same and starts sooner."""
    return calm_record(start_sharded(setting, nodes=1, ranks_per_node=WORLD), PATIENCE_S)


def check_losses(start_sharded: StartSharded, setting: Setting, losses: Sequence[Loss], **options: Any) -> Job:
    """Run a setting with and without losses: each is mended by a copy, and the end is the same bit for bit."""
    calm = undisturbed(start_sharded, setting)
    gates = [loss.gate for loss in losses[1:]]
    job = start_sharded(setting, [fault for loss in losses for fault in loss.faults], gates=gates, **options)
    incidents = incidents_of(job, gates, PATIENCE_S)
    for incident, loss in zip(incidents, losses, strict=True):
        assert_nobody_harmed(incident, loss.replaced, ranks=WORLD)
        assert incident["resumed_step"] == loss.resumed_step, (loss, incident)
    assert_same_numbers(job.record(), calm, ranks=WORLD)
    return job
