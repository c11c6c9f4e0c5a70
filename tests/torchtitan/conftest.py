"""Everything in this folder needs torchtitan: its own program under `midstep run`, undisturbed and hurt."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from midstep.examples.torchtitan.assets import make_assets
from midstep.protocol.types import ArmedFault

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import ROOMY, Job, Record
from ..chaos.losing import closing, incidents_of
from .environment import SUITE

HERE = Path(__file__).parent
TRAINING = HERE / "training.py"
WORLD = 4
PATIENCE_S = 900.0
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint"]
POLICY: dict[str, Any] = {
    **ROOMY,
    "standby": {"preload": PRELOAD},
    "checkpoint": {"every_steps": 0},
    "deadlines": {**ROOMY["deadlines"], "quiesce_s": 60.0, "start_s": 240.0, "rejoin_s": 120.0},
}
HSDP = {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 2}
DEBUG_MODEL: dict[str, Any] = {
    "module": "llama3",
    "config": "llama3_debugmodel",
    "debug.seed": 1,
    "training.local_batch_size": 2,
    "training.seq_len": 64,
    "training.mixed_precision_param": "float32",
    "training.disable_cuda_graphs": True,
    "optimizer.implementation": "for-loop",  # the fused one is for accelerators
    "parallelism.spmd_backend": "partial_dtensor",  # torch 2.13 lacks what the default takes
}
StartTitan = Callable[..., Job]


class Moment(NamedTuple):
    """One incident: who is lost, where, and the step at which all resume. Steps are midstep's, from 0."""

    rank: int
    resumed_step: int
    fault: ArmedFault | None = None  # of midstep's injection points
    loss: dict[str, Any] | None = None  # or one that the training ends itself with

    @property
    def gate(self) -> int:
        """The step in front of which ranks wait until the incident before is over."""
        return self.fault.step if self.fault is not None and self.fault.step is not None else self.resumed_step - 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, the hook gets those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("torchtitan")
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def _torchtitan() -> None:
    SUITE.require()


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tokenizer and the text of the debug model."""
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def start_titan(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Iterator[StartTitan]:
    """Start torchtitan's debug model, and kill what is left of it when the module's tests are over."""
    with closing() as keep:

        def start(settings: dict[str, Any], moments: Sequence[Moment] = (), **options: Any) -> Job:
            root = tmp_path_factory.mktemp("titan")
            losses = [moment.loss for moment in moments if moment.loss is not None]
            asked = {**DEBUG_MODEL, "dump_folder": str(root / "dump"), **settings}
            arguments = [str(root / "records"), str(assets), msgspec.json.encode(losses).decode(), *_words(asked)]
            faults = [moment.fault for moment in moments if moment.fault is not None]
            chosen = {"nodes": 1, "ranks_per_node": WORLD, "policy": POLICY, **options}
            return keep(Job(root, script=TRAINING, arguments=arguments, faults=faults, **chosen))

        yield start


def _words(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield f"--{name}"
        if value is not True:
            yield str(value)


def check_moments(
    start_titan: StartTitan, settings: dict[str, Any], moments: Sequence[Moment], calm: Record, **options: Any
) -> Job:
    """Lose a rank at each moment, one after the other: each comes back from its copy, and no bit is another one."""
    gates = [moment.gate for moment in moments[1:]]
    job = start_titan(settings, moments, gates=gates, **options)
    incidents = incidents_of(job, gates, PATIENCE_S)
    for incident, moment in zip(incidents, moments, strict=True):
        assert_nobody_harmed(incident, {moment.rank}, ranks=WORLD)
        assert incident["resumed_step"] == moment.resumed_step, (moment, incident)
    assert_same_numbers(job.record(), calm, ranks=WORLD)
    return job


def whole_checkpoints(job: Job) -> list[int]:
    """Return the steps of which torchtitan finds a checkpoint that it would load."""
    folder = job.records.parent / "dump" / "checkpoint"
    return sorted(int(place.parent.name.partition("-")[2]) for place in folder.glob("step-*/.metadata"))
