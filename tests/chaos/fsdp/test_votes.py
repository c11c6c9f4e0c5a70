"""A sharded model of which two ranks hold each piece: flips are found by their votes, and all processes are kept."""

from typing import Any

import pytest

from midstep.cli.page.sections import Looked, SectionWriter
from midstep.cli.views.status_view import vote_lines
from midstep.controller.endpoints.control_requests import InjectRequest
from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from ..comparing import finish
from ..test_integrity import assert_same_end, blamed, flip
from .conftest import PATIENCE_S, WORLD, StartSharded, undisturbed
from .test_host_copies import COPYING
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

VOTING: dict[str, Any] = {**COPYING, "integrity": {"every_steps": 1, "strikes": 100}}
A_FEW = [
    flip(2, FaultAction.FLIP_PARAMETER, 4),
    flip(3, FaultAction.FLIP_GRADIENT, 7, FlippedBits.ELEMENT),
]
ALL = [
    flip(number % WORLD, action, 4 + 4 * number, bits)
    for number, (action, bits) in enumerate(
        (action, bits)
        for action in (FaultAction.FLIP_PARAMETER, FaultAction.FLIP_MOMENT, FaultAction.FLIP_GRADIENT)
        for bits in FlippedBits
    )
]


@pytest.mark.parametrize(
    "flips", [pytest.param(A_FEW, id="a few"), pytest.param(ALL, id="all kinds and bits", marks=pytest.mark.soak)]
)
def test_pieces_that_two_ranks_hold_are_voted_on(start_sharded: StartSharded, flips: list[ArmedFault]) -> None:
    """Memory that changes comes from the other row; of an update that was wrong the repetition tells whose it was."""
    last = flips[-1].step
    assert last is not None
    setting = Setting(mesh=(2, 2), steps=last + 4)
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, flips, nodes=1, ranks_per_node=WORLD, policy=VOTING)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_end(job.record(), calm, WORLD)
    incidents, said = finish(job)["incidents"], job.said()
    assert len(incidents) == len(flips), incidents
    for each, incident in zip(flips, incidents, strict=True):
        assert incident["pids_before"] == incident["pids_after"], incident
        assert each.step is not None
        changed = each.action is FaultAction.FLIP_PARAMETER
        assert blamed(incident) == ({each.rank} if changed else set()), incident
        assert incident["restore"] == ("replica" if changed else "host_copy"), incident
        wrong = [rank for rank in range(WORLD) if f"rank {rank} was wrong at step {each.step + 1}: the repet" in said]
        assert wrong == ([] if changed else [each.rank])


def test_status_names_pieces_that_one_rank_alone_holds(start_sharded: StartSharded) -> None:
    """On a mesh of one dimension no vote checks them; the names are those of the ranks, in the text and on the page."""
    job = start_sharded(Setting(mesh=(2,), steps=8), gates=[6], nodes=1, ranks_per_node=2, policy=VOTING)
    job.held_at(6)
    status = job.until(lambda now: bool(now.single_copies), "the ranks' word on their votes")
    assert status.single_copies == ("sharded.rank0", "sharded.rank1")
    says = "not checked: shards sharded.rank0, sharded.rank1 of ranks 0, 1, of which there is no other copy"
    (line,) = vote_lines(status)
    assert says in line.plain
    assert says in SectionWriter().write(Looked(status))["reserves"].decode()
    job.open_gate(6)
    assert job.wait(PATIENCE_S) == 0, job.said()


@pytest.mark.soak
def test_a_rank_whose_piece_is_wrong_in_each_update_moves_to_a_spare(start_sharded: StartSharded) -> None:
    """It differs from itself in the repetition, and the other holder of the piece does not."""
    setting = Setting(mesh=(2, 2), steps=8, step_s=0.3)  # slow enough for copies to be on two nodes
    calm = undisturbed(start_sharded, setting)
    broken = ArmedFault(3, FaultAction.FLIP_GRADIENT, InjectionPoint.UPDATE, None, 1, rate=1.0)
    policy = {**VOTING, "host_copy": {"every_steps": 1, "copies": 2}}
    job = start_sharded(setting, gates=[4], nodes=2, ranks_per_node=2, spares=1, policy=policy)
    job.held_at(4)
    job.ask(InjectRequest(broken))
    job.open_gate(4)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_end(job.record(), calm, WORLD)
    first, second = finish(job)["incidents"]
    assert (blamed(first), first["replaced"], first["restore"]) == (set(), [], "host_copy"), first
    assert (blamed(second), second["replaced"], second["restore"]) == ({3}, [2, 3], "host_copy"), second
    assert second["healthy_pids_kept"], second
