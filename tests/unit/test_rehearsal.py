"""A process that is built ahead does ahead what its first step would work out, and no other process does."""

from typing import Any

import pytest

from midstep.processor import built_ahead
from midstep.processor.train_thread import TrainThread


class Noted:
    """A framework that can rehearse, and a runtime that has no rank yet: what was called, in its order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def rehearse(self) -> None:
        """Take note."""
        self.called.append("rehearse")

    def await_rank(self) -> None:
        """Take note, and go no further."""
        self.called.append("await_rank")
        raise KeyboardInterrupt


@pytest.mark.parametrize(("is_built", "called"), [(True, ["rehearse", "await_rank"]), (False, ["await_rank"])])
def test_only_a_process_that_waits_for_its_rank_rehearses(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, called: list[str]
) -> None:
    """All others have a step to do at once, which would wait for it."""
    monkeypatch.setattr(built_ahead, "_await_rank", dict if is_built else None)
    noted: Any = Noted()
    with pytest.raises(KeyboardInterrupt):
        TrainThread(noted, noted)
    assert noted.called == called


def test_a_framework_that_cannot_rehearse_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_ahead, "_await_rank", dict)
    noted: Any = Noted()
    with pytest.raises(KeyboardInterrupt):
        TrainThread(noted, noted.called)  # a list is no framework that can
    assert noted.called == ["await_rank"]
