"""A stop of a job on Ray reaches the controller that leads it, whichever that is by then, and each only once."""

import pytest

from midstep.launch.ray import StopOnce


class Controller:
    def __init__(self) -> None:
        self.leads = False
        self.interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1


@pytest.fixture
def controller() -> Controller:
    return Controller()


def test_a_controller_that_does_not_lead_yet_is_asked_when_it_does(controller: Controller) -> None:
    """A signal before that would only end it."""
    look = StopOnce(controller, lambda: True)
    look()
    assert controller.interrupts == 0
    controller.leads = True
    look()
    look()
    assert controller.interrupts == 1


def test_a_controller_is_asked_only_when_a_stop_is_wanted(controller: Controller) -> None:
    controller.leads = True
    StopOnce(controller, lambda: False)()
    assert controller.interrupts == 0
