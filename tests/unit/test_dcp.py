"""Checkpoints as directories of torch.distributed.checkpoint (DCP): written, read by plain torch, and the reverse."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import midstep
from midstep.processor import tree
from midstep.processor.bit_flips import BitFlips
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.dcp import file_name, metadata_of
from midstep.processor.checkpoints.dcp_metadata import read_index
from midstep.processor.checkpoints.entries import survey
from midstep.processor.checkpoints.files import Item
from midstep.processor.checkpoints.writer import CheckpointWriter
from midstep.processor.shard import Shard
from midstep.processor.shard_layout import Extent, ShardLayout
from midstep.protocol.errors import CheckpointError, ConfigurationError, RecoveryError
from midstep.protocol.types import ArmedFault, CheckpointFormat, FaultAction, JobSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, without a world
STEP = 3


class Trained:
    """A model with a tied weight and buffers, trained for some steps."""

    def __init__(self, seed: int, steps: int = STEP, rates: tuple[float, ...] = (0.1,)) -> None:
        torch.manual_seed(seed)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        self.model[2].weight = self.model[0].weight
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[index :: len(rates)], "lr": rate} for index, rate in enumerate(rates)]
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 2])
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        self.state = midstep.TrainState(self.model, self.optimizer, self.scheduler)

    def for_torch(self) -> dict[str, Any]:
        """Return the state as scripts of plain torch have it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def bits(self) -> bytes:
        """Return everything that a checkpoint brings back, but for the rank's own."""
        opened = self.state.open_shard("replicated")
        return b"".join([opened.header, *(bytes(tree.tensor_bytes(each).numpy()) for each in opened.tensors)])


def save(directory: Path, trained: Trained, step: int = STEP) -> Path:
    """Write a complete checkpoint as midstep does."""
    archive.save_portable(directory, step, file_name(0, 0), "replicated", trained.state)
    archive.save_local(directory, step, 0, trained.state.capture_local())
    return archive.publish(directory, step, world_size=1)


def save_by_torch(directory: Path, state: Mapping[str, Any], step: int = STEP) -> Path:
    """Write one as plain torch does."""
    place = directory / f"step-{step:08d}"
    torch_save(dict(state), checkpoint_id=str(place))
    return place


def read(directory: Path, trained: Trained) -> Trained:
    """Read it into a state that is another one."""
    archive.load_shard(directory, STEP, "replicated", trained.state)
    return trained


def test_what_is_written_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    """Parameters, moments, groups, and what the scheduler keeps, in types that torch would not give back."""
    wrote = Trained(1, rates=(0.1, 0.2))
    save(tmp_path, wrote)
    assert survey(str(tmp_path), 0.0)[0] == (STEP,)
    assert archive.world_size_of(tmp_path, STEP) == 1
    assert read(tmp_path, Trained(2, 0, rates=(0.3, 0.4))).bits() == wrote.bits()


def test_plain_torch_reads_what_is_written(tmp_path: Path) -> None:
    """By the names of `get_state_dict`: all of it is there, tied parameters and buffers too."""
    wrote, other = Trained(1), Trained(2, 1)
    place = save(tmp_path, wrote)
    state = other.for_torch()
    load(state, checkpoint_id=str(place))
    expected = wrote.for_torch()
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor), name
    for name, entries in expected["optimizer"]["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(state["optimizer"]["state"][name][key], tensor), (name, key)
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert state["scheduler"]["last_epoch"] == STEP


def test_torchs_own_converter_makes_one_file_of_it(tmp_path: Path) -> None:
    """`dcp_to_torch_save` gives back the nested dictionary."""
    wrote = Trained(1)
    place = save(tmp_path, wrote)
    dcp_to_torch_save(str(place), str(tmp_path / "one.pt"))
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(found["model"]["0.weight"], wrote.model[0].weight)
    assert found["optimizer"]["param_groups"][0]["lr"] == wrote.optimizer.param_groups[0]["lr"]


def flat(trained: Trained) -> dict[str, Any]:
    """Return the state as torchtitan has it: no names above, groups by parameter."""
    state = trained.for_torch()
    optimizer: dict[str, Any] = {}
    for name, entries in state["optimizer"]["state"].items():
        optimizer |= {f"state.{name}.{key}": tensor for key, tensor in entries.items()}
    for group in state["optimizer"]["param_groups"]:
        values = {key: value for key, value in group.items() if key != "params"}
        optimizer |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in values.items()}
    return {**state["model"], **optimizer, "lr_scheduler": state["scheduler"]}


def numbered(trained: Trained) -> dict[str, Any]:
    """Return the state as `state_dict` of the objects themselves gives it."""
    state = {"model": trained.model.state_dict(), "optim": trained.optimizer.state_dict()}
    return {"app": state, "scheduler": trained.scheduler.state_dict()}


