"""`midstep.init_process_group` compares torch's arguments with the job that runs the script."""

import inspect
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

import midstep
from midstep.processor.group_arguments import GroupArguments, GroupOfJob, check_arguments
from midstep.processor.runtime import Runtime
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.types import JobSettings

MASTER = "10.0.0.1:29500"


def job(communicator: str = "gloo", device: str = "cpu") -> GroupOfJob:
    """Return what a job of four ranks has decided for rank 3, the second one of its node."""
    return GroupOfJob(3, 4, local_rank=1, communicator=communicator, device=device, master=MASTER, stall_grace_s=1.0)


CPU, NPU, FAKE, CUDA = job(), job("hccl", "npu"), job("fake", "fake"), job("nccl", "cuda")


def told(value: object) -> str:
    """Name a case the same in every process: the job by its device, an object by its type."""
    if isinstance(value, GroupOfJob):
        return value.device
    if isinstance(value, dict):
        return ", ".join(
            f"{name}={each if isinstance(each, str | int) else type(each).__name__}" for name, each in value.items()
        )
    return ""


def test_the_arguments_are_those_of_torch() -> None:
    """Same names, order and defaults, so that a call can be changed by its first word alone."""
    theirs = inspect.signature(dist.init_process_group).parameters
    ours = inspect.signature(midstep.init_process_group).parameters
    public = [(name, found.default) for name, found in theirs.items() if not name.startswith("_")]
    assert [(name, found.default) for name, found in ours.items()] == public


@pytest.mark.parametrize(
    ("where", "given"),
    [
        (CPU, {}),
        (CPU, {"backend": "gloo"}),
        (CPU, {"backend": dist.Backend.GLOO}),
        (CPU, {"backend": "GLOO", "init_method": "env://"}),
        (CPU, {"backend": "cpu:gloo"}),
        (CPU, {"init_method": f"tcp://{MASTER}"}),
        (CPU, {"init_method": "env://?rank=3&world_size=4"}),
        (CPU, {"rank": 3, "world_size": 4}),
        (CPU, {"timeout": timedelta(minutes=10)}),
        (CPU, {"device_id": torch.device("cpu")}),
        (NPU, {"backend": "hccl"}),
        (NPU, {"backend": "nccl"}),
        (NPU, {"backend": "npu:hccl"}),
        (NPU, {"device_id": 1}),
        (NPU, {"device_id": "npu:1"}),
        (FAKE, {"backend": "gloo"}),
        (CUDA, {"backend": "nccl"}),
        (CUDA, {"backend": "cuda:nccl", "device_id": torch.device("cuda", 1)}),
        (CUDA, {"device_id": 1}),
        (FAKE, {"backend": "cpu:gloo,npu:hccl", "device_id": torch.device("cpu")}),
    ],
    ids=told,
)
def test_what_says_the_same_as_the_job_is_accepted(where: GroupOfJob, given: dict[str, Any]) -> None:
    check_arguments(GroupArguments(**given), where)


