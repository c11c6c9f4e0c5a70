"""Recover a Megatron job: the Framework protocol, in Megatron's terms."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...processor.autograd_hooks import fire_in_backward, fire_in_forward
from ...processor.framework import OpenShard
from ...protocol.types import InjectionPoint, ShardHold
from .buddy import say
from .hooks import StepHooks
from .parts import Parts
from .process_groups import refuse_stale
from .rank_local_state import RankLocalState
from .replicas import RankPlace, Replica, Replicas
from .shards import derive_parameters
from .step_cleanup import drop_gradients, drop_handles, reset_globals

if TYPE_CHECKING:
    from ...processor.ledger import Ledger


class MegatronState:
    """The state of one rank of a Megatron job. See Framework for when each method runs."""

    def __init__(
        self, parts: Parts, place: RankPlace, *, replica: Replica | None = None, scheduler_increment: int | None = None
    ) -> None:
        self._parts = parts
        self._rank_local = RankLocalState(parts, scheduler_increment)
        self._replicas = Replicas(parts, place, replica)
        self._hooks = StepHooks(parts, self._rank_local, self._replicas.buddies)
        self._ledger: Ledger | None = None

    # --- for the train function -----------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The iteration at which the train function continues."""
        assert self._ledger is not None
        return self._rank_local.first + self._ledger.count

    @property
    def consumed_samples(self) -> int:
        """The samples that all ranks have consumed before that iteration."""
        return self._rank_local.consumed

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger, and hook the calls of which a step consists."""
        self._ledger = ledger
        self._hooks.attach(ledger)

    def audit(self) -> tuple[str, ...]:
        """Return one sentence for each shard that the loss of one node would take away; print what copies cost."""
        say(self._replicas.cost())
        return self._replicas.findings()

    def shards(self) -> tuple[ShardHold, ...]:
        """Return the shards that this rank must hold."""
        return self._replicas.holds()

    def writes(self) -> tuple[str, ...]:
        """Return the shards that this rank writes into checkpoints, as their first holder."""
        return self._replicas.written_here()

    def capture_local(self) -> bytes:
        """Capture the rank-local state as it will be after this step's update; receive the peer copy's gradients."""
        captured = self._rank_local.capture()
        if self._replicas.buddies is not None:
            self._replicas.buddies.arrive()  # they were on their way in the meantime
        return captured

    def clean(self) -> None:
        """Drop collectives that were under way, and scratch memory. Gradients stay until `rolled_back`."""
        drop_handles(self._parts)
        reset_globals()

    def rebuilt(self) -> None:
        """Check that Megatron's objects, which keep their reconnected groups, hold none of an older generation."""
        refuse_stale(self._parts)

    @property
    def moves_early(self) -> bool:
        """Whether shards can be moved while the links come up: always. `rebuilt` only looks at groups."""
        return True

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open a shard to send from it."""
        return self._replicas.open(shard_id)

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Return the tensors that receive a shard."""
        return self._replicas.accept(shard_id, header)

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make a received shard the state of this rank."""
        self._replicas.adopt(shard_id, shard)

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state."""
        self._rank_local.restore(blob)

    def rolled_back(self, step: int) -> None:
        """Drop gradients, derive parameters from distributed optimizers, and send buddies their first copy."""
        self._hooks.forget_step()
        drop_gradients(self._parts)
        drop_handles(self._parts)
        derive_parameters(self._parts)
        if self._replicas.buddies is not None:
            self._replicas.buddies.seed()

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once in the middle of the pass, or when the reduction or gather of this step begins."""
        modules = [chunk.module for chunk in self._parts.chunks]
        if point is InjectionPoint.FORWARD:
            fire_in_forward(modules, fire)
        elif point is InjectionPoint.BACKWARD:
            fire_in_backward(modules, fire)
        else:
            self._hooks.arm(point, fire)
