"""Megatron jobs of one shape: an undisturbed one, and one that loses ranks at chosen moments."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.protocol.types import ArmedFault

from ..comparing import finish
from ..jobs import ROOMY, Job
from ..losing import closing
from .training import Shape

TRAINING = Path(__file__).with_name("training.py")
PRELOAD = [
    "midstep.adapters.megatron.resilient",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
]
POLICY: dict[str, Any] = {**ROOMY, "standby": {"preload": PRELOAD}}
PATIENCE_S = 600.0  # for a job to start and to train, which takes ten seconds, or minutes on a busy machine
PATIENCE_PER_INCIDENT_S = 30.0  # for each recovery, which takes one second on a quiet machine
NODES = 2
StartMegatron = Callable[..., Job]


@pytest.fixture(scope="module")
def start_megatron(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[StartMegatron]:
    """Start jobs of a shape, and kill what is left of them when the module's tests are over."""
    with closing() as keep:

        def start(shape: Shape, faults: tuple[ArmedFault, ...] = (), **options: Any) -> Job:
            root = tmp_path_factory.mktemp("megatron")
            arguments = [str(root / "records"), msgspec.json.encode(shape).decode()]
            each = {"nodes": NODES, "ranks_per_node": shape.world // NODES}
            given = {"policy": POLICY, "device": device, **each, **options}
            return keep(Job(root, script=TRAINING, arguments=arguments, faults=faults, **given))

        yield start


def run_to_its_end(job: Job, *, incidents: int = 1) -> dict[str, Any]:
    """Wait for a job that has to end well after so many incidents, and return its report."""
    assert job.wait(PATIENCE_S + incidents * PATIENCE_PER_INCIDENT_S) == 0, job.said()
    return finish(job)
