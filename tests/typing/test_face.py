"""The face of the package as a user's script sees it, to the type checker (`mypy` reads this file) and at run time."""

import pytest
import torch
from typing_extensions import assert_type

import midstep
from midstep.protocol import environment


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> midstep.TrainState:
    """The state of a small model, in a process that nobody started under `midstep run`."""
    monkeypatch.delenv(environment.JOB, raising=False)
    model = torch.nn.Linear(2, 1)
    return midstep.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_resilient_function_keeps_its_signature(state: midstep.TrainState) -> None:
    """Arguments and result are those of the function; a wrong argument is an error to the checker."""

    @midstep.resilient(state)
    def train(steps: int, *, name: str = "run") -> str:
        for step in state.steps(steps):
            assert_type(step.index, int)
            with step.update():
                pass
        return f"{name}: {state.step}"

    assert_type(train(2, name="mine"), str)
    assert train(3) == "run: 3"
    assert train.__name__ == "train"
    with pytest.raises(TypeError):
        train("three")  # type: ignore[arg-type]


def test_the_face_names_what_it_has() -> None:
    """Everything in `__all__` is there, and nothing else is offered."""
    assert all(hasattr(midstep, name) for name in midstep.__all__)
    assert dir(midstep) == sorted(midstep.__all__)
    assert_type(midstep.__version__, str)
    assert issubclass(midstep.MidstepError, Exception)


def test_a_wrong_name_is_an_attribute_error() -> None:
    """As with any module."""
    with pytest.raises(AttributeError, match="no attribute 'resilent'"):
        getattr(midstep, "resilent")  # noqa: B009 - the checker takes any name of a lazy module for granted
