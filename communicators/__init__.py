"""The collective layer: all process groups of a training process, aborted and reconnected as one.

- `base.py`: the contract. `scoped.py`: the base of `gloo/`, `tcp/`, `hccl.py`, `nccl.py` and `fake.py`.
- `device_communicator.py`, `device_group.py`: what those of a device's own library share.
- `external.py`: where the groups are the framework's own.
- `process_group.py`, `loopback.py`: the groups that models and users hold, and their collectives without peers.
- `generation_scope.py`, `background.py`: how collectives end together, and threads that nothing has to wait for.
- `neighbours.py`, `messages.py`, `pair_sockets.py`: ranks' own sockets, for barriers, messages, and single pairs.
- `rendezvous.py`, `handshake.py`, `dns.py`: how the members of a generation meet, and know each other.

- `host_memory.py`, `libraries.py`, `key_value_store.py`, `tcp/`: what takes torch's place where it is not installed.

Implementations are looked up by name and imported on first use, because importing them loads torch.
"""

from typing import TYPE_CHECKING, cast

from ..devices.kinds import EXTERNAL, GLOO, TCP, communicator_kind, made
from .libraries import HAS_TORCH

if TYPE_CHECKING:
    from .base import Communicator

_WITHOUT_TORCH = {GLOO: TCP, EXTERNAL: TCP}


def communicator_named(name: str) -> "Communicator":
    """Return a new communicator by its `name` in the policy, not initialised yet.

    Runs once in every training process, before its process groups are made. Without torch `tcp` takes the place of
    `gloo`, a policy's default, and of `external`: there is no gloo then, and all carry what is in host memory.

    Raises ConfigurationError for an unknown name.
    """
    kind = communicator_kind(name if HAS_TORCH else _WITHOUT_TORCH.get(name, name))
    return cast("Communicator", made(kind.factory))
