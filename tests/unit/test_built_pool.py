"""Which processes are built ahead, when, and for whom one is good."""

from pathlib import Path

import msgspec
import pytest

from midstep.agent.built_pool import fits, is_time
from midstep.launch.job import Start, spec_of
from midstep.policies.schema import default_policy
from midstep.protocol import environment as names
from midstep.protocol.reports import builds_ahead
from midstep.protocol.types import Activity, JobSettings, JobSpec, RankProgress, StandbyDepth

BUILT = JobSettings(standby_depth=StandbyDepth.BUILT)
JOB = JobSpec(
    job="j",
    command=("train.py",),
    is_module=False,
    no_python=False,
    environment={},
    working_directory="/",
    job_directory="/job",
    world_size=2,
    ranks_per_node=2,
    nodes=1,
    spare_nodes=0,
    max_restarts=3,
    settings=BUILT,
)
CLOCK = RankProgress(0, 1, 1, 7, Activity.COLLECTIVE, 3, 0.1, 0.2, 0.3)
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", names.CONNECTED: "0", names.INCARNATION: "1", names.STORE: "a:1"}


def test_a_node_chooses_where_the_policy_leaves_it_to_nodes() -> None:
    assert not builds_ahead(JOB, StandbyDepth.AUTO)
    assert builds_ahead(msgspec.structs.replace(JOB, settings=JobSettings()), StandbyDepth.AUTO)


@pytest.mark.parametrize("changes", [{"no_python": True}, {"environment": {names.MINDIO: "1"}}])
def test_no_node_chooses_to_run_ahead_what_has_no_train_function_to_stop_at(changes: dict[str, object]) -> None:
    left_to_nodes = msgspec.structs.replace(JOB, settings=JobSettings())
    assert not builds_ahead(msgspec.structs.replace(left_to_nodes, **changes), StandbyDepth.AUTO)


@pytest.mark.parametrize(("no_python", "depth"), [(True, StandbyDepth.IMPORTED), (False, StandbyDepth.BUILT)])
def test_a_program_that_is_not_python_is_never_run_ahead(no_python: bool, depth: StandbyDepth, tmp_path: Path) -> None:
    """Not even where the policy says so: it would not stop before it trains."""
    policy = default_policy()
    built = msgspec.structs.replace(policy, standby=msgspec.structs.replace(policy.standby, depth=StandbyDepth.BUILT))
    spec = spec_of(Start(("run.sh",), no_python=no_python), "job", built, tmp_path)
    assert spec.settings.standby_depth is depth


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"activity": Activity.COMPUTING}, True),
        ({"median_step_s": 0.0}, False),  # perhaps it never calls a resilient function, and would train if it ran twice
        ({"activity": Activity.STARTING}, False),
        ({"activity": Activity.RECOVERING}, False),
        ({"activity": Activity.FINISHED}, False),
    ],
)
def test_nothing_is_built_before_the_rank_trains(changes: dict[str, object], expected: bool) -> None:
    """Building takes time of the processor from whatever else the node does."""
    assert is_time(msgspec.structs.replace(CLOCK, **changes)) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({names.INCARNATION: "2", names.GENERATION: "5", names.STORE: "b:2", names.STORE_SECRET: "s"}, True),
        ({"MASTER_ADDR": "b", "MASTER_PORT": "2", names.STARTED_S: "1.5", names.EARLY: "0"}, True),
        ({names.CONNECTED: "1"}, False),  # the whole world starts together, and connects in the script
        ({"WORLD_SIZE": "3"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_built_process_is_good_for_a_place_that_differs_only_by_the_fault(
    changes: dict[str, str], expected: bool
) -> None:
    assert fits(ENVIRONMENT, {**ENVIRONMENT, **changes}) is expected
