"""The rendezvous store inside processes: serving it, and a prefix of its own for every generation that reads it.

torch's `env://` rendezvous uses the agents' store as it is. After a restart of the world it would read the addresses
of processes that have ended, and fail to connect. A script that does not use midstep gets its own part of the store by
the prefix.
"""

import contextlib
import hashlib
import importlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

from ..communicators.libraries import HAS_TORCH
from . import channel
from .linux import name_process

STORE_S = 300.0  # timeout of the store's own client in its process, for which nothing waits
LIBUV_LISTENS = "2.9"  # the first torch whose libuv store takes a socket that is bound already; 2.7 refuses it
_PINGED = "midstep/ping"
_prefix: str | None = None  # of the keys of this process; None: torch's own handler is in its place


def serve_store(assignment: channel.ServeStore, listener: int, end: socket.socket) -> NoReturn:
    """Serve the store on the socket that the agent has bound, until the agent ends this process.

    It is torch's TCPStore where torch is installed. A ping on `end` is answered after the store has answered this
    process's own client.
    """
    name_process("midstep-store")
    store = _torch_store(assignment, listener) if HAS_TORCH else _own_store(assignment, listener)
    end.setblocking(True)
    while channel.receive(end) is not None:
        store.check([_PINGED])
        channel.send(end, channel.Pong())
    os._exit(os.EX_OK)


def _own_store(assignment: channel.ServeStore, listener: int) -> Any:
    from ..communicators.key_value_store import KeyValueClient, KeyValueServer

    KeyValueServer(socket.socket(fileno=listener))
    return KeyValueClient(assignment.host, assignment.port, timeout=timedelta(seconds=STORE_S))


def _torch_store(assignment: channel.ServeStore, listener: int) -> Any:
    import torch
    from packaging.version import Version
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..communicators.dns import disable_dns_in_this_process

    disable_dns_in_this_process()
    return TCPStore(
        assignment.host,
        assignment.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
        master_listen_fd=listener,
        use_libuv=Version(torch.__version__) >= Version(LIBUV_LISTENS),
    )


def separate_generations(generation: int, secret: str) -> None:
    """Prefix all keys that this process's `env://` rendezvous writes with `generation`. Without torch: do nothing.

    The prefix is derived from the generation's `secret`, so that a stranger cannot know it in advance.
    """
    _prefix_keys(f"midstep/g{generation}/env/{secret}")


def separate_worlds(job: str, restarts: int) -> None:
    """Prefix all keys that this process's `env://` rendezvous writes with the number of restarts of the whole world.

    For groups that are the framework's own: a replacement has to find what the survivors wrote in earlier generations.
    """
    _prefix_keys(f"midstep/{job}/restart{restarts}/env")


def _prefix_keys(what: str) -> None:
    global _prefix
    known, _prefix = _prefix, hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
    if known is not None:
        return
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch.distributed.rendezvous")
        distributed = importlib.import_module("torch.distributed")
        original = module._rendezvous_handlers["env"]

        def prefixed(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
            for store, rank, world_size in original(url, **options):
                yield distributed.PrefixStore(_prefix, store), rank, world_size

        module._rendezvous_handlers["env"] = prefixed
