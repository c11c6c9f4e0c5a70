"""torchtitan's adapter where there is no torchtitan: what is refused, and what a fault has cut off."""

from concurrent.futures import Future
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from midstep.adapters.torchtitan import checkpoints, compatibility
from midstep.adapters.torchtitan.checkpoints import Checkpoints
from midstep.adapters.torchtitan.compatibility import REFUSALS, check_version, refuse_unsupported
from midstep.adapters.torchtitan.trainer import _aside
from midstep.cli.job_options import asked_for
from midstep.cli.numbers import NodesAsked
from midstep.protocol.errors import ConfigurationError, RecoveryError

DOCS = Path(__file__).parents[2] / "docs" / "torchtitan.md"


class CheckpointManager:
    """As torchtitan's, as far as the adapter looks at it."""

    def __init__(self, folder: Path, interval: int = 3) -> None:
        self.folder, self.interval = folder, interval
        self.saved: list[int] = []
        self.save_future: Future[None] | None = None
        self.async_mode = SimpleNamespace(value="async")
        self.ft_manager = None

    def _should_save(self, step: int, last_step: bool = False) -> bool:
        return last_step or step % self.interval == 0

    def _create_checkpoint_id(self, step: int) -> str:
        return str(self.folder / f"step-{step}")

    def save(self, step: int, last_step: bool = False) -> None:
        """Note which step is saved."""
        self.saved.append(step)


def trainer_at(step: int, folder: Path, **options: Any) -> Any:
    """Return what the adapter sees of a trainer that can be recovered."""
    dims = SimpleNamespace(pp_enabled=False, cp_enabled=False, ep_enabled=False)
    config = SimpleNamespace(
        training=SimpleNamespace(steps=100, disable_cuda_graphs=True),
        checkpoint=SimpleNamespace(enable=True),
        model=SimpleNamespace(converters=[]),
    )
    parts = {
        "step": step,
        "config": config,
        "parallel_dims": dims,
        "device": torch.device("cpu"),
        "model_parts": [],
        "optimizers": SimpleNamespace(),
        "checkpointer": CheckpointManager(folder),
        "validator": None,
    }
    return SimpleNamespace(**{**parts, **options})


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as sharded."""
    monkeypatch.setattr(compatibility, "fsdp_states", lambda parts: [object()])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of this process only."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)


def _version(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(_: str) -> str:
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(compatibility, "version", version)


def test_where_torchtitan_is_missing_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of midstep's, with what to do."""
    _version(monkeypatch, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'midstep\[torchtitan\]'"):
        check_version()


@pytest.mark.parametrize("found", ["0.1.0", "0.2.1", "0.4.0"])
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """What the adapter hooks may be something else there."""
    _version(monkeypatch, found)
    with pytest.raises(ConfigurationError, match=rf"torchtitan {found} is installed, and midstep knows 0\.2\.2 and"):
        check_version()


@pytest.mark.parametrize("found", compatibility.VERSIONS)
def test_versions_that_were_run_are_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """Both."""
    _version(monkeypatch, found)
    check_version()


USED: dict[str, Any] = {
    "pipeline parallelism": {"parallel_dims": SimpleNamespace(pp_enabled=True, cp_enabled=False, ep_enabled=False)},
    "context parallelism": {"parallel_dims": SimpleNamespace(pp_enabled=False, cp_enabled=True, ep_enabled=False)},
    "expert parallelism": {"parallel_dims": SimpleNamespace(pp_enabled=False, cp_enabled=False, ep_enabled=True)},
    "updates in the backward pass": {"optimizers": type("OptimizersInBackwardContainer", (), {})()},
    "TorchFT": {"optimizers": type("FTOptimizersContainer", (), {})()},
    "checkpointers other than": {"checkpointer": SimpleNamespace()},
}


@pytest.mark.usefixtures("sharded")
@pytest.mark.parametrize("feature", USED)
def test_what_cannot_be_recovered_is_refused_by_name(tmp_path: Path, feature: str) -> None:
    """Before the first step."""
    with pytest.raises(ConfigurationError, match=feature):
        refuse_unsupported(trainer_at(0, tmp_path, **USED[feature]))


@pytest.mark.usefixtures("sharded")
def test_graphs_are_refused_on_a_device_alone(tmp_path: Path) -> None:
    """torchtitan 0.3.0 records them unless it is told not to; on a CPU there are none."""
    trainer = trainer_at(0, tmp_path)
    trainer.config.training.disable_cuda_graphs = False
    refuse_unsupported(trainer)
    trainer.device = torch.device("cuda")
    with pytest.raises(ConfigurationError, match=r"--training\.disable_cuda_graphs"):
        refuse_unsupported(trainer)


def test_a_model_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    """torchtitan 0.2.2 has reducers for it that a recovery does not make anew."""
    with pytest.raises(ConfigurationError, match="a model that is not sharded"):
        refuse_unsupported(trainer_at(0, tmp_path))


@pytest.mark.usefixtures("sharded")
def test_converters_and_pinned_memory_are_refused(tmp_path: Path) -> None:
    """Both in one error."""
    trainer = trainer_at(0, tmp_path)
    trainer.config.model.converters = ["float8"]
    trainer.checkpointer.async_mode = SimpleNamespace(value="async_with_pinned_mem")
    with pytest.raises(ConfigurationError, match=r"float8.*async_with_pinned_mem"):
        refuse_unsupported(trainer)


def test_the_docs_name_everything_that_is_refused() -> None:
    """Under the same names."""
    text = " ".join(DOCS.read_text().split())
    assert [each.feature for each in REFUSALS if each.feature not in text] == []


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    """Its folder is there, and what makes it one that is loaded is not."""
    trainer = trainer_at(6, tmp_path)
    (tmp_path / "step-6").mkdir()
    Checkpoints(trainer).make_up()
    assert trainer.checkpointer.saved == [6]


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    """To write over it could lose it."""
    trainer = trainer_at(6, tmp_path)
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / ".metadata").touch()
    Checkpoints(trainer).make_up()
    assert trainer.checkpointer.saved == []