@pytest.mark.parametrize("names", [Trained.for_torch, flat, numbered])
def test_what_plain_torch_has_written_is_read(tmp_path: Path, names: Callable[[Trained], dict[str, Any]]) -> None:
    """Whatever names a script gives to its model and its optimizer, and buffers too."""
    wrote = Trained(1)
    save_by_torch(tmp_path, names(wrote))
    assert survey(str(tmp_path), 0.0, foreign=True)[0] == (STEP,)
    assert survey(str(tmp_path), 0.0)[0] == ()
    assert archive.world_size_of(tmp_path, STEP) is None
    got = read(tmp_path, Trained(2, 0, rates=(0.3,)))
    for name, tensor in wrote.model.state_dict().items():
        assert torch.equal(got.model.state_dict()[name], tensor), name
    for mine, theirs in zip(got.model.parameters(), wrote.model.parameters(), strict=True):
        for key, tensor in wrote.optimizer.state[theirs].items():
            assert torch.equal(got.optimizer.state[mine][key], tensor), key
    assert got.optimizer.param_groups[0]["lr"] == wrote.optimizer.param_groups[0]["lr"]
    assert got.scheduler.state_dict()["last_epoch"] == STEP


def test_a_model_that_is_stored_twice_is_not_guessed(tmp_path: Path) -> None:
    """An average of the weights beside the model has the same names."""
    wrote = Trained(1)
    save_by_torch(tmp_path, {"one": wrote.model.state_dict(), "average": wrote.model.state_dict()})
    with pytest.raises(RecoveryError, match=r"more than once, below 'average\.', 'one\.'"):
        read(tmp_path, Trained(2))


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """With the name, and both shapes."""
    save(tmp_path, Trained(1))
    other = midstep.TrainState(torch.nn.Sequential(torch.nn.Linear(4, 5)))
    with pytest.raises(RecoveryError, match=r"'model\.0\.weight' as float32 \[4, 4\], but here it is .* \[5, 4\]"):
        archive.load_shard(tmp_path, STEP, "replicated", other)


def test_another_set_of_optimizers_is_refused_by_name(tmp_path: Path) -> None:
    """Whichever is missing."""
    wrote = Trained(1)
    save(tmp_path, wrote)
    with pytest.raises(RecoveryError, match=r"has optimizers \['optimizer'\], this script has \[\]"):
        archive.load_shard(tmp_path, STEP, "replicated", midstep.TrainState(wrote.model))


def test_checkpoints_of_torch_are_never_removed(tmp_path: Path) -> None:
    """Pruning leaves them; one of a later step, behind which the job has gone back, gets another name."""
    wrote = Trained(1)
    for step in (1, 9):
        save_by_torch(tmp_path, wrote.for_torch(), step)
    for step in (2, 3, 4):
        save(tmp_path, wrote, step)
    assert archive.prune(tmp_path, keep=1, written=4) == (2, 3)
    archive.forget_after(tmp_path, 3, "g2")
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-00000001", "step-00000009.aside-g2"]


