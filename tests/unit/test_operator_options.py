"""`midstep inject`: which requests the options become, and which combinations are refused with a remedy."""

import click
import pytest

from midstep.cli.inject import FAULT_ACTIONS, FLIPPED, FLIPS, INJECTION_POINTS, build
from midstep.controller.endpoints.control_requests import InjectRequest, KillNodeRequest
from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

COLLECTIVE = ("operation", "group", "rate")  # the options after the first five


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        ((1, None, None, None, None), InjectRequest(ArmedFault(1, FaultAction.KILL))),
        (
            (0, None, "raise", "backward", 7),
            InjectRequest(ArmedFault(0, FaultAction.RAISE, InjectionPoint.BACKWARD, 7)),
        ),
        (
            (2, None, "flip_moment:sign", "update", None),
            InjectRequest(ArmedFault(2, FaultAction.FLIP_MOMENT, InjectionPoint.UPDATE, bits=FlippedBits.SIGN)),
        ),
        ((0, None, "hang", None, 7), InjectRequest(ArmedFault(0, FaultAction.HANG, InjectionPoint.FORWARD, 7))),
        (
            (2, None, "kill-node", "repair", None),
            InjectRequest(ArmedFault(2, FaultAction.KILL_NODE, InjectionPoint.REPAIR)),
        ),
        (
            (0, None, "link-down", None, None, "allreduce", "0,2", 0.5),
            InjectRequest(
                ArmedFault(
                    0, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, operation="allreduce", group=(0, 2), rate=0.5
                )
            ),
        ),
        (
            (1, None, "link-down", None, None, "", None, 0.1),
            InjectRequest(ArmedFault(1, FaultAction.LINK_DOWN, InjectionPoint.FORWARD, rate=0.1)),
        ),
        ((None, "node1", None, None, None), KillNodeRequest("node1")),
        ((None, "node1", "kill-node", None, None), KillNodeRequest("node1")),
    ],
)
def test_options_become_a_request(options: tuple, request_: object) -> None:  # type: ignore[type-arg]
    assert build(*options[:5], **dict(zip(COLLECTIVE, options[5:], strict=False))) == request_


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ((None, None, "kill", None, None), "either --rank R or --node NAME"),
        ((1, "node1", None, None, None), "either --rank R or --node NAME"),
        ((1, None, "link-down", "forward", None, "allreduce"), "leave --at out, or write --at collective"),
        ((1, None, "link-down", None, None, "", "0;1"), "ranks with commas"),
        ((None, "node1", None, None, None, "allreduce"), "--rank R --do kill-node --at POINT"),
        ((None, "node1", None, "update", None), "--rank R --do kill-node --at POINT"),
        ((None, "node1", None, None, 3), "--rank R --do kill-node --at POINT"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_to_do(options: tuple, remedy: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(click.UsageError) as caught:
        build(*options[:5], **dict(zip(COLLECTIVE, options[5:], strict=False)))
    assert remedy in str(caught.value)


def test_every_fault_action_and_injection_point_can_be_named() -> None:
    assert len(FAULT_ACTIONS) + len(FLIPS) + 1 == len(FaultAction)  # one has an option of its own
    assert len(FLIPPED) == len(FLIPS) * len(FlippedBits)
    assert len(INJECTION_POINTS) == len(InjectionPoint)
    assert all("_" not in name for name in FAULT_ACTIONS)
