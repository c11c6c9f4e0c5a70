"""The adapter of MindSpeed-LLM's FSDP2 trainer without MindSpeed-LLM: what is refused, and what is made up."""

import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from midstep.adapters import mindspeed_fsdp2
from midstep.adapters.mindspeed_fsdp2 import REFUSALS, MemoryCheckpoints, refuse_unsupported
from midstep.adapters.quiet_loader import QuietLoader
from midstep.protocol.errors import ConfigurationError

DOCS = Path(__file__).parents[2] / "docs" / "mindspeed-llm.md"
BATCHES = 10


class Manager:
    """As the checkpoint manager, as far as the adapter looks at it."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save(self, *, path: str, **_: Any) -> None:
        """Note what is saved."""
        self.saved.append(path)


def trainer_at(step: int, **options: Any) -> Any:
    """Return what the adapter sees of a trainer: two micro-batches in a step, so five steps in an epoch."""
    args = {"gradient_accumulation_steps": 2, "max_steps": 0, "num_train_epochs": 2.0, "output_dir": "out"}
    args |= {"save_steps": 0, "save_epochs": 0, "save_only_model": False, "profile": False}
    counter = SimpleNamespace(state_dict=dict)
    return SimpleNamespace(
        global_step=step,
        _last_logged_step=step,
        _global_step_last_logged=0,
        args=SimpleNamespace(**{**args, **options}),
        parallel_args=SimpleNamespace(ep_size=1, cp_size=1),
        model=SimpleNamespace(config=SimpleNamespace(quantization_plan=SimpleNamespace(recipe_name=""))),
        optimizer=None,
        lr_scheduler=counter,
        train_monitor=counter,
        train_dataloader=range(BATCHES),
        ckpt_manager=Manager(),
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of this process only."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)


def saved_by(trainer: Any) -> list[str]:
    """Return what is written after a recovery."""
    MemoryCheckpoints(trainer, nullcontext).make_up()
    names: list[str] = trainer.ckpt_manager.saved
    return names


@pytest.mark.parametrize("name", ["ep_size", "cp_size"])
def test_ways_to_cut_a_model_that_were_never_tried_are_refused(name: str) -> None:
    trainer = trainer_at(0)
    refuse_unsupported(trainer)
    setattr(trainer.parallel_args, name, 2)
    with pytest.raises(ConfigurationError, match=rf"parallel\.{name}"):
        refuse_unsupported(trainer)


def test_all_that_is_refused_is_in_one_error() -> None:
    trainer = trainer_at(0, profile=True)
    trainer.model.config.quantization_plan.recipe_name = "mxfp8"
    with pytest.raises(ConfigurationError, match=r"quantization.*profiler"):
        refuse_unsupported(trainer)


def test_the_docs_name_everything_that_is_refused() -> None:
    text = " ".join(DOCS.read_text().split())
    assert [feature for feature, *_ in REFUSALS if feature not in text] == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (3, {"save_steps": 3}),
        (5, {"save_epochs": 1}),
        (10, {"save_epochs": 2}),
        (7, {"save_epochs": 2, "max_steps": 7}),
    ],
    ids=["steps", "an epoch", "the last epoch", "an epoch that is cut short"],
)
def test_a_checkpoint_that_was_due_and_that_no_rank_has_finished_is_written(step: int, options: dict[str, Any]) -> None:
    assert saved_by(trainer_at(step, **options)) == [f"out/checkpoints/global_step_{step}"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("step", "options"), [(4, {"save_steps": 3}), (5, {"save_epochs": 2}), (7, {"save_epochs": 1}), (5, {})]
)
def test_after_a_step_without_a_checkpoint_none_is_written(step: int, options: dict[str, Any]) -> None:
    assert saved_by(trainer_at(step, **options)) == []


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_a_rank_has_finished_is_left_alone() -> None:
    trainer = trainer_at(3, save_steps=3)
    checkpoints = MemoryCheckpoints(trainer, nullcontext)
    checkpoints.save(path="by the trainer")
    checkpoints.make_up()
    assert trainer.ckpt_manager.saved == ["by the trainer"]


def test_a_trainer_that_resumes_is_told_where_it_stands() -> None:
    state: dict[str, Any] = {}
    MemoryCheckpoints(trainer_at(7), nullcontext).load("anywhere", state)
    assert state["extra_state"]["global_step"] == 7


def test_data_that_others_read_is_not_converted_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    command = ["python", "convert.py", "--output-prefix", str(tmp_path / "text")]
    mindspeed_fsdp2._convert_once(command, check=True)
    (tmp_path / "text_text_document.idx").touch()
    mindspeed_fsdp2._convert_once(command, check=True)
    assert ran == [command]


def test_an_iterator_draws_random_numbers_before_the_first_step_alone() -> None:
    begun = False
    loader = QuietLoader(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor([1, 2]))), lambda: begun
    )
    before = torch.get_rng_state()
    assert len(list(loader)) == 2
    drawn = torch.get_rng_state()
    assert not torch.equal(before, drawn)
    begun = True
    assert (len(list(loader)), len(loader), loader.batch_size) == (2, 2, 1)
    assert torch.equal(torch.get_rng_state(), drawn)