def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_offered(tmp_path: Path) -> None:
    """As with the other format: a bit that has flipped is found by the checksum."""
    wrote = Trained(1)
    save(tmp_path, wrote, STEP - 1)
    place = save(tmp_path, wrote)
    raw = bytearray((place / "__0_0.distcp").read_bytes())
    raw[len(raw) // 2] ^= 1
    (place / "__0_0.distcp").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        read(tmp_path, Trained(2))
    assert survey(str(tmp_path), 0.0, foreign=True)[0] == (STEP - 1,)


def piece(tensor: torch.Tensor, whole: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Shard, ShardLayout]:
    """Return a shard of one parameter of which a rank holds a piece."""
    content = {
        "parameters": {"model": {"weight": tensor}},
        "baseline": {},
        "optimizers": {},
        "small": {"schedulers": {}, "scalers": {}, "values": {}},
    }
    header, tensors = tree.flatten(content, "piece")
    return Shard(header, tensors), ShardLayout({"model": {"weight": Extent(whole, offsets, True)}}, {})


class Holder:
    """A rank that holds a piece of one matrix."""

    def __init__(self, tensor: torch.Tensor, whole: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        self.tensor = tensor
        self._shard, self._layout = piece(tensor, whole, offsets)

    def __getattr__(self, name: str) -> Any:
        """Answer what the protocol has and this test does not need."""
        return lambda *_: None

    def open_shard(self, _: str) -> Shard:
        """Return the piece."""
        return self._shard

    def accept_shard(self, _: str, header: bytes) -> Shard:
        """Return the piece to read into."""
        return Shard(header, self._shard.tensors)

    def layout(self, _: str) -> ShardLayout:
        """Return where it lies."""
        return self._layout

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return none."""
        return {}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ([slice(0, 2), slice(2, 4), slice(4, 5)], [slice(0, 3), slice(3, 5)]),
        ([slice(0, 5)], [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]),
        ([slice(0, 3), slice(3, 5), slice(5, 5)], [slice(0, 5)]),
    ],
)
def test_pieces_are_read_in_a_world_of_another_size(tmp_path: Path, written: list[slice], wanted: list[slice]) -> None:
    """From all parts that overlap them; a rank that holds nothing of a tensor writes and reads nothing."""
    whole = torch.arange(15.0).reshape(5, 3)
    for rank, rows in enumerate(written):
        holder = Holder(whole[rows], (5, 3), (rows.start, 0))
        archive.save_portable(tmp_path, STEP, file_name(rank, 0), "piece", holder)
        archive.save_local(tmp_path, STEP, rank, b"own")
    archive.publish(tmp_path, STEP, world_size=len(written))
    for rows in wanted:
        reader = Holder(torch.zeros_like(whole[rows]), (5, 3), (rows.start, 0))
        archive.load_shard(tmp_path, STEP, "piece", reader)
        assert torch.equal(reader.tensor, whole[rows])


def test_a_checkpoint_that_lacks_a_piece_is_not_made_complete(tmp_path: Path) -> None:
    """The name of the tensor is said, and how much of it is there."""
    archive.save_portable(tmp_path, STEP, file_name(0, 0), "piece", Holder(torch.zeros(2, 3), (5, 3), (0, 0)))
    archive.save_local(tmp_path, STEP, 0, b"own")
    with pytest.raises(CheckpointError, match=r"of 'model\.weight' there are 6 of 15 elements"):
        archive.publish(tmp_path, STEP, world_size=1)
    assert survey(str(tmp_path), 0.0, foreign=True)[0] == ()


def test_two_things_of_one_name_are_refused() -> None:
    """Rather than that one of them is lost."""
    items = [Item(("model", "a.b"), 0, 1), Item(("model.a", "b"), 1, 1)]
    with pytest.raises(CheckpointError, match=r"called 'model\.a\.b'"):
        metadata_of({"__0_0.distcp": items})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_every_dtype_is_understood_in_the_metadata_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    """And so are values and empty tensors."""
    place = save_by_torch(tmp_path, {"tensor": torch.zeros(3, dtype=dtype), "none": torch.zeros(0, 4), "value": [1]})
    index = read_index(place)
    assert index.tensors["tensor"][:2] == (str(dtype).removeprefix("torch."), (3,))
    assert index.tensors["none"].shape == (0, 4)
    assert list(index.values) == ["value"]


def writer(framework: Any, directory: Path) -> CheckpointWriter:
    """Return what writes a rank's part, with the policy's format."""
    settings = JobSettings(
        checkpoint_directory=str(directory), checkpoint_every_steps=1, checkpoint_format=CheckpointFormat.DCP
    )
    states = SimpleNamespace(read=lambda rank, step: b"own")
    runtime: Any = SimpleNamespace(
        rank=0, job="gpt", node="n", generation=1, world_size=1, settings=settings, local_states=states
    )
    return CheckpointWriter(runtime, framework)


def test_a_rank_writes_them_where_the_policy_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a step's end, complete after the next barrier."""
    trained = Trained(1)
    monkeypatch.setattr(midstep.TrainState, "_rank", 0)
    saving = writer(trained.state, tmp_path)
    saving.take_over(1)
    saving.save(STEP)
    assert archive.complete_steps(tmp_path) == ()
    saving.publish_pending()
    assert archive.complete_steps(tmp_path) == (STEP,)
    assert read(tmp_path, Trained(2, 0)).bits() == trained.bits()


class Adapted(torch.optim.SGD):
    """An optimizer with a state of its own making."""

    def state_dict(self) -> dict[str, Any]:
        """Return something else."""
        return {}


def test_what_has_no_names_is_refused_at_start(tmp_path: Path) -> None:
    """A framework without them, an optimizer with a state_dict of its own, and one with unknown parameters."""
    model, loose = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(1))
    refused = {
        "has no names": SimpleNamespace(),
        "optimizer has a state_dict of its own": midstep.TrainState(model, Adapted(model.parameters())),
        "one of no registered module": midstep.TrainState(model, torch.optim.SGD([loose])),
    }
    for text, framework in refused.items():
        with pytest.raises(ConfigurationError, match=text):
            writer(framework, tmp_path)


def test_a_bit_of_a_checkpoint_is_flipped_on_purpose_and_found(tmp_path: Path) -> None:
    """As `midstep inject --flip checkpoint` does in a running job."""
    trained = Trained(1)
    save(tmp_path, trained)
    BitFlips(trained.state, 0, 1, str(tmp_path)).flip(ArmedFault(0, FaultAction.FLIP_CHECKPOINT))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        archive.load_shard(tmp_path, STEP, "replicated", trained.state)
