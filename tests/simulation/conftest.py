"""One campaign for all tests here. `MIDSTEP_SIM_SEEDS=7:8` runs one seed, `MIDSTEP_SIM_INCIDENTS=100000` many more."""

import os

import pytest

from midstep.simulation.campaign import Tally, run_campaign

INCIDENTS = int(os.environ.get("MIDSTEP_SIM_INCIDENTS", "10000"))
LIMIT_S = 60 + INCIDENTS // 5  # for machines that do other things besides


@pytest.fixture(scope="session")
def campaign() -> Tally:
    """What the seeds came to."""
    first, _, last = os.environ.get("MIDSTEP_SIM_SEEDS", "0:1000000").partition(":")
    return run_campaign(range(int(first), int(last)), incidents=INCIDENTS)
