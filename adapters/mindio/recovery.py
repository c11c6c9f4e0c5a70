"""MindIO's handlers in midstep's recovery: which is called when, and with what.

For a process that is replaced: stop, clean, rebuild_group, repair, rollback. Where all processes stay: stop, clean,
repair if memory was lost, rollback. Survivors run all of them; a newcomer begins with rebuild_group.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...devices.base import Damage
from ...processor.callbacks import Lifecycle, Recovery
from ...processor.local_state import LocalState
from ...processor.session import SessionStage
from ...protocol.errors import CommunicatorAborted, OrdersOverdue, RecoveryError, StateLost
from ...protocol.messages import SaveCheckpoint
from .cluster import warn_of_stale_links
from .handlers import HandlerKind, Handlers
from .state import HandledState, RankPart, dump_of, repair_of, settled
from .values import RET_NO_REBUILD, RET_OK, RepairStrategy, RepairType, is_mindspore, pauses_after_update

if TYPE_CHECKING:
    from ...processor.runtime import Runtime
    from .device import GroupNames, HandledDevice
    from .driver import Conversation

LIMIT_VARIABLE = "TTP_NORMAL_ACTION_TIME_LIMIT"
LEAST_S, USUAL_S, MOST_S = 30, 180, 1800
_TICK_S = 0.02
FLAG_RESET_S = 5.0  # a busy machine may have the training thread wait that long between two lines
PLACE = "the place where the save_ckpt handler writes"
_REBUILDS = frozenset({RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_LOAD_REBUILD.value})

_log = logging.getLogger("midstep")


def action_limit_s() -> float:
    """Return how long a handler's effect is waited for, by MindIO's variable within MindIO's bounds."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    return float(min(MOST_S, max(LEAST_S, int(given)))) if given.isdigit() else float(USUAL_S)