@pytest.mark.usefixtures("alone")
def test_nothing_is_made_up_for_after_a_step_without_a_checkpoint(tmp_path: Path) -> None:
    """And no rank is asked."""
    trainer = trainer_at(7, tmp_path)
    Checkpoints(trainer).make_up()
    assert trainer.checkpointer.saved == []


@pytest.mark.usefixtures("alone")
def test_a_validation_that_nobody_has_finished_is_done_again(tmp_path: Path) -> None:
    """Once some rank has, it is over."""
    done: list[int] = []
    validator = SimpleNamespace(should_validate=lambda step: step == 7, validate=lambda parts, step: done.append(step))
    trainer = trainer_at(7, tmp_path, validator=validator)
    mine = Checkpoints(trainer)
    mine.make_up()
    assert done == [7]
    mine.validated(7)
    mine.make_up()
    assert done == [7]


def test_an_asynchronous_checkpoint_that_failed_is_forgotten(tmp_path: Path) -> None:
    """torchtitan would raise its exception again when it saves the next one."""
    trainer = trainer_at(7, tmp_path)
    trainer.checkpointer.save_future = Future()
    trainer.checkpointer.save_future.set_exception(RuntimeError("the links were cut"))
    Checkpoints(trainer).end_interrupted()
    assert trainer.checkpointer.save_future is None


def test_a_thread_that_still_writes_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next collective would find no peers in the new generation."""
    monkeypatch.setattr(checkpoints, "SAVING_S", 0.01)
    trainer = trainer_at(7, tmp_path)
    trainer.checkpointer.save_future = Future()
    with pytest.raises(RecoveryError, match="still writes"):
        Checkpoints(trainer).end_interrupted()


def test_what_may_be_done_a_second_time_draws_no_random_numbers() -> None:
    """A checkpoint and a validation: steps after them would draw others."""
    state = SimpleNamespace(paused=nullcontext)
    before = torch.get_rng_state()
    assert _aside(state, torch.rand)(3).shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)


def _asked(**flags: bool) -> Any:
    given: dict[str, Any] = {"mindio": False, "is_module": False, "no_python": False, **flags}
    return asked_for(
        nodes=NodesAsked(1), ranks_per_node=2, spare_nodes=0, max_restarts=0, policy_file=None, device=None,
        node_check=False, stop_grace_s=None, environment=(), environment_files=(), script="--module",
        arguments=("llama3",), **given,
    )  # fmt: skip


def test_titan_runs_torchtitans_program_with_the_arguments_that_follow() -> None:
    """They are torchtitan's alone."""
    start = _asked(titan=True)
    assert start.command == ("midstep.adapters.torchtitan", "--module", "llama3")
    assert start.is_module


def test_titan_says_so_when_its_arguments_were_taken_for_midsteps() -> None:
    """Who forgets the two dashes gives midstep a --module."""
    with pytest.raises(ConfigurationError, match="Arguments of torchtitan come after --"):
        _asked(titan=True, is_module=True)
