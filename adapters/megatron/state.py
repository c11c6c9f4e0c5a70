"""Recover a Megatron job: the Framework protocol in Megatron's terms, and the calls of which a step consists.

The train function reports its progress to the step ledger by the calls that each step makes:

    zero_grad, zero_grad_buffer                       the step begins; here orders are followed
    forward, backward, gradient reduction
    optimizer.step()
        loss scale, found-inf, gradient norm, clipping            collectives
        gradients to the buddy, if any; the peer copy's arrive before rank-local state is captured
        commit barrier                                            <- ledger.enter_update
        inner optimizer, main to model parameters                 local
        committed                                                 <- ledger.leave_update
        parameter all-gather                                      collective
    scheduler.step(), iteration and samples counted               computed at the commit barrier, see RankLocalState

The calls are those of the objects that were found; no class of Megatron's is changed.

An interrupted step leaves handles, counters, gradients, scratch memory and contexts. `no_sync`, the context in which
gradients are not reduced, needs the most care. Megatron's pipeline schedules enter it by hand, and leave it at the last
micro-batch. A schedule that an exception ends before that never leaves it: its frame becomes garbage, and Python closes
the context when the garbage collector runs, which may be in the middle of a later step. From there on gradients of that
step would be reduced before they are complete, with other numbers on each rank, and no error. So open contexts are
tracked here, and left when the step is rolled back; a later close changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ...processor.framework import ModelReplica, OpenShard, ShardDigest
from ...processor.injection_points import fire_in_backward, fire_in_forward
from ...processor.runtime import Runtime
from ...protocol.types import InjectionPoint, ShardHold
from ..buddies import Buddies, say
from .compatibility import GRADIENT_NORMS
from .parts import Parts, bucket_groups, flat_buffers
from .peer_copy import PeerCopy
from .process_groups import refuse_stale
from .rank_local_state import RankLocalState
from .replicas import RankPlace, Replica, Replicas
from .shards import derive_parameters, find_replica, is_distributed, main_parameters

if TYPE_CHECKING:
    from ...processor.ledger import Ledger

Enter = Callable[[], AbstractContextManager[Any]]


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

    @property
    def stage(self) -> int:
        """The number that ranks with equal work have in common: that of their pipeline stage."""
        from megatron.core import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_rank())

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger, and hook the calls of which a step consists."""
        self._ledger = ledger
        self._hooks.attach(ledger)
        self._rank_local.hand_batches(ledger.batch)
        runtime = Runtime.current()
        replica = self.model_replica() if runtime is not None and runtime.settings.integrity_audit_steps else None
        if replica is not None and len(replica.members) > 1:  # of which not all take batches
            for chunk in self._parts.chunks:
                chunk.register_forward_pre_hook(lambda *_: ledger.computes(has_batch=False))
            self._hooks.tell_computed(ledger)

    def model_replica(self) -> ModelReplica | None:
        """Return the tensor, context, pipeline and expert parallel ranks of one copy of the model, this one included.

        None if there is no other copy, or if a step needs what other copies have computed before its update.
        """
        return find_replica() if meets_once(self._parts) else None

    def step_left(self, step: int) -> None:
        """Drop what is known of a step that ends before its update, and its gradients."""
        self._hooks.forget_step()
        drop_gradients(self._parts)
        drop_handles(self._parts)

    def capture_conditions(self) -> bytes:
        """Capture random numbers and buffers."""
        return self._rank_local.capture_conditions()

    def take_conditions(self, blob: bytes) -> None:
        """Put back what `capture_conditions` has returned on another rank."""
        self._rank_local.take_conditions(blob)

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

    def digests(self) -> dict[str, ShardDigest]:
        """Return a hash of each shard that is here."""
        return self._replicas.digests()

    @property
    def changes_in_updates_alone(self) -> bool:
        """True with plain optimizers. What a distributed one updates may lie in the buffer that a gather writes to."""
        return not any(is_distributed(leaf) for leaf in self._parts.leaves)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that this rank's update will use."""
        return [each.grad for each in main_parameters(self._parts.leaves) if each.grad is not None]

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that the backward pass computes gradients of."""
        return [each for chunk in self._parts.chunks for each in chunk.parameters() if each.requires_grad]

    @property
    def reports_values(self) -> bool:
        """True: the gradient norm is reported here, and what the script gives to `midstep.report`."""
        return True

    @property
    def has_data(self) -> bool:
        """True if there are data iterators: batches that are left out are left out of them."""
        return bool(self._parts.iterators)

    @property
    def handed_out(self) -> dict[str, int] | None:
        """How many global batches have been consumed; None: their size, or where an iterator stands, is not known."""
        return self._rank_local.handed_out

    def advance(self, blob: bytes, batches: Mapping[str, int]) -> bytes:
        """Return a captured state with its samples so many global batches further on."""
        return self._rank_local.advanced(blob, batches)

    def leave_out(self, blob: bytes, later: bytes) -> bytes:
        """Return a captured state with the samples of a later one; without iterators, with its random numbers."""
        return self._rank_local.leaving_out(blob, later)

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
        """True: shards can be moved while the links come up, as `rebuilt` only looks at groups."""
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

    def derived(self) -> list[torch.Tensor]:
        """Return Megatron's flat buffers: of gradients, and of parameters that are gathered from optimizers' pieces."""
        buffers = flat_buffers(self._parts)
        gathered = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        return [buffer.grad_data for buffer in buffers] + gathered

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state."""
        self._rank_local.restore(blob)

    def rolled_back(self, step: int) -> None:
        """Drop gradients, derive parameters from distributed optimizers, and send buddies their first copy."""
        self.step_left(step)
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


