"""The phases of a recovery in the train thread: clean, rebuild, repair and rollback, and the report between them."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..communicators.base import DeviceLinks
from ..devices.base import Damage
from ..protocol.errors import CheckpointError, ConfigurationError, StateLost
from ..protocol.messages import Rejoin
from ..protocol.types import CheckpointFormat, InjectionPoint, RepairLinks, RepairPart, RestoreSource, StepReport
from .checkpoints import archive
from .checkpoints.entries import survey
from .checkpoints.writer import PUBLISHER
from .framework import Deriving, Expectant, Growing, Informed, LoadsItself, Rescalable
from .rank_loop import NOTHING, ReceivedBytes
from .step_order import STORED
from .transfer import EarlyTransfers, adopt, run_transfers

if TYPE_CHECKING:
    from .framework import Framework
    from .host_copies import HostCopies
    from .local_state import LocalState
    from .runtime import Runtime
    from .step_order import StepState

_log = logging.getLogger("midstep")

GROWTH = 2  # of the limit of a link-up, from one failed attempt to the next
MOST = 4  # times the first limit: below the deadline of a rejoin, which is longer than all attempts of the first length


@dataclass
class _Repaired:
    """The result of a repair; nothing, if a callback of the user did not call midstep's default."""

    received: ReceivedBytes = NOTHING
    own: bytes | None = None


