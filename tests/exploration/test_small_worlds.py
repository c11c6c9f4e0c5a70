"""Small worlds, every order of events: the nine rules hold in every state."""

from pathlib import Path

import pytest

from .bounds import SMALL, Bound
from .explore import Exploration, OtherBound


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", SMALL, ids=lambda bound: bound.name)
def test_every_state_keeps_the_rules(bound: Bound) -> None:
    """Whatever happens in whatever order, and however the job ends."""
    exploration = Exploration(bound.name, bound.start())
    assert exploration.run()
    print(f"{bound.name}: {exploration.states} states, {exploration.moves} moves, {dict(exploration.ends)}")
    assert exploration.ends[0] > 0


def test_an_exploration_goes_on_where_another_process_has_stopped(tmp_path: Path) -> None:
    """It visits as many states, by as many moves, and comes to the same ends."""
    bound, saved = SMALL[1], tmp_path / "frontier"
    whole, first, second = (Exploration(bound.name, bound.start()) for _ in range(3))
    assert whole.run()
    assert not first.run(most_moves=700)
    first.save(saved)
    second.restore(saved)
    assert second.run()
    assert (second.seen, second.moves, second.ends) == (whole.seen, whole.moves, whole.ends)


def test_a_frontier_of_another_bound_is_refused(tmp_path: Path) -> None:
    """The states would not fit, and none may be left out."""
    saved = tmp_path / "frontier"
    Exploration(SMALL[0].name, SMALL[0].start()).save(saved)
    with pytest.raises(OtherBound, match="nothing goes wrong"):
        Exploration(SMALL[1].name, SMALL[1].start()).restore(saved)
