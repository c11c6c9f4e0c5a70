"""The fake HCCL as a backend that scripts make groups with: without midstep's communicator above it.

midstep's own groups meet in a store of their generation. A script keeps its store for ever, and what an earlier process
has written stays there. So the members of a link-up know each other by a number that is new each time.
"""

import json
import secrets
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from midstep.communicators.fake import ALL, BACKEND, FakeHcclGroup
from midstep.devices import fake
from midstep.devices.fake_chip import Task

_TICK_S = 0.003


class ScriptGroup(FakeHcclGroup):
    """A group that torch's Python asks for its only backend, which it is itself."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._group_name = str(options.group_id)

    @property
    def _device_types(self) -> list[torch.device]:
        return [fake.DEVICE]

    @property
    def group_name(self) -> Any:
        """Return the name that torch's Python has for it."""
        return self._group_name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _link_up(self, task: Task, peer: int) -> Any:
        own, places = self._store, self._places(peer)
        if peer != ALL:  # the two meet beside the others
            self._store = PrefixStore(f"{places[0]}-{places[1]}", own)
        try:
            self._store = PrefixStore(self._meet(task, places), self._store)
            return super()._link_up(task, peer)
        finally:
            self._store = own

    def _meet(self, task: Task, places: list[int]) -> str:
        """Return a name that these members have agreed on: the first proposes one with the numbers that it has read."""
        mine, meeting = secrets.token_hex(8), ""
        proposed: list[str] = []
        self._store.set(f"number/{self._group_rank}", mine)
        while True:
            if task.over:
                raise RuntimeError("aborted")
            if self._group_rank == places[0]:
                numbers = [self._read(f"number/{place}") for place in places]
                if not meeting or numbers != proposed:
                    meeting, proposed = secrets.token_hex(8), numbers
                    self._store.set("proposal", json.dumps([meeting, numbers]))
                if all(numbers) and all(self._read(f"{meeting}/{place}") for place in places[1:]):
                    self._store.set(f"{meeting}/agreed", "1")
                    return meeting
            else:
                meeting, numbers = json.loads(self._read("proposal") or '["", []]')
                if mine in numbers:
                    self._store.set(f"{meeting}/{self._group_rank}", mine)
                    if self._read(f"{meeting}/agreed"):
                        return str(meeting)
            time.sleep(_TICK_S)

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def register() -> None:
    """Register the backend with torch, as importing torch-npu would."""
    dist.Backend.register_backend(BACKEND, lambda options, _: ScriptGroup(options), extended_api=True, devices=["cpu"])
