"""The collective layer: all process groups of a training process, aborted and reconnected as one.

- `base.py`: the contract. `gloo/`, `tcp/`, `hccl.py` with `hccl_group.py`, and `fake.py` implement it.
- `external.py`: where the groups are the framework's own.
- `process_group.py`, `loopback.py`: the groups that models and users hold, and their collectives without peers.
- `generation_scope.py`, `background.py`: how collectives end together, and threads that nothing has to wait for.
- `neighbours.py`, `messages.py`, `pair_sockets.py`: ranks' own sockets, for barriers, messages, and single pairs.
- `rendezvous.py`, `handshake.py`, `dns.py`: how the members of a generation meet, and know each other.

- `host_memory.py`, `libraries.py`, `key_value_store.py`, `tcp/`: what takes torch's place where it is not installed.

Implementations are looked up by name and imported on first use, because importing them loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..protocol.errors import ConfigurationError
from .libraries import HAS_TORCH

if TYPE_CHECKING:
    from .base import Communicator

_HOMES = {
    "gloo": ("gloo.communicator", "GlooCommunicator"),
    "hccl": ("hccl", "npu_communicator"),
    "fake": ("fake", "fake_communicator"),
    "external": ("external", "ExternalCommunicator"),
    "tcp": ("tcp.communicator", "TcpCommunicator"),
}
_WITHOUT_TORCH = {"gloo": "tcp", "external": "tcp"}


def communicator_named(name: str) -> "Communicator":
    """Return a new communicator by its `name` in the policy, not initialised yet.

    Runs once in every training process, before its process groups are made. Without torch `tcp` takes the place of
    `gloo`, a policy's default, and of `external`: there is no gloo then, and all carry what is in host memory.

    Raises ConfigurationError for an unknown name.
    """
    if name not in _HOMES:
        raise ConfigurationError(
            f"unknown communicator {name!r} in the policy (communicator.name); known: {', '.join(sorted(_HOMES))}"
        )
    module, kind = _HOMES[name if HAS_TORCH else _WITHOUT_TORCH.get(name, name)]
    return cast("Communicator", getattr(import_module(f".{module}", __name__), kind)())
