"""The share of a step that copies take is said once, when enough steps have been measured."""

import pytest

from midstep.adapters.buddies import CopyTimes


def test_what_copies_take_is_said_once_after_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Eleven steps give ten times from end to end; after that nothing more is measured or said."""
    times = CopyTimes(("sending",))
    for step in range(40):
        with times.spent("sending"):
            pass
        times.step_done()
        assert ("ms for sending (medians of 10)" in capsys.readouterr().err) is (step == 10)
