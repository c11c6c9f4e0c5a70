"""The makers of devices and communicators, for the contracts that all of them keep: a contract is run on each.

A contract says of each maker what the same calls give. Where one cannot give it, `Maker` has a word for that and the
maker's own value has the reason beside it: nothing else tells makers apart. `pytest --device npu` runs the contracts on
torch-npu's own wheel over the fake CANN (tests/cann), where its environment is.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from midstep.devices import device_named
from midstep.protocol.errors import CommunicatorAborted, LinkUpFailed
from midstep.protocol.faults import FaultAction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.contract.gloo.conftest import Rank

LINK_UP_S = 20.0
BEFORE_STOP_S = 0.4  # what is stopped has begun by then
MEGABYTE = 1 << 20


class Maker:
    """Makes a process's device and communicator. This one: the CPU, and gloo."""

    name = "gloo"
    device = "cpu"  # by its name in the policy
    torch_device = "cpu"
    link_up_s = LINK_UP_S
    environment: Mapping[str, str] = MappingProxyType({})
    # A thread that waits for a collective ends with what the communicator raises when it is aborted: its own exception,
    # with the reason. On a device only the device knows what it waits for, and the stop that follows wakes it.
    stopped_words: tuple[str, ...] = ()
    # A link-up that a stop of the device does not end, but the library, when its time is over.
    stop_ends_link_up = True
    # What it does not give of what gloo gives: functions of test_same_results.py, each with the reason.
    lacks: Mapping[str, str] = MappingProxyType({})

    def require(self) -> None:
        """Skip the test where this maker has nothing to make it with."""

    def take_device(self, number: int) -> Any:
        """Return the device of a rank, taken."""
        made = device_named(self.device)
        made.prepare(number, dict(self.environment), self.link_up_s)
        return made

    def draw(self) -> list[float]:
        """Draw from the device's own generator; nothing where it has none."""
        return []

    def communicator(self) -> Any:
        """Return the communicator of a process."""
        from midstep.communicators.gloo.communicator import GlooCommunicator

        return GlooCommunicator()


class DeviceMaker(Maker):
    """Makes a device whose library links it, and can look into that library."""

    stopped_words: tuple[str, ...] = ("FORCE STOP",)
    lacks = MappingProxyType(
        {
            "receive_from_anybody": "HCCL links pairs of ranks, each by itself: torch-npu refuses to receive from any",
            "all_reduce_of_sparse": "HCCL takes addresses and lengths, which a sparse tensor does not have",
        }
    )
    buffer_mb, pair_buffer_mb = 200, 20  # HCCL_BUFFSIZE and P2P_HCCL_BUFFSIZE, not set: a communicator takes twice that

    @property
    def calls(self) -> Any:
        """Return torch-npu, or the module in its place."""
        raise NotImplementedError

    def options(self, buffer_mb: int) -> Any:
        """Return a group's own options, as Megatron gives them: the size of its communicator's buffers."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Return how much of the device's memory is in use, by communicators or else: tensors are small here."""
        raise NotImplementedError

    def hold_device(self, seconds: float) -> None:
        """Have the process that had the device before hold it for so long yet."""
        raise NotImplementedError

    def communicators(self) -> tuple[int, int]:
        """Return how many communicators of groups there are, and how many of pairs, by the memory that they take."""
        groups, rest = divmod(self.used_bytes(), 2 * self.buffer_mb * MEGABYTE)
        return groups, rest // (2 * self.pair_buffer_mb * MEGABYTE)


class FakeMaker(DeviceMaker):
    """Makes the fake device, with its communicator."""

    name = device = "fake"
    link_up_s = 10.0
    environment = MappingProxyType({"HCCL_ASYNC_ERROR_HANDLING": "0"})
    # A rank beside one that was stopped sees its connections close, which on an NPU nothing tells it.
    stopped_words = ("FORCE STOP", "HCCL function error")

    def communicator(self) -> Any:
        """Return the communicator of a process."""
        from midstep.communicators.fake import fake_communicator

        return fake_communicator()

    def draw(self) -> list[float]:
        """Draw from the generator of the module in torch-npu's place."""
        return torch.rand(4, generator=self.calls.npu.default_generators[0]).tolist()

    @property
    def calls(self) -> Any:
        """Return the module in torch-npu's place."""
        from midstep.devices import fake

        return fake

    def options(self, buffer_mb: int) -> Any:
        """Return a group's own options."""
        return {"hccl_config": {"hccl_buffer_size": buffer_mb}}

    def used_bytes(self) -> int:
        """Return the memory that communicators take."""
        from midstep.devices.fake_chip import CHIP

        return CHIP.buffer_bytes

    def hold_device(self, seconds: float) -> None:
        """Have the device be busy for so long."""
        from midstep.devices.fake_chip import CHIP

        CHIP.free_s = time.monotonic() + seconds


