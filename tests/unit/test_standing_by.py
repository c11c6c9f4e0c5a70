"""Nodes and operators hear of the controllers of a job."""

import pytest

from midstep.controller.endpoints.control_requests import TryLater
from midstep.controller.endpoints.standing_by import ToldNodes, listed
from midstep.launch import controller_place
from midstep.launch.controller_place import reached_at
from midstep.protocol.bounds import MOST_CONTROLLERS
from midstep.protocol.incidents import ControllerPhase, ControllerStatus
from midstep.protocol.messages import ControllersListed

COLD, LOADING, HOT = ControllerPhase.COLD, ControllerPhase.LOADING, ControllerPhase.HOT


def controller(name: str, phase: ControllerPhase = COLD, term: int = 0, port: int = 1) -> ControllerStatus:
    return ControllerStatus(name, 1, name, phase, term, 0.0, f"tcp://{name}:{port}" if port else "")


def test_the_one_that_leads_comes_first_and_those_without_an_address_are_left_out() -> None:
    known = [controller("a"), controller("b", HOT, 2), controller("c", LOADING, 3), controller("d", port=0)]

    assert listed(known, serves=False) == ControllersListed(
        ("tcp://c:1", "tcp://a:1", "tcp://b:1"), serves=False, leads="tcp://c:1"
    )
    assert listed([controller("a")], serves=False).leads == ""
    many = [controller(f"m{number}") for number in range(3 * MOST_CONTROLLERS)]
    assert len(listed(many, serves=True).endpoints) == MOST_CONTROLLERS


def test_each_node_is_told_once_and_again_when_something_has_changed_or_in_a_while() -> None:
    known: list[ControllerStatus] = []
    told = ToldNodes(lambda: known)
    assert told.answer("node/a", 0.0) is None

    known.append(controller("a", HOT, 1))
    first = told.answer("node/a", 2.0)
    assert first == ControllersListed(("tcp://a:1",), serves=True, leads="tcp://a:1")
    assert told.answer("node/a", 3.0) is None
    assert told.answer("node/b", 3.0) == first

    known.append(controller("b"))
    assert told.answer("node/a", 3.5) is None  # it looks once in a second
    second = told.answer("node/a", 5.0)
    assert second is not None
    assert second.endpoints == ("tcp://a:1", "tcp://b:1")
    assert told.answer("node/a", 6.0) is None
    assert told.answer("node/a", 5.0 + ToldNodes.AGAIN_S) == second


def test_who_is_put_off_is_told_what_to_do() -> None:
    assert TryLater("b", LOADING).text == "controller b is loading the journal: try again in some seconds"
    assert TryLater("b", COLD, "a", "tcp://m0:1").text == "controller b is cold, and a leads at tcp://m0:1"
    assert TryLater("b", COLD, "a").text == "controller b is cold, and a leads"


@pytest.mark.parametrize(
    ("listen", "reached"),
    [
        ("tcp://m0:29400", "tcp://m0:29400"),
        ("tcp://[2001:db8::1]:29400", "tcp://[2001:db8::1]:29400"),
        ("tcp://0.0.0.0:29400", "tcp://192.0.2.7:29400"),
        ("tcp://*:29400", "tcp://192.0.2.7:29400"),
        ("tcp://127.0.0.1:0", ""),
        ("tcp://127.0.0.1:*", ""),
    ],
)
def test_a_controller_is_reached_where_it_listens_or_at_an_address_of_its_machine(
    listen: str, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_place, "address_outside", lambda: "192.0.2.7")

    assert reached_at(listen) == reached