class HandlerRecovery:
    """Calls the handlers, in the driver thread. `memory_fault`: the training thread has reported one."""

    def __init__(
        self,
        runtime: "Runtime",
        *,
        handlers: Handlers,
        state: "HandledState",
        device: "HandledDevice",
        conversation: "Conversation",
        names: "GroupNames",
    ) -> None:
        self._runtime = runtime
        self._handlers = handlers
        self._state = state
        self._device = device
        self._conversation = conversation
        self._names = names
        self._world: list[RankPart] = []
        self._stopped = self._struck = False
        self._attempt: tuple[int, int, tuple[int, ...]] | None = None  # generation, step and writers of the last dump
        self._not_saved = ""  # why its handler has failed
        self.newcomer = True  # up to the first go
        self.at_barrier = False  # the training thread waits for the commit barrier, with final gradients
        self.memory_fault = False
        self.strategy = RepairStrategy.NONE
        self.step = 0  # by the script's count, with which training continues
        self.loaded_step: int | None = None  # by that count, of the checkpoint that the script has loaded
        self.driver: threading.Thread | None = None
        self.use_device: Callable[[], None] = lambda: None  # of this process, in the thread that calls it
        self.choose: Callable[[int], None] = lambda _: None  # tells the script which checkpoint the others have chosen
        self._handling = False  # the driver is in a handler that may hang in what a peer has left
        self._woken = False  # from it, by the stop handler, after which the device has to be cleaned

    def lifecycle(self) -> Lifecycle:
        """Return the callbacks."""
        return Lifecycle(self._stop, self._clean, self._rebuild, self._repair, self._roll_back)

    def resumed(self) -> None:
        """Take note that training continues."""
        self._stopped = self._struck = self.newcomer = self.memory_fault = False
        self._state.chosen = None

    # --- the callbacks ------------------------------------------------------------------------------------------------

    def _stop(self, recovery: Recovery) -> None:
        recovery.default()
        if threading.current_thread() is not self.driver:
            self._conversation.interrupt()
            self._wake()
        elif not self.at_barrier:  # there it may yet have to apply its update, and hangs in nothing of the device
            self._stop_once()

    def _wake(self) -> None:
        """Have a handler of the driver's raise that waits for a peer which has failed, or is stopped as well."""
        if not self._handling or self._woken:
            return
        self._woken = True
        self.use_device()
        self._handlers.call(HandlerKind.STOP, self._handlers.arguments)

    def _handle(self, kind: HandlerKind, *arguments: Any) -> None:
        """Call a handler that works with peers. Raises CommunicatorAborted if it was ended for the next attempt."""
        self._handling = True
        try:
            self._handlers.call(kind, *arguments)
        except Exception as error:
            if self._woken:
                raise CommunicatorAborted(f"the {kind} handler was stopped: {error}") from error
            raise
        finally:
            self._handling = False

    def _clean_again(self) -> None:
        """Make the device usable again after a handler was ended."""
        if self._woken:
            self._take(self._handlers.call(HandlerKind.CLEAN, False, self._handlers.arguments))
            self._woken = False

    def _stop_once(self) -> None:
        if self._stopped:
            return
        self._await_decision()
        self._call_stop_handler()
        self._conversation.await_parked(action_limit_s())
        self._stopped = True

    def _call_stop_handler(self) -> None:
        """Call it. MindSpore's refuses while a flag is not reset, moments after an update was committed."""
        deadline = time.monotonic() + (FLAG_RESET_S if is_mindspore() and not pauses_after_update() else 0.0)
        while True:
            try:
                self._handlers.call(HandlerKind.STOP, self._handlers.arguments)
            except RuntimeError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TICK_S)
            else:
                return

    def _await_decision(self) -> None:
        """Wait until it is known whether a process is replaced: handlers ask for it (`tft_get_repair_type`)."""
        session, deadline = self._runtime.session, time.monotonic() + self._runtime.settings.orders_s
        while session.stage is SessionStage.TRAINING and not session.quiescing:
            if time.monotonic() > deadline:
                raise OrdersOverdue(f"rank {self._runtime.rank} has waited for the controller to decide")
            time.sleep(_TICK_S)
        self.strategy = RepairStrategy.RECOVER if session.replaces else RepairStrategy.RETRY

    def _clean(self, recovery: Recovery) -> None:
        self._stop_once()  # if it was held at the barrier until now
        if self._handlers.has(HandlerKind.CLEAN):
            self._take(self._handlers.call(HandlerKind.CLEAN, self.memory_fault, self._handlers.arguments))
        elif self.memory_fault:
            self._take(RET_OK)
        self._conversation.cleaned()
        recovery.default()

    def _take(self, result: int | None) -> None:
        """Take the clean handler's answer. Raises RecoveryError if the device cannot be used any more."""
        if result == RET_NO_REBUILD:
            self._device.damage = Damage.TEMPORARY
        elif result not in {None, RET_OK}:
            raise RecoveryError(f"the clean handler answered {result}: the device cannot be used any more")
        elif self.memory_fault:
            self._device.damage, self._struck = Damage.PERSISTENT, True

    def _rebuild(self, recovery: Recovery) -> None:
        self._clean_again()
        recovery.default()
        self._world = self._meet()
        replaced = sorted(each.rank for each in self._world if each.newcomer)
        if self._begins():
            return
        offsets = {each.offset for each in self._world if each.offset is not None}
        if not offsets and self._state.loads_checkpoint:
            offsets = {self._state.likely_offset}
        if not offsets:
            raise RecoveryError(
                "no two updates have been committed yet, so MindIO's handlers have nothing to go back to"
            )
        self._state.agreed(offsets.pop())
        self.strategy = RepairStrategy.RECOVER if replaced else RepairStrategy.RETRY
        if replaced:
            self._names.rename(recovery.generation)
            self._handle(HandlerKind.REBUILD_GROUP, replaced, self._handlers.arguments)
            if not self.newcomer:
                warn_of_stale_links()

    def _repair(self, recovery: Recovery) -> None:
        if self._begins():
            recovery.default()
            return
        self.step = recovery.step + (self._state.offset or 0)
        if self._state.loads_checkpoint:
            self._load_checkpoint()
            recovery.default()
            return
        recovery.default()
        info = repair_of(self._runtime.rank, self._world)
        if info is not None:
            need_rebuild = info["repair_type"] in _REBUILDS
            arguments = self._handlers.arguments
            self._handle(HandlerKind.REPAIR, self.step, need_rebuild, info["dst"], info, arguments)

    def _load_checkpoint(self) -> None:
        """Have the script load its checkpoint, as all ranks do. Raises RecoveryError if it is of another step."""
        kind = RepairType.RT_LOAD_REBUILD if self._struck else RepairType.RT_LOAD_CKPT
        lost = sorted(each.rank for each in self._world if each.newcomer or each.struck)
        types = list(range(max(1, len(self._state.replicas))))
        info = {"type": types, "repair_type": kind.value, "src": [], "dst": [], "rank_list": []}
        self.loaded_step = None
        self._handle(HandlerKind.REPAIR, self.step, self._struck, lost, info, self._handlers.arguments)
        if self.loaded_step != self.step:
            said = "has not said by tft_report_load_ckpt_step of which step"
            if self.loaded_step is not None:
                said = f"has loaded the one of step {self.loaded_step}"
            raise RecoveryError(f"the script was to load its checkpoint of step {self.step}, and {said}")

    def _roll_back(self, recovery: Recovery) -> None:
        if not self._begins():
            self._handle(HandlerKind.ROLLBACK, self.step, self._handlers.arguments)
        recovery.default()  # after the handler, which may draw random numbers

    # --- emergency checkpoints ----------------------------------------------------------------------------------------

    def save(self, order: SaveCheckpoint) -> tuple[str, str]:
        """Have the handlers write, each holder of a shard once, and the last one rename, when all have written."""
        self.strategy = RepairStrategy.DUMP
        if not self._handlers.has(HandlerKind.SAVE_CKPT):
            return "", "the script has registered no save_ckpt handler"
        if self._state.sure_offset is None:
            return "", "no two updates have been committed in this process's world"
        self._clean_again()
        step, attempt = order.step + self._state.sure_offset, (order.generation, order.step, order.writers)
        if self._attempt != attempt:
            self._attempt = attempt
            self._not_saved = self._write(step, order) if order.shards else ""
        error = self._not_saved
        if order.publish and not error:
            error = self._outcome(lambda: self._handlers.rename(step, mindspore=is_mindspore()))
        return PLACE, error

    def _write(self, step: int, order: SaveCheckpoint) -> str:
        info, arguments = dump_of(order.shards, self._state.replicas, order.writers), self._handlers.arguments

        def write() -> None:
            self._put_back_random(order.step)
            self._handlers.call(HandlerKind.SAVE_CKPT, step, info, arguments)

        return self._outcome(write)

    def _put_back_random(self, step: int) -> None:
        """Put back the random numbers of the last commit, which the handler saves: since then a step has drawn some."""
        runtime = self._runtime
        blob = runtime.local_states.read(runtime.rank, step)
        if blob is None:
            raise StateLost(f"rank {runtime.rank} has no copy of its random numbers as of step {step}")
        LocalState(self._state, runtime.device).restore(blob, step)

    def _outcome(self, call: Callable[[], object]) -> str:
        """Call a handler, and return what it raised."""
        try:
            call()
        except Exception as error:  # of the script's own code
            _log.error("an emergency checkpoint has failed", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return ""

    # --- what all ranks know of each other ----------------------------------------------------------------------------

    def _begins(self) -> bool:
        """Return whether the whole world begins: then there is nothing to bring back, and no handler runs.

        Its script loads a checkpoint by itself, but for a process that takes the place of another one meanwhile.
        """
        loads = self._state.loads_checkpoint and any(each.reboots for each in self._world)
        return all(each.newcomer for each in self._world) and not loads

    def _meet(self) -> list[RankPart]:
        runtime, state = self._runtime, self._state
        reboots = self.newcomer and not runtime.connected
        mine = RankPart(
            runtime.rank,
            self.newcomer,
            reboots,
            self._struck,
            state.sure_offset,
            state.moves(),
            state.known_replicas,
            state.chosen,
        )
        heard = _Heard({mine.rank: mine})
        runtime.communicator.barrier(gathering=heard)
        chosen = [each.chosen for each in heard.parts.values() if each.chosen is not None]
        if chosen and state.chosen is None:  # it was stopped before it had found its numbers wrong
            state.chosen = min(chosen)
            self.choose(state.chosen)
        return settled([heard.parts[rank] for rank in range(runtime.world_size)])


class _Heard:
    """See Gathering: what every rank tells, by rank. A rank hears of twice as many in each round of the barrier."""

    def __init__(self, parts: dict[int, RankPart]) -> None:
        self.parts = parts

    def said(self) -> bytes:
        return msgspec.msgpack.encode(list(self.parts.values()))

    def heard(self, said: bytes) -> None:
        self.parts.update((each.rank, each) for each in msgspec.msgpack.decode(said, type=list[RankPart]))
