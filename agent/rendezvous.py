"""Gives `init_process_group()` a fresh prefix in the rendezvous store for every restart of the world.

torch's `env://` rendezvous uses the agents' store as it is. After a restart it would read there where the
dead ranks listened, and fail to connect. Scripts that know nothing of midstep get their own corner of the
store this way.
"""

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from typing import Any


def separate_generations(generation: int, secret: str) -> None:
    """Put what `env://` rendezvous of this process write under a prefix of `generation`. Without torch: nothing.

    The prefix is made of the generation's `secret`, so that others cannot know it before it is used.
    """
    prefix = hashlib.blake2b(f"midstep/g{generation}/env/{secret}".encode(), digest_size=16).hexdigest()
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch.distributed.rendezvous")
        distributed = importlib.import_module("torch.distributed")
        original = module._rendezvous_handlers["env"]

        def prefixed(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
            for store, rank, world_size in original(url, **options):
                yield distributed.PrefixStore(prefix, store), rank, world_size

        module._rendezvous_handlers["env"] = prefixed
