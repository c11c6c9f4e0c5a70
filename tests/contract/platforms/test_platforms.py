"""The scenarios that every platform has to pass, on those that need nothing but this computer."""

import pytest

from . import scenarios
from .ordering import Play

pytestmark = pytest.mark.chaos


def test_it_makes_nodes_by_name_says_which_it_has_and_when_it_can_make_no_more(play: Play) -> None:
    play(scenarios.it_makes_nodes_by_name_and_says_which_it_has)


def test_a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not(play: Play) -> None:
    play(scenarios.a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not)