class RecoveryPhases:
    """Carries out what the loop of the rank asks for between Quiesce and RankReady."""

    def __init__(
        self,
        runtime: "Runtime",
        framework: "Framework",
        own: "LocalState",
        step_state: "StepState",
        copies: "HostCopies",
    ) -> None:
        self._runtime = runtime
        self._framework = framework
        self._own = own
        self._step_state = step_state
        self._copies = copies
        self.rejoined: Rejoin | None = None  # the order that was carried out last
        self._patience = LinkPatience()
        self._early = EarlyTransfers(runtime, framework)
        self._held: frozenset[str] = frozenset()  # shards that were reported as whole for barrier one
        self._arrived: bytes | None = None  # the rank-local state that the repair has brought
        self._as_started: bytes | None = None  # the rank-local state where a checkpoint had none
        if runtime.settings.grows_in_place:
            _growing(framework).refuse_growth()

    def inspect(self) -> list[str]:
        """Make the device usable again; return the corrupted shards: all, where it is not known which."""
        device, framework = self._runtime.device, self._framework
        if device.clean() is not Damage.PERSISTENT:
            return []
        ids = sorted(hold.shard_id for hold in framework.shards() if hold.held)
        tensors = {shard_id: framework.open_shard(shard_id).tensors for shard_id in ids}
        corrupted = [shard_id for shard_id in ids if device.corrupted(tensors[shard_id])]
        for shard_id in corrupted:  # all have been asked: shards can share memory, and it is unlocked as a whole
            device.mark_safe(tensors[shard_id])  # from here on it counts as lost, until a replica has overwritten it
        derived = framework.derived() if isinstance(framework, Deriving) else ()
        struck = sum(device.corrupted([tensor]) for tensor in derived)
        device.mark_safe(derived)
        beside = [f"{struck} of {len(derived)} buffers that no shard has, and that are written again"] if struck else []
        where = ", ".join([*corrupted, *beside]) or "it is not known where"
        _log.warning("device memory is corrupted: %s%s", where, "" if corrupted else "; no shard is trusted")
        return corrupted or ids

    def clean(self) -> list[str]:
        """Run **clean**: inspect, and drop what the step has left. Return the corrupted shards."""
        corrupted: list[str] = []

        def default() -> None:
            corrupted.extend(self.inspect())
            self._framework.clean()
            self._runtime.device.release_unused()

        self._runtime.callbacks.run(InjectionPoint.CLEAN, self._runtime.generation, default)
        return corrupted

    def survey(self, patience_s: float) -> StepReport:
        """Return the report of this rank for barrier one. Wait for the checkpoint directory up to `patience_s`."""
        shards, local_states = self._framework.shards(), self._runtime.black_box.copies()
        settings = self._runtime.settings
        foreign = settings.checkpoint_format is CheckpointFormat.DCP
        checkpoints, trace = survey(settings.checkpoint_directory, patience_s, foreign=foreign)
        if isinstance(self._framework, LoadsItself):
            checkpoints = self._framework.loadable()
        report = self._step_state.report(shards, local_states, checkpoints, trace)
        self._held = frozenset(hold.shard_id for hold in report.holds)
        return self._copies.reported(report)

    def rebuild(self, order: Rejoin) -> None:
        """Run **rebuild**; beside it, have memory prefaulted, and shards moved where they can move early."""
        if isinstance(self._framework, Informed):
            self._framework.informed(order.part)
        if order.part.world_size not in {0, self._runtime.world_size}:
            self._runtime.grow(order.part.world_size)
            _growing(self._framework).grown(order.part.world_size)
        self._runtime.former_size = order.part.former_size or self._runtime.world_size
        self._expect(order)
        self._early.begin(order, self._held)
        self._run(InjectionPoint.REBUILD, order, lambda: self._rebuild(order))
        self._runtime.step_clock.generation(order.generation)

    def repair(self, order: Rejoin) -> ReceivedBytes:
        """Run **repair**; return what was received, early or now."""
        self._leave_earlier_training(order)
        done = _Repaired()
        self._run(InjectionPoint.REPAIR, order, lambda: self._repair(order, done))
        self.rejoined = order
        self._arrived = done.own
        self._early.succeeded()
        return done.received

    def give_up(self) -> None:
        """End what still moves when an attempt has failed. Raises RecoveryError if this process cannot be stopped."""
        self._early.stop()

    def recall_local_state(self, step: int) -> None:
        """Have the rank-local state as of `step` at hand: what the repair has brought, or what the black box has."""
        if self._arrived is None:
            self._arrived = self._runtime.local_states.read(self._runtime.rank, step)
        if self._arrived is None:
            raise StateLost(f"rank {self._runtime.rank} has no copy of its local state as of step {step}")

    def roll_back(self, order: Rejoin) -> None:
        """Run **rollback**, and hand the rank-local state to the buddy."""
        self._patience.linked_up()
        (blob, self._arrived), step = (self._arrived, None), order.part.target_step
        assert blob is not None
        blob = self._leaving_out(blob, self._runtime.rank, order.part)
        with self._restoring(order):
            self._run(InjectionPoint.ROLLBACK, order, lambda: self._own.restore(blob, step))
        self._runtime.local_states.keep(step, blob)
        self._runtime.local_states.pair(order.part.buddy, order.part.copied_rank)
        self._runtime.local_states.swap(step, blob)

    def _restoring(self, order: Rejoin) -> AbstractContextManager[None]:
        """Return what surrounds the restoring of the rank-local state: it may be the damaged file of a checkpoint."""
        directory = self._runtime.settings.checkpoint_directory
        elsewhere = order.part.restore is not RestoreSource.CHECKPOINT or isinstance(self._framework, LoadsItself)
        if elsewhere or directory is None:
            return nullcontext()
        return archive.restoring_local(directory, order.part.target_step, self._runtime.rank)

    def _leave_earlier_training(self, order: Rejoin) -> None:
        """Set older checkpoints aside where training begins at its first step: no recovery may load one of them."""
        runtime, directory = self._runtime, self._runtime.settings.checkpoint_directory
        if order.part.target_step == 0 and directory is not None and runtime.rank == PUBLISHER:
            archive.set_aside(directory, self._label(order))

    def _run(self, phase: InjectionPoint, order: Rejoin, default: Callable[[], None]) -> None:
        self._runtime.callbacks.run(phase, order.generation, default, order.part.target_step)

    def _rebuild(self, order: Rejoin) -> None:
        runtime = self._runtime
        if not order.connected:
            if isinstance(runtime.communicator, DeviceLinks):
                runtime.communicator.carries_shards = order.part.links is RepairLinks.DEVICE
            limit_s = self._patience.next_s(runtime.settings.link_up_s)
            runtime.communicator.reconnect(order.generation, order.store, limit_s)
        runtime.device.rebuilt()
        self._framework.rebuilt()

    def _expect(self, order: Rejoin) -> None:
        """Have memory prefaulted for what will arrive, beside the link-up."""
        if not isinstance(self._framework, Expectant):
            return
        arriving: Counter[str] = Counter()
        for transfer in order.part.transfers:
            if transfer.destination == self._runtime.rank:
                arriving[transfer.shard_id] += transfer.length_bytes
        for shard_id, size_bytes in arriving.items():
            self._framework.expect_shard(shard_id, size_bytes)

    def _repair(self, order: Rejoin, done: "_Repaired") -> None:
        runtime, framework, part = self._runtime, self._framework, order.part
        if part.restore in STORED:
            copied = part.restore is RestoreSource.HOST_COPY
            if isinstance(framework, LoadsItself) and not copied:
                done.own = self._own.capture()  # as the script's own part of the repair has left it
                return
            if copied:
                done.received = ReceivedBytes(self._copies.bring(part))
            done.own = self._copies.load(part.target_step) if copied else self._load(order)
            self._forget_later(order)
            return
        early = self._early.agreed()
        transferred = run_transfers(
            msgspec.structs.replace(part, transfers=()) if early else part,
            rank=runtime.rank,
            framework=framework,
            links=runtime.communicator,
            read_local_state=lambda rank, step: self._read_local(rank, step, part),
            sent=runtime.injection_points.sent,
        )
        if transferred.bytes_received:
            runtime.debug_log.note(f"repair has moved {transferred.text}")
        done.own = transferred.local_state
        done.received = ReceivedBytes(transferred.bytes_received, transferred.bytes_over_devices)
        if early:
            arrived = self._early.arrived()
            adopt(arrived, framework)
            received = transferred.bytes_received + arrived.received.bytes_received
            done.received = ReceivedBytes(received, transferred.bytes_over_devices)
        if done.own is not None and any(
            each.rank == runtime.rank and each.origin is not None for each in part.local_states
        ):
            done.own = self._adopted(_growing(framework), done.own, random_numbers=False)

    def _adopted(self, framework: Rescalable, blob: bytes, *, random_numbers: bool) -> bytes:
        """Return this rank's local state, made of one of another world. `random_numbers`: it was this rank's."""
        self._own.adopt(framework, blob, random_numbers=random_numbers)
        return self._own.capture()

    def _read_local(self, rank: int, step: int, part: RepairPart) -> bytes | None:
        """Return the copy of a rank's local state that is kept here, with the position to which its data is to go."""
        blob = self._runtime.local_states.read(rank, step)
        if blob is None or part.leave_out is None or not part.leave_out.data_step:
            return blob
        return self._leaving_out(blob, rank, part)

    def _leaving_out(self, blob: bytes, rank: int, part: RepairPart) -> bytes:
        """Have a rank-local state of the target step go on behind the batches that the plan leaves out, if any."""
        if part.leave_out is None:
            return blob
        read, order = self._runtime.local_states.read, part.leave_out
        if not order.data_step:
            return self._own.advanced(order.times, blob)
        return self._own.leaving_out(order.times, blob, read(rank, part.target_step), read(rank, order.data_step))

    def _label(self, order: Rejoin) -> str:
        return f"{self._runtime.job}-g{order.generation}"

    def _load(self, order: Rejoin) -> bytes:
        runtime, framework, step = self._runtime, self._framework, order.part.target_step
        directory = runtime.settings.checkpoint_directory
        assert directory is not None
        for hold in framework.shards():
            archive.load_shard(directory, step, hold.shard_id, framework)
        return self._load_local(directory, step)

    def _forget_later(self, order: Rejoin) -> None:
        """Set checkpoints of later steps aside: all ranks go back behind them."""
        directory = self._runtime.settings.checkpoint_directory
        if directory is not None and self._runtime.rank == PUBLISHER:  # the rank that publishes them removes them
            self._copies.forget_after(order.part.target_step)  # before: none of them may become a checkpoint now
            archive.forget_after(directory, order.part.target_step, self._label(order))

    def _load_local(self, directory: str, step: int) -> bytes:
        """Return this rank's local state; in a world of another size, what a rank that was not there begins with."""
        rank, framework = self._runtime.rank, self._framework
        saved = archive.world_size_of(directory, step)
        if saved is None:  # torch alone wrote it: random numbers and data are those of a start
            self._as_started = self._as_started or self._own.capture()
            return self._as_started
        if saved == self._runtime.world_size:
            return archive.load_local(directory, step, rank)
        if not isinstance(framework, Rescalable):
            raise CheckpointError(
                f"the checkpoint of step {step} was written by {saved} ranks, this world has "
                f"{self._runtime.world_size}, and a {type(framework).__name__} cannot be divided again among them"
            )
        blob = archive.load_local(directory, step, rank % saved)
        with archive.restoring_local(directory, step, rank % saved):
            return self._adopted(framework, blob, random_numbers=rank < saved)


def _growing(framework: "Framework") -> Growing:
    """Return the framework of a world that grows in place. Raises ConfigurationError if it cannot."""
    if not isinstance(framework, Growing):
        raise ConfigurationError(
            f"scale.in_place in the policy: what a rank holds in a {type(framework).__name__} follows from the number "
            "of ranks. Leave it out"
        )
    return framework


class LinkPatience:
    """The time limit of the next attempt to link up: at first as long as a healthy network needs, then longer.

    A link-up fails mostly because a peer is dead, and is given up soon. But a network may be slow today, and then
    every attempt would fail alike. All ranks fail together, so their limits grow together.
    """

    def __init__(self) -> None:
        self._factor = 1

    def next_s(self, first_s: float) -> float:
        """Return the limit of the attempt that begins now; `first_s` is that of a first one."""
        limit_s = first_s * self._factor
        self._factor = min(self._factor * GROWTH, MOST)
        return limit_s

    def linked_up(self) -> None:
        """Begin with the first limit again: the world is connected."""
        self._factor = 1