@pytest.mark.parametrize(
    ("where", "given", "said"),
    [
        (CPU, {"backend": "nccl"}, r"backend: found 'nccl', expected 'gloo', .* communicator is gloo .*--device"),
        (NPU, {"backend": "gloo"}, r"backend: found 'gloo', expected 'hccl' or 'nccl'"),
        (NPU, {"backend": "cpu:gloo,npu:hccl"}, r"backend: found 'cpu:gloo,npu:hccl', expected 'hccl' or 'nccl'"),
        (CPU, {"backend": "npu:gloo"}, r"backend: found 'npu:gloo', expected none for npu tensors"),
        (CPU, {"init_method": "tcp://10.0.0.2:1"}, r"init_method: found 'tcp://10.0.0.2:1', expected 'env://'"),
        (CPU, {"init_method": "file:///tmp/store"}, r"init_method: found 'file:///tmp/store', expected 'env://'"),
        (CPU, {"init_method": "tcp://host:port"}, r"init_method: found 'tcp://host:port', which is not a URL"),
        (CPU, {"init_method": "env://?rank=2"}, r"rank in init_method: found 2, expected 3\. .*RANK"),
        (CPU, {"timeout": 60}, r"timeout: found 60, expected a datetime\.timedelta"),
        (CPU, {"timeout": timedelta(seconds=1)}, r"timeout: found 1 s, expected more than 1 s \(stall\.grace_s"),
        (CPU, {"world_size": 8}, r"world_size: found 8, expected 4\. Leave it out.*WORLD_SIZE"),
        (CPU, {"rank": 0}, r"rank: found 0, expected 3\. Leave it out.*variable RANK"),
        (CPU, {"store": HashStore()}, r"store: found a HashStore, expected none.* Leave store out"),
        (CPU, {"pg_options": object()}, r"pg_options: found a object, expected none.* Leave pg_options out"),
        (CPU, {"device_id": torch.device("cuda:1")}, r"device_id: found 'cuda:1', expected 'cpu'"),
        (CPU, {"device_id": 1}, r"device_id: found '1', expected 'cpu'"),
        (CUDA, {"backend": "cpu:gloo,cuda:nccl"}, r"backend: found 'cpu:gloo,cuda:nccl', expected 'nccl'"),
        (CUDA, {"device_id": 0}, r"device_id: found '0', expected 'cuda:1'"),
        (NPU, {"device_id": 0}, r"device_id: found '0', expected 'npu:1', .* local rank, 1"),
    ],
    ids=told,
)
def test_what_contradicts_the_job_is_refused_with_what_was_found_and_expected(
    where: GroupOfJob, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_arguments(GroupArguments(**given), where)


def test_every_contradiction_is_named_at_once() -> None:
    """Whoever mends a script does not want to start it four times."""
    with pytest.raises(ConfigurationError) as error:
        check_arguments(GroupArguments(backend="mpi", rank=1, world_size=2), CPU)
    first, *lines = str(error.value).splitlines()
    assert first == "rank 3: init_process_group() contradicts the job that runs it:"
    assert [line.split(":")[0].strip() for line in lines] == ["- backend", "- world_size", "- rank"]


class Played:
    """A runtime's parts, as far as a process group needs them, which note what they are told."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.connected, self.store = 3, 4, False, None
        self.settings = JobSettings()
        self.session = SimpleNamespace(generation=7)
        self.told: dict[str, Any] = {}
        self.device = SimpleNamespace(prepare=lambda *_: None)
        self.communicator = SimpleNamespace(init=self.told.update)
        self._environment = {"LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}

    def init_process_group(self, given: GroupArguments) -> None:
        """Do as the runtime does."""
        Runtime.init_process_group(cast(Runtime, self), given)


def test_a_timeout_of_the_script_takes_the_place_of_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    monkeypatch.setattr(Runtime, "current", lambda: played)

    midstep.init_process_group("gloo", timeout=timedelta(minutes=2))
    own = played.told["collective_s"]
    midstep.init_process_group()

    assert (own, played.told["collective_s"]) == (120.0, JobSettings().collective_s)


def test_the_job_is_asked_about_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """None gets lost between the call and the check."""
    monkeypatch.setattr(Runtime, "current", Played)
    wrong: dict[str, Any] = {
        "backend": "mpi",
        "init_method": "file:///store",
        "timeout": timedelta(0),
        "world_size": 2,
        "rank": 1,
        "store": HashStore(),
        "pg_options": object(),
        "device_id": 5,
    }

    with pytest.raises(ConfigurationError) as error:
        midstep.init_process_group(group_name="not used", **wrong)

    assert [line.split(":")[0].strip("- ") for line in str(error.value).splitlines()[1:]] == list(wrong)


def test_outside_of_a_job_the_arguments_are_handed_on_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo is the default, and a script without any environment is a world of one."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: passed.update(options))
    monkeypatch.delenv("RANK", raising=False)

    midstep.init_process_group(timeout=timedelta(seconds=5))
    alone = dict(passed)
    passed.clear()
    midstep.init_process_group("mpi", "tcp://elsewhere:1", None, 4, 2)

    assert isinstance(alone.pop("store"), HashStore)
    assert alone == {"backend": "gloo", "timeout": timedelta(seconds=5), "rank": 0, "world_size": 1}
    assert passed == {"backend": "mpi", "init_method": "tcp://elsewhere:1", "rank": 2, "world_size": 4}