class NpuMaker(DeviceMaker):
    """Makes the device and the communicator of NPUs, over torch-npu and the fake CANN."""

    name = device = torch_device = "npu"
    link_up_s = 60.0
    # HCCL's own waits end with HCCL_CONNECT_TIMEOUT, and CANN's abort of the device does not end them.
    stop_ends_link_up = False
    lacks = MappingProxyType(
        {
            **DeviceMaker.lacks,
            "is_over": "torch-npu's wait is for the queue: that a work was waited for says nothing of its end",
            "many_at_once": "HCCL links a pair when both are inside it: outside of a batch a circle waits for itself",
        }
    )

    def __init__(self) -> None:
        """Take what `midstep run` sets for a rank."""
        from midstep.devices.kinds import NPU_DEFAULTS

        self.environment = MappingProxyType(dict(NPU_DEFAULTS))

    def require(self) -> None:
        """Skip or fail the test where there is no fake CANN."""
        from tests.cann.environment import require_cann

        require_cann()

    def communicator(self) -> Any:
        """Return the communicator of a process."""
        from midstep.communicators.hccl import npu_communicator

        return npu_communicator()

    def draw(self) -> list[float]:
        """Draw as a script does."""
        return torch.rand(4, device=self.torch_device).tolist()

    @property
    def calls(self) -> Any:
        """Return torch-npu."""
        import torch_npu

        return torch_npu

    def options(self, buffer_mb: int) -> Any:
        """Return a group's own options."""
        made = self.calls._C._distributed_c10d.ProcessGroupHCCL.Options()
        made.hccl_config = {"hccl_buffer_size": buffer_mb}
        return made

    def used_bytes(self) -> int:
        """Return the memory that is in use."""
        from tests.cann import faults

        return faults.used_bytes()

    def hold_device(self, seconds: float) -> None:
        """Have the fake CANN refuse to build communicators for so long."""
        os.environ["FAKE_CANN_BUSY_UNTIL_S"] = str(time.monotonic() + seconds)


MAKERS: Mapping[str, Maker] = MappingProxyType({each.name: each for each in (Maker(), FakeMaker(), NpuMaker())})
ON_DEVICE = MappingProxyType({"cpu": "gloo", "fake": "fake", "npu": "npu"})  # by what `--device` says


class Setup:
    """A rank with its device, its communicator and its groups."""

    def __init__(
        self, rank: Rank, groups: Sequence[Sequence[int]] = (), *, connected: bool = True, generation: int = 0
    ) -> None:
        self.rank = rank
        self.maker: Any = rank.maker
        self.device = self.maker.take_device(rank.number)
        self.communicator = self.maker.communicator()
        rank.init(self.communicator, generation, connected=connected)
        made = [dist.new_group(list(members)) for members in groups]
        self.groups = [group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER]
        self.renewed: list[bool] = []  # each renewal of a communicator since the last reconnect: whether it is rebuilt
        self.took_s = 0.0  # the last reconnect

    def check(self) -> None:
        """Add up ones in every group, through the handles that were made at the start."""
        for group in (None, *self.groups):
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [float(dist.get_world_size(group))] * 3

    def stop(self, reason: str = "a peer is gone") -> None:
        """Abort, and stop the device, as the control thread does."""
        self.communicator.abort(reason)
        self.device.stop()

    def stop_and_clean(self) -> None:
        """Be stopped in the train thread, and be cleaned."""
        self.stop()
        self.device.clean()

    def stop_soon(self, after_s: float = BEFORE_STOP_S) -> threading.Timer:
        """Be stopped by another thread while something waits; join what is returned before the clean."""
        stopper = threading.Timer(after_s, self.stop)
        stopper.start()
        return stopper

    def say_how_it_ends(self, waiting: Any) -> None:
        """Be stopped while something waits on the device, and say what that raises."""
        stopper = self.stop_soon()
        try:
            waiting.wait()
            self.device.finish()
        except RuntimeError as error:
            self.rank.say(str(error).splitlines()[0])
        stopper.join()
        self.device.clean()

    def inject(self, action: FaultAction) -> None:
        """Inject a fault; some raise where an operator would, and the next operator does so in others."""
        with suppress(RuntimeError):
            self.device.inject(action)

    def reconnect(self, link_up_s: float = 0.0) -> tuple[str, str]:
        """Reconnect in the generation that the test says; be cleaned if that fails."""
        generation = self.rank.hear()
        self.renewed.clear()
        began_s = time.monotonic()
        try:
            self.communicator.reconnect(generation, self.rank.store, link_up_s or self.maker.link_up_s)
        except LinkUpFailed as error:
            self.device.stop()
            self.device.clean()
            return "not up", str(error)
        finally:
            self.took_s = time.monotonic() - began_s
        self.device.rebuilt()
        return "up", ""

    def note_renewals(self) -> None:
        """Write down from now on how the library's communicators are renewed."""
        renew = self.maker.calls.distributed.reinit_process_group

        def noted(group: Any = None, rebuild_link: bool = True) -> Any:
            self.renewed.append(rebuild_link)
            return renew(group, rebuild_link)

        self.maker.calls.distributed.reinit_process_group = noted

    def aborted(self, call: Any) -> str:
        """Return the reason with which the communicator refuses a call, or ends it; empty if it does not."""
        try:
            call()
        except CommunicatorAborted as error:
            return str(error)
        return ""