class StepHooks:
    """The hooks on one set of parts, and the faults that are armed in the middle of a step."""

    def __init__(self, parts: Parts, rank_local: RankLocalState, buddies: Buddies[PeerCopy] | None) -> None:
        self._parts = parts
        self._buddies = buddies
        self._rank_local = rank_local
        self._ledger: Ledger | None = None
        self._begun: int | None = None
        self._updated = False
        self._gathers: list[Callable[[], None]] | None = None  # those of an update that is under way
        self._armed: dict[InjectionPoint, Callable[[], None]] = {}
        self._no_sync = NoSyncContexts()

    def attach(self, ledger: "Ledger") -> None:
        """Hook the calls, for good. Runs once, before the first step."""
        self._ledger = ledger
        optimizer, scheduler = self._parts.optimizer, self._parts.scheduler
        optimizer.step = self._around_step(optimizer.step)
        optimizer.step_with_ready_grads = self._around_update(optimizer.step_with_ready_grads)
        optimizer.zero_grad = self._before(optimizer.zero_grad)
        for name in GRADIENT_NORMS:
            setattr(optimizer, name, self._reporting(getattr(optimizer, name)))
        self._no_sync.watch(self._parts.chunks)
        for chunk in self._parts.chunks:
            chunk.zero_grad_buffer = self._before(chunk.zero_grad_buffer)
            chunk.start_param_sync = self._after_commit(chunk.start_param_sync)
            chunk.finish_grad_sync = self._at(InjectionPoint.REDUCTION, chunk.finish_grad_sync)
        for group in bucket_groups(self._parts):
            group.start_param_sync = self._at(InjectionPoint.GATHER, group.start_param_sync)
        if scheduler is not None:
            scheduler.step = self._after_scheduler(scheduler.step)

    def tell_computed(self, ledger: "Ledger") -> None:
        """Tell when the gradients of the last chunk are reduced: of embeddings they are added up again behind that."""
        last = self._parts.chunks[-1]
        plain = last.finish_grad_sync

        def finish_grad_sync(*args: Any, **options: Any) -> Any:
            result = plain(*args, **options)
            ledger.computed()
            return result

        last.finish_grad_sync = finish_grad_sync

    def arm(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once, when this step's reduction or gather begins, to inject a fault there."""
        self._armed[point] = fire

    def forget_step(self) -> None:
        """Drop what is known of a step that is rolled back."""
        self._begun, self._updated, self._gathers = None, False, None
        self._armed.clear()
        self._no_sync.leave()
        if self._buddies is not None:
            self._buddies.forget_step()

    def _begin(self) -> None:
        ledger = self._ledger
        assert ledger is not None
        if self._begun != ledger.count:
            self._begun = ledger.begin()
            self._updated = False

    def _before(self, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._begin()
            return plain(*args, **options)

        return call

    def _reporting(self, plain: Any) -> Any:
        def norm(*args: Any, **options: Any) -> Any:
            result = plain(*args, **options)
            if self._ledger is not None and result is not None:
                self._ledger.report({"grad_norm": result})
            return result

        return norm

    def _around_step(self, plain: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            self._begin()
            assert self._ledger is not None
            self._ledger.reduced()
            result = plain(*args, **options)
            if not self._updated:  # inf or nan was found: a step that changes nothing but the loss scale
                self._update(skipped=True, apply=lambda: None)
            return result

        return step

    def _around_update(self, plain: Any) -> Any:
        def step_with_ready_grads(*args: Any, **options: Any) -> Any:
            return self._update(skipped=False, apply=lambda: plain(*args, **options))

        return step_with_ready_grads

    def _update(self, *, skipped: bool, apply: Callable[[], Any]) -> Any:
        ledger = self._ledger
        assert ledger is not None
        self._rank_local.updating(skipped=skipped)
        index = ledger.count
        if self._buddies is not None and not skipped:
            self._buddies.send()
        ledger.enter_update(index)
        self._gathers = []
        result = apply()
        if self._buddies is not None:
            self._buddies.update()
        gathers, self._gathers = self._gathers, None
        self._updated = True
        ledger.leave_update(index)
        for gather in gathers:
            gather()
        return result

    def _after_commit(self, plain: Any) -> Any:
        """Put off a gather of parameters to after the commit: inside the update there is no collective."""

        def start_param_sync(*args: Any, **options: Any) -> None:
            if self._gathers is None:
                plain(*args, **options)
            elif plain not in self._gathers:  # a chained optimizer asks once for each of its parts
                self._gathers.append(plain)

        return start_param_sync

    def _at(self, point: InjectionPoint, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._fire(point)
            return plain(*args, **options)

        return call

    def _fire(self, point: InjectionPoint) -> None:
        fire = self._armed.pop(point, None)
        if fire is not None:
            fire()

    def _after_scheduler(self, plain: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            self._rank_local.scheduler_stepped(int(options.get("increment", args[0] if args else 1)))
            return plain(*args, **options)

        return step


def meets_once(parts: Parts) -> bool:
    """Return whether a replica needs no other one before its gradients are reduced, and they are reduced once."""
    ddp_configs = [chunk.ddp_config for chunk in parts.chunks]
    gathers = any(each.overlap_param_gather for each in ddp_configs)
    instances = max(getattr(each, "num_distributed_optimizer_instances", 1) for each in ddp_configs)
    return not gathers and instances == 1


def drop_handles(parts: Parts) -> None:
    """Drop the handles of collectives that were under way. Runs in clean, after stop."""
    for group in bucket_groups(parts):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False


def drop_gradients(parts: Parts) -> None:
    """Drop gradients and their counters. End of rollback: until then a rank may have to finish its update."""
    zero_grad = type(parts.optimizer).zero_grad  # the instance's begins a step
    zero_grad(parts.optimizer)
    for chunk in parts.chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
            parameter.grad_added_to_main_grad = False
    for buffer in flat_buffers(parts):
        buffer.reset()
    for group in bucket_groups(parts):
        group.is_last_microbatch = True
        if hasattr(group, "per_param_grad_ready_counts"):
            group.per_param_grad_ready_counts = {}
        if hasattr(group, "params_with_grad"):
            group.params_with_grad = set()


def reset_globals() -> None:
    """Reset Megatron's module globals that live as long as a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state.destroy_global_memory_buffer()  # an aborted collective may have been writing into it
        parallel_state._set_global_memory_buffer()
    if parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    if hasattr(megatron_random, "_unset_checkpointing"):  # not in megatron-core before 0.16
        megatron_random._unset_checkpointing()
    _clear_expert_losses()


def _clear_expert_losses() -> None:
    try:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker as tracker
    except ImportError:  # megatron-core before 0.16
        from megatron.core.parallel_state import get_moe_layer_wise_logging_tracker as tracker
    tracker().clear()


class NoSyncContexts:
    """The `no_sync` contexts of all model chunks that were entered and not left."""

    def __init__(self) -> None:
        self._open: list[_TrackedContext] = []

    def watch(self, chunks: Iterable[Any]) -> None:
        """Track each context from now on, whether a schedule gets it from a chunk or from its configuration."""
        known = {id(chunk): self._known(chunk.no_sync) for chunk in chunks}
        for chunk in chunks:
            given = getattr(chunk.config, "no_sync_func", None)
            if isinstance(given, list | tuple):
                chunk.config.no_sync_func = [_instead_of(each, known) for each in given]
            elif given is not None:
                chunk.config.no_sync_func = _instead_of(given, known)
        for chunk in chunks:
            chunk.no_sync = known[id(chunk)]

    def leave(self) -> None:
        """Leave the contexts that a schedule left open. In rollback, before the next step's flags are set."""
        for context in reversed(self._open.copy()):
            context.__exit__(None, None, None)

    def _known(self, plain: Enter) -> Enter:
        return lambda: _TrackedContext(plain(), self._open)


def _instead_of(given: Any, known: dict[int, Enter]) -> Any:
    """Return the tracked context factory for a chunk's own `no_sync`; anything else unchanged."""
    owner = getattr(given, "__self__", None)
    return known.get(id(owner), given) if getattr(given, "__name__", "") == "no_sync" else given


class _TrackedContext(AbstractContextManager[Any]):
    """One context, left by the schedule or by `leave`, whichever comes first."""

    def __init__(self, plain: AbstractContextManager[Any], among: list["_TrackedContext"]) -> None:
        self._plain = plain
        self._among = among

    def __enter__(self) -> Any:
        self._among.append(self)
        return self._plain.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self in self._among:
            self._among.remove(self)
            return self._plain.__exit__(kind, error, trace)
        return None
