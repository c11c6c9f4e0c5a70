"""The train state of a script whose parameters are sharded (DTensor): by `fully_shard`, on one mesh dimension or HSDP.

`midstep.TrainState` makes one of these where it finds sharded parameters. A rank that is lost gets its pieces from the
rank that has the same place in another row of the mesh. Nothing is gathered for that, and no `state_dict` is asked:
pieces are read as they lie in memory, while the ranks are parked. Process groups keep their handles, which meshes,
modules and torch's functional collectives have by name or by reference; so nothing in them has to be made again.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...communicators.process_group import ReplaceableGroup
from ...processor.framework import ModelReplica, OpenShard, ShardDigest
from ...processor.injection_points import fire_in_backward_of_layers, fire_in_forward
from ...processor.registry import by_name
from ...processor.runtime import Runtime
from ...processor.shard import Shard, digests_of
from ...processor.shard_layout import ShardLayout
from ...protocol.errors import RecoveryError
from ...protocol.types import InjectionPoint, ShardHold
from ..buddies import Buddies, pair, say
from ..ddp.state import TrainState, without_ddp
from ..process_groups import walk_groups
from .compatibility import (
    call_after_backward,
    clear_iteration,
    drop_gradients,
    fsdp_states,
    refuse_pipelines,
    refuse_unsupported,
    reshard,
    tells_backward,
)
from .peer_copy import PieceCopy, hook_updates, refuse_unrepeatable
from .shards import Piece, RankLayout, find_pieces, find_replica, local, rehearse_update, shard_name

if TYPE_CHECKING:
    from ...processor.ledger import Ledger

_log = logging.getLogger("midstep")


class ShardedTrainState(TrainState):
    """See TrainState, which makes it. Its arguments and what a script does with it are the same."""

    def __init__(self, model: Any, optimizer: Any = None, *others: Any, **named: Any) -> None:
        modules = without_ddp(by_name("model", model))
        refuse_unsupported(modules, by_name("optimizer", optimizer))
        reshard(modules.values())  # a forward pass alone leaves the outermost parameters gathered
        super().__init__(model, optimizer, *others, **named)
        self._pieces = find_pieces(modules, self.registry, frozenset(self._layouts))
        self._buddies = self._find_buddy()
        for piece in self._pieces.values():
            piece.open()  # raises now what it would raise in a recovery

    def audit(self) -> tuple[str, ...]:
        """Return what is not registered or changes in the wrong place, and what the loss of one node would take away.

        Runs at start and after the first steps, between two steps, and warns in the rank's log.
        """
        reshard(self._modules)
        if self._buddies is not None:
            say(self._cost_of_copies(self._buddies))
        return (*super().audit(), *self._layout_findings())

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger, and tell it of each forward and backward pass where other ranks can repeat them.

        Raises ConfigurationError where the model is a stage of a pipeline.
        """
        refuse_pipelines()
        super().bind(ledger)
        runtime = Runtime.current()
        if runtime is not None and runtime.settings.integrity_audit_steps and self.model_replica() is not None:
            for module in self._modules:
                module.register_forward_pre_hook(lambda *_: ledger.computes(has_batch=True), prepend=True)
            call_after_backward(self._modules, ledger.computed)
        if self._buddies is not None:
            hook_updates(self.registry, self._update_copy)

    def shards(self) -> tuple[ShardHold, ...]:
        """Return the shards that this rank must hold, with their sizes now."""
        return tuple(ShardHold(name, piece.open().size_bytes, held=piece.held) for name, piece in self._pieces.items())

    def writes(self) -> tuple[str, ...]:
        """Return the shards that this rank writes into checkpoints: those of which it is the first holder."""
        return tuple(name for name, piece in self._pieces.items() if piece.writer == self._rank)

    def digests(self) -> dict[str, ShardDigest]:
        """Return a hash of each shard that is here."""
        return digests_of({name: piece.open() for name, piece in self._pieces.items() if piece.held})

    def gradients_final(self) -> None:
        """Send this rank's gradients to its buddy, which repeats its update."""
        if self._buddies is not None:
            self._buddies.send()

    def capture_local(self) -> bytes:
        """Capture the rank-local state; receive the gradients that the peer copy's update takes."""
        captured = super().capture_local()
        if self._buddies is not None:
            self._buddies.arrive()  # they were on their way in the meantime
        return captured

    def clean(self) -> None:
        """Clear away what an interrupted step has left, but for reduced gradients, which stay until `rolled_back`."""
        super().clean()
        clear_iteration(self._modules)

    def rebuilt(self) -> None:
        """Check that meshes and modules, which keep their reconnected groups, hold none of an older generation."""
        seen: set[int] = set()
        held = [(state, "fully_shard") for state in fsdp_states(self._modules)]
        held += [(mesh, "a device mesh") for piece in self._pieces.values() for mesh in piece.meshes()]
        for root, place in held:
            for where, group in walk_groups(root, place, seen):
                if isinstance(group, ReplaceableGroup) and not group.connected:
                    raise RecoveryError(f"{where} is a process group of an earlier generation: {group.getGroupName()}")

    @property
    def moves_early(self) -> bool:
        """True: pieces can be moved while the links come up, as `rebuilt` only looks at groups."""
        return True

    def rehearse(self) -> None:
        """Have torch work out how the tensors of an update are sharded, before this process waits for its rank."""
        for name, optimizer in self.registry.optimizers.items():
            why_not = rehearse_update(optimizer)
            if why_not:
                _log.debug("the first update of %s was not rehearsed: %s", name, why_not)

    def model_replica(self) -> ModelReplica | None:
        """Return the ranks that share one copy of the parameters: a row of the mesh, where that has several (HSDP)."""
        return find_replica(self._modules) if tells_backward(self._modules) else None

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open a shard to send from it."""
        return self._piece(shard_id).open()

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Return the tensors that receive a shard."""
        return self._piece(shard_id).accept(header)

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make a received shard the state of this rank."""
        if not isinstance(shard, Shard):
            raise RecoveryError(f"shard {shard_id!r} was not accepted by this state, it is a {type(shard).__name__}")
        self._piece(shard_id).adopt(shard)

    def expect_shard(self, shard_id: str, size_bytes: int) -> None:
        """Allocate memory ahead of time for what a shard adds to this rank's state."""
        self._piece(shard_id).expect(size_bytes)

    def layout(self, shard_id: str) -> ShardLayout:
        """Return what the tensors of a shard are called outside of midstep, and where its pieces lie in them."""
        return self._piece(shard_id).layout()

    def rolled_back(self, step: int) -> None:
        """Drop gradients, also those that were accumulated and not reduced; send buddies their first copy."""
        drop_gradients(self._modules)
        super().rolled_back(step)
        if self._buddies is not None:
            self._buddies.forget_step()
            self._buddies.seed()

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's pieces of the gradients."""
        return [local(each) for each in super().gradients()]

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once, in the middle of the next forward or backward pass, to inject a fault there."""
        if point is InjectionPoint.FORWARD:
            fire_in_forward(self._modules, fire)
        elif point is InjectionPoint.BACKWARD:
            fire_in_backward_of_layers(_sharded_layers(self._modules), fire)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return list(self.registry.modules.values())

    def _check_state(self) -> None:
        self.registry.check(optimizers=False)  # sharded state is looked at as pieces

    def _parameter_marks(self) -> dict[str, Any]:
        return {f"the parameters in {name}": piece.versions() for name, piece in self._pieces.items()}

    def _find_buddy(self) -> Buddies[PieceCopy] | None:
        """Return the copies of pieces that one rank alone holds, where the policy asks for them; and keep this rank's.

        Raises ConfigurationError where updates cannot be repeated.
        """
        runtime, rank = Runtime.current(), self._rank
        alone = next((piece for piece in self._pieces.values() if piece.ranks == (rank,)), None)
        asked = runtime is not None and runtime.settings.buddies
        if runtime is None or not asked or alone is None or dist.get_world_size() == 1:
            return None
        refuse_unrepeatable(self.registry, alone)
        ring = pair(rank, alone.mesh_ranks, runtime.ranks_per_node)
        copy = PieceCopy(ring.copied, alone.registered, self.registry, frozenset(self._layouts))
        self._pieces[shard_name(copy.ranks)] = copy
        return Buddies(alone.open, copy, ring)

    def _update_copy(self, optimizer: str) -> None:
        assert self._buddies is not None
        self._buddies.piece.refuse_second(optimizer)
        self._buddies.update(optimizer)

    def _cost_of_copies(self, buddies: Buddies[PieceCopy]) -> str:
        held, sent = (size / 1e6 for size in (buddies.piece.open().size_bytes, buddies.piece.sent_bytes))
        return (
            f"replica buddy: a copy of the piece of rank {buddies.copied_rank}, {held:.1f} MB here by now, and more "
            f"with the optimizer's state; {sent:.1f} MB of gradients sent to rank {buddies.buddy} in each step, and "
            "a second optimizer step"
        )

    def _layout_findings(self) -> tuple[str, ...]:
        runtime = Runtime.current()
        if runtime is None:
            return ()
        layout, ranks = RankLayout(dist.get_world_size(), runtime.ranks_per_node), {}
        for name, piece in self._pieces.items():
            buddies = self._buddies
            if buddies is None or len(piece.ranks) > 1:
                ranks[name] = piece.ranks
            elif piece.ranks == (self._rank,):
                ranks[name] = tuple(sorted((self._rank, buddies.buddy)))
        return layout.findings(ranks)

    def _piece(self, shard_id: str) -> Piece:
        if shard_id not in self._pieces:
            raise RecoveryError(f"this rank has no shard {shard_id!r}; it has {', '.join(sorted(self._pieces))}")
        return self._pieces[shard_id]


def _sharded_layers(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that `fully_shard` was called for; all that compute, where there are none."""
    found = [state._modules[0] for state in fsdp_states(modules) if state._modules]
    return found or [layer for module in modules[:1] for layer in module.modules() if not list(layer.children())]
