"""The kinds of devices that a job can compute on, with the communicators that link them: what a policy may name.

Everything above asks here instead of knowing a device by its name. A kind is midstep's own or another package's, which
names it in its entry points, in the group `midstep.devices`. This module imports no device library, so the controller
and the command line can use it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from ..protocol.errors import ConfigurationError

GROUP = "midstep.devices"
NPU_WATCHDOG = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
# Else torch-npu ends the process at the first error; and HCCL's own default, which scripts set far higher.
NPU_DEFAULTS = MappingProxyType({**dict.fromkeys(NPU_WATCHDOG, "0"), "HCCL_CONNECT_TIMEOUT": "120"})
CPU, CUDA, NPU, FAKE = "cpu", "cuda", "npu", "fake"
GLOO, TCP, EXTERNAL = "gloo", "tcp", "external"


@dataclass(frozen=True)
class CommunicatorKind:
    """A collective layer.

    Attributes:
        name: Its name in the policy (`communicator.name`).
        factory: What makes it, as `module:callable`. It is called without arguments, in a training process.
        device_links: Whether its links carry memory of the device, so that a repair needs no copy on the hosts.
        script_names: What a script may pass to `init_process_group` as its backend.
        tensors: The devices whose tensors its collectives take, as torch names them.
        grows: Whether its groups can get more ranks while the processes of those that they have stay. It has the
            methods of `communicators.base.GrowingGroups` then.
    """

    name: str
    factory: str
    device_links: bool = False
    script_names: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset({CPU})
    grows: bool = False


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: Its name in the policy (`device`).
        factory: What makes the Device of a training process, as `module:callable`, called without arguments.
        communicators: The collective layers that link such devices. The first one is used where none is asked for.
        torch_names: What torch calls its devices. `device_id` of `init_process_group` may be any of them.
        environment: Variables that a rank needs, where the user has not set them.
        local: Whether ranks take the devices of their machine by their local rank, so that two nodes on one machine
            would take the same ones.
        shared_with: A variable which, set to 1, lets ranks share a device, so that this does no harm.
        memory_of_its_own: Whether a process that is built ahead takes memory of the device as well.
        ray_resource: The resource of Ray that each rank asks for.
        configuration: The policy file of `configs/` that a job gets which names none; None: the default policy.
    """

    name: str
    factory: str
    communicators: tuple[CommunicatorKind, ...]
    torch_names: tuple[str, ...] = (CPU,)
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    local: bool = False
    shared_with: str | None = None
    memory_of_its_own: bool = True
    ray_resource: str | None = None
    configuration: str | None = None


_HOST = "midstep.communicators"
_ASCEND_NAMES = frozenset({"hccl", "nccl"})  # torch-npu's own porting tool reads `nccl` as `hccl`
_WITHOUT_GROUPS = CommunicatorKind(EXTERNAL, f"{_HOST}.external:ExternalCommunicator")
_GLOO = CommunicatorKind(
    GLOO,
    f"{_HOST}.gloo.communicator:GlooCommunicator",
    script_names=frozenset({GLOO}),
    tensors=frozenset({CPU, CUDA}),  # those of GPUs by way of the hosts
    grows=True,
)
OWN = (
    DeviceKind(
        CPU,
        "midstep.devices.cpu:CpuDevice",
        (
            _GLOO,
            CommunicatorKind(TCP, f"{_HOST}.tcp.communicator:TcpCommunicator", script_names=frozenset({TCP})),
        ),
        memory_of_its_own=False,
    ),
    DeviceKind(
        CUDA,
        "midstep.devices.cuda:cuda_device",
        (
            CommunicatorKind(
                "nccl",
                f"{_HOST}.nccl:nccl_communicator",
                device_links=True,
                script_names=frozenset({"nccl"}),
                tensors=frozenset({CUDA}),
            ),
            _GLOO,
        ),
        torch_names=(CUDA,),
        environment=MappingProxyType(
            {
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else matrix products differ in bits from run to run
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog ends the process over a lost peer
                "TORCH_NCCL_ENABLE_MONITORING": "0",  # else it ends a process whose watchdog waits in an abort
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
                "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",  # a link-up that lost a peer ends by itself
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() opens no context, so a process can still fork
            }
        ),
        local=True,
        shared_with="NCCL_MULTI_RANK_GPU_ENABLE",
        ray_resource="GPU",
        configuration="cuda.yaml",
    ),
    DeviceKind(
        NPU,
        "midstep.devices.npu:npu_device",
        (
            CommunicatorKind(
                "hccl",
                f"{_HOST}.hccl:npu_communicator",
                device_links=True,
                script_names=_ASCEND_NAMES,
                tensors=frozenset({NPU, CUDA}),
            ),
        ),
        torch_names=(NPU,),
        environment=NPU_DEFAULTS,
        local=True,
        ray_resource="NPU",
        configuration="npu.yaml",
    ),
    DeviceKind(
        FAKE,
        "midstep.devices.npu:fake_device",
        (
            CommunicatorKind(
                "fake",
                f"{_HOST}.fake:fake_communicator",
                device_links=True,
                script_names=_ASCEND_NAMES | {GLOO},
                tensors=frozenset({CPU, NPU, CUDA}),
            ),
        ),
        torch_names=(NPU, CPU),
        environment=NPU_DEFAULTS,
    ),
)


def device_names() -> tuple[str, ...]:
    """Return the names of all kinds of devices that there are, sorted."""
    return tuple(sorted(_kinds()))


def communicator_names() -> tuple[str, ...]:
    """Return the names of all collective layers that there are, sorted."""
    return tuple(sorted({each.name for each in _communicators()}))


def device_kind(name: str) -> DeviceKind:
    """Return the kind of device that a policy names. Raises ConfigurationError for an unknown one."""
    if name not in _kinds():
        raise ConfigurationError(f"unknown device {name!r} in the policy (device); known: {', '.join(device_names())}")
    return _kinds()[name]


def communicator_kind(name: str) -> CommunicatorKind:
    """Return the collective layer that a policy names. Raises ConfigurationError for an unknown one."""
    known = {each.name: each for each in _communicators()}
    if name not in known:
        raise ConfigurationError(
            f"unknown communicator {name!r} in the policy (communicator.name); known: {', '.join(communicator_names())}"
        )
    return known[name]


def has_device_links(name: str) -> bool:
    """Return whether a collective layer's links carry memory of the device; False of one that is not known here."""
    return any(each.name == name and each.device_links for each in _communicators())


def made(factory: str) -> object:
    """Return what a `module:callable` makes. Raises whatever the module and the callable raise."""
    module, _, name = factory.partition(":")
    return getattr(import_module(module), name)()


def _communicators() -> Iterator[CommunicatorKind]:
    yield _WITHOUT_GROUPS
    for kind in _kinds().values():
        yield from kind.communicators


@cache
def _kinds() -> dict[str, DeviceKind]:
    kinds = {kind.name: kind for kind in OWN}
    for found in entry_points(group=GROUP):
        if found.name not in kinds:
            kinds[found.name] = _loaded(found)
    return kinds


def _loaded(found: EntryPoint) -> DeviceKind:
    try:
        kind = found.load()
    except Exception as error:  # of another package
        raise ConfigurationError(f"the device {found.name} ({found.value}) cannot be imported: {error}.") from error
    if not isinstance(kind, DeviceKind) or kind.name != found.name:
        raise ConfigurationError(
            f"the device {found.name} ({found.value}) is not a midstep.devices.kinds.DeviceKind of that name."
        )
    return kind
