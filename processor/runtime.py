"""All of midstep in one training process: its identity, what it holds, and how orders reach the train thread.

Made once, by the first call into midstep, from the environment that the agent has set.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import SupportsFloat

import msgspec

from ..communicators import communicator_named
from ..communicators.base import GrowingGroups
from ..devices import device_named
from ..protocol import environment as env
from ..protocol import errors
from ..protocol.blackbox import BlackBox
from ..protocol.messages import ArmFault, CallAction, Envelope, FaultReported, Message, Quiesce, Rejoin, Release, Resume
from ..protocol.messages import SaveCheckpoint as Save
from ..protocol.rank_logs import debug_log
from ..protocol.types import (
    ArmedFault,
    Assertion,
    FaultKind,
    FaultLevel,
    FaultReport,
    InjectionPoint,
    JobSettings,
    Rendezvous,
    rank_address,
)
from . import built_ahead
from .actions import ActionCalls
from .callbacks import Callbacks
from .client import Client
from .debug_log import DebugLog, StackDump
from .group_arguments import GroupArguments, GroupOfJob, check_arguments
from .injection_points import InjectionPoints
from .local_state import LocalStateCopies
from .session import Order, Session, SessionStage
from .step_clock import StepClock
from .step_limit import StepLimit

_log = logging.getLogger("midstep")

START_LINK_UP_S = 60.0  # the first link-up: processes of one world may start seconds apart
FLUSH_S = 5.0


class Runtime:
    """One process's identity, threads and channels. `Runtime.current()` is the process's own."""

    _current: "Runtime | None" = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.rank = int(environment["RANK"])
        self.world_size = int(environment["WORLD_SIZE"])
        self.former_size = self.world_size  # ranks, the lowest, that have been at a step: fewer while the world grows
        self.ranks_per_node = int(environment["LOCAL_WORLD_SIZE"])
        self.job, self.node = environment[env.JOB], environment[env.NODE]
        self.connected = environment[env.CONNECTED] == "1"
        self.settings = msgspec.json.decode(environment[env.SETTINGS], type=JobSettings)
        self.device = device_named(self.settings.device)
        self.communicator = communicator_named(self.settings.communicator)
        self.callbacks = Callbacks(self.rank)
        self.report_values: Callable[[Mapping[str, SupportsFloat]], None] = lambda _: None  # of a step, while one is
        self._pid = os.getpid()
        self._stopping = threading.Lock()
        self._shielded = False
        self._changed = threading.Condition()
        self._told_to_wait_s = 0.0  # when the controller last said that it knows of the wait
        self._client: Client | None = None
        self._hold_rank(environment)

    def await_rank(self) -> None:
        """Wait, in a process that was built ahead, until it is to hold its rank. In any other: return at once."""
        if built_ahead.is_waiting():
            environment = built_ahead.await_rank()
            self.black_box.close()
            self._hold_rank(environment)

    def _hold_rank(self, environment: Mapping[str, str]) -> None:
        """Become one incarnation of the rank. A process that is built ahead has no line to its agent before that."""
        self._environment = environment
        self.incarnation, generation = int(environment[env.INCARNATION]), int(environment[env.GENERATION])
        self.early = environment.get(env.EARLY) == "1"
        self.started_s = float(environment[env.STARTED_S])
        self.debug_log = DebugLog(debug_log(environment[env.JOB_DIRECTORY], self.rank, self.incarnation))
        self._stack_dump = StackDump(self.debug_log)
        host, _, port = environment[env.STORE].rpartition(":")
        self.store = Rendezvous(host, int(port), environment.get(env.STORE_SECRET, ""))
        self.black_box = BlackBox.attach(int(environment[env.BLACK_BOX_FD]))
        fds = environment.get(env.HOST_COPY_FDS, "")
        self.host_copy_fds = tuple(map(int, filter(None, fds.split(","))))
        armed = msgspec.json.decode(environment.get(env.FAULTS, "[]"), type=list[ArmedFault])
        self.injection_points = InjectionPoints(self.rank, self.incarnation, armed, self.device.inject)
        self.step_clock = StepClock(self.black_box, self.injection_points, self.incarnation, self._step_limit())
        self.step_clock.generation(generation)
        self.communicator.watch(self.step_clock)
        self.session = Session(self.rank, self.incarnation, generation)
        self._actions = ActionCalls(self.rank, self.device.actions, self.post)
        self.trained_generation = generation  # of the step under way; the session may have heard of the next one
        self.local_states = LocalStateCopies(rank=self.rank, black_box=self.black_box, communicator=self.communicator)
        if not built_ahead.is_waiting():
            self._client = Client(
                job=self.job,
                rank=self.rank,
                incarnation=self.incarnation,
                agent_socket=environment[env.AGENT_SOCKET],
                world_size=self.world_size,
                hear=self._hear,
            )

    def _step_limit(self) -> StepLimit | None:
        stall = self.settings
        if not stall.stall_learns:
            return None
        return StepLimit(factor=stall.stall_factor, grace_s=stall.stall_grace_s, after_steps=stall.stall_after_steps)

    @classmethod
    def current(cls) -> "Runtime | None":
        """Return this process's runtime, or None where it was not started by `midstep run`."""
        if cls._current is None and env.JOB in os.environ:
            missing = [name for name in ("RANK", "WORLD_SIZE", env.AGENT_SOCKET) if name not in os.environ]
            if missing:
                raise errors.NotUnderMidstep(
                    f"{env.JOB} is set and {', '.join(missing)} is not: this process was not started by an agent. "
                    f"Unset {env.JOB}, or start the script with `midstep run`."
                )
            cls._current = cls(os.environ)
            # Not when the train function is over: what the script does then may wait for a peer that is gone, and the
            # control thread is what wakes it.
            atexit.register(cls._current.close)
        return cls._current

    @classmethod
    def running(cls) -> "Runtime | None":
        """Return this process's runtime, if it has one already."""
        return cls._current

    def init_process_group(self, given: GroupArguments) -> None:
        """Make torch's default group: seated where the whole world starts together, without peers otherwise.

        `given` is what the script asks for. Raises ConfigurationError if it contradicts the job, or if the device, as
        it is set up here, could not be recovered.
        """
        environment, settings = self._environment, self.settings
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        job = GroupOfJob(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=local_rank,
            communicator=settings.communicator,
            device=settings.device,
            master=f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}",
            stall_grace_s=settings.stall_grace_s,
        )
        check_arguments(given, job)
        if settings.grows_in_place:
            assert isinstance(self.communicator, GrowingGroups)  # the launcher has refused all others
            self.communicator.only_whole_groups()
        self.device.prepare(local_rank, environment, settings.link_up_s)
        self.communicator.init(
            rank=self.rank,
            world_size=self.world_size,
            generation=self.session.generation,
            store=self.store if self.connected else None,
            collective_s=settings.collective_s if given.timeout is None else given.timeout.total_seconds(),
            link_up_s=START_LINK_UP_S,
        )

    def grow(self, world_size: int) -> None:
        """Be in a world of so many ranks from the next link-up on, and let the script read so. In rebuild."""
        assert isinstance(self.communicator, GrowingGroups)
        self.world_size = world_size
        self.communicator.grow(world_size)
        for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE"):
            os.environ[name] = str(world_size)
        os.environ["GROUP_WORLD_SIZE"] = str(-(-world_size // self.ranks_per_node))

    @property
    def generation(self) -> int:
        """The latest generation that this process knows."""
        return self.session.generation

    def finish_step(self) -> None:
        """Wait until the device has done the whole step. Raises CommunicatorAborted if the step's collectives were cut.

        The queue of a GPU drains when its collectives are aborted, as if they were done. Their scope has ended by then,
        and no rank can have entered the commit barrier that this one has not.
        """
        self.device.finish()
        reason = self.communicator.failed
        if reason is not None:
            raise errors.CommunicatorAborted(f"the step cannot be finished: {reason}")

    def shield(self) -> None:
        """Have the device not be stopped from now on: an update has begun, and must not end halfway.

        Raises CommunicatorAborted if it was stopped just before.
        """
        with self._stopping:
            if self.device.stopped:
                raise errors.CommunicatorAborted("the device was stopped before the update began")
            self._shielded = True

    def unshield(self) -> None:
        """Allow the device to be stopped again: the update is over."""
        with self._stopping:
            self._shielded = False

    def stop(self, reason: str | None) -> None:
        """Run **stop**, in any thread: what is in flight is aborted, and a thread that waits for it raises.

        During an update only the communicators are aborted: it has no collectives in it, ends by itself, and is
        followed by a stop. `reason` None: not the communicators, whose last traffic others still wait for. Raises
        RecoveryError.
        """
        with self._stopping:
            if not self._shielded:
                self.callbacks.run(InjectionPoint.STOP, self.generation, lambda: self._abort(reason))
            elif reason is not None:
                self.communicator.abort(reason)

    def _abort(self, reason: str | None) -> None:
        if reason is not None:
            self.communicator.abort(reason)
        self.device.stop()

    def interrupted(self) -> bool:
        """Return whether the controller wants the train thread to stop."""
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        """Return whether the train thread may begin a step; False at a boundary at which all ranks stop."""
        if self.session.boundary is None:  # asked before every step: the lock is for the rare case
            return True
        with self._changed:
            return self.session.begins(step)

    def wait_order(self) -> Order:
        """Wait, in the train thread, for the controller's next order.

        Raises OrdersOverdue after `orders_s`: a process without a controller should not stay for ever.
        """
        began_s = time.monotonic()
        with self._changed:
            while True:
                order = self.session.take_order()
                if order is not None:
                    return order
                self._stack_dump.disarm()
                left_s = max(began_s, self._told_to_wait_s) + self.settings.orders_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise errors.OrdersOverdue(
                        f"rank {self.rank} has waited {self.settings.orders_s:g} s for the controller, in stage "
                        f"{self.session.stage}. See `midstep status`; deadlines.orders_s in the policy sets the wait."
                    )

    def post(self, body: Message) -> None:
        """Report to the controller; returns at once."""
        if self._client is None:
            raise errors.RecoveryError(
                f"{type(body).__name__} cannot be reported: this process does not hold rank {self.rank} yet"
            )
        self._client.post(body, self.session.generation)

    def report_fault(
        self,
        kind: FaultKind,
        detail: str,
        level: FaultLevel = FaultLevel.SOFTWARE,
        *,
        mendable: bool = False,
        trusted_step: int | None = None,
        fault_id: str = "",
        assertion: Assertion = Assertion.ONCE,
        code: str | None = None,
    ) -> None:
        """Report a fault of this rank. `mendable`: this process stays alive and can mend it. See FaultReport."""
        report = FaultReport(
            kind=kind,
            at_s=time.time(),
            seen_by=rank_address(self.rank),
            detail=detail,
            rank=self.rank,
            node=self.node,
            # All ranks report a rule that is broken. Those that have been stopped for it already mean the same step.
            generation=self.trained_generation if kind is FaultKind.RULE else self.session.generation,
            incarnation=self.incarnation,
            level=level,
            mendable=mendable,
            trusted_step=trusted_step,
            fault_id=fault_id,
            assertion=assertion,
            code=code,
        )
        self.post(FaultReported(report))

    def report_not_stopped(self, error: Exception) -> None:
        """Report why stop or clean has failed: this process has to end."""
        if isinstance(error, errors.CallbackFailed):
            _log.error("%s", error, exc_info=error)
            self.report_fault(FaultKind.EXCEPTION, str(error))
        elif isinstance(error, errors.MidstepError):
            self.report_fault(FaultKind.DEVICE, str(error), FaultLevel.RESTART_BUSINESS)
        else:
            _log.error("stop has failed", exc_info=error)
            self.report_fault(FaultKind.EXCEPTION, f"stop has failed: {type(error).__name__}: {error}")

    def flush(self) -> None:
        """Give what was posted a few seconds to arrive, before the process ends."""
        if self._client is not None:
            self._client.flush(FLUSH_S)

    def close(self) -> None:
        """End the control thread and its line to the agent, when the process exits, whatever the way. Idempotent.

        Groups, device and black box are not touched: threads of torch use them up to the last moment, and they end with
        the process. A process that was forked from this one closes nothing, as nothing is its own.
        """
        if os.getpid() == self._pid:
            if self._client is not None:
                self._client.close()
            self._stack_dump.close()

    def _watch(self, order: Order) -> None:
        """Have the stacks dumped if the train thread does not do what it is ordered to. A script may take its time."""
        now = self.session.quiescing and self.session.stage is not SessionStage.BOOTING
        if now or isinstance(order, Rejoin):
            self._stack_dump.arm()
        elif isinstance(order, Resume):
            self._stack_dump.disarm()

    def _hear(self, envelope: Envelope) -> None:
        """Take in a command (control thread)."""
        body = envelope.body
        if isinstance(body, ArmFault):
            self.injection_points.arm(body.fault)
            return
        if isinstance(body, CallAction):
            with self._changed:
                held = self.session.stage is SessionStage.PARKED and not self.session.quiescing
            self._actions.call(body, held=held)
            return
        if not isinstance(body, Quiesce | Rejoin | Resume | Release | Save):
            return
        with self._changed:
            heard = self.session.hear(body)
            if heard.taken:
                self._watch(body)
            elif isinstance(body, Quiesce) and body.generation == self.session.generation:
                self._told_to_wait_s = time.monotonic()  # it is parked, and held so
            self._changed.notify_all()
        if heard.abort:
            try:
                self.stop(f"generation {body.generation} is being opened")
            except Exception as error:  # of a device or a library: the train thread may be stuck for good
                self.report_not_stopped(error)
