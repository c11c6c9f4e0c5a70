"""An Ascend NPU, through the calls of torch-npu that `npu_calls.py` lists.

The library is an argument: the real module, or one with the same names and signatures. What each call does was read
from the sources of torch-npu; docs/npu.md says what of it was never run on an NPU.
"""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..protocol.errors import ConfigurationError, RecoveryError
from .base import Damage
from .device_busy import while_busy
from .library_calls import LIBRARY_CALLS
from .npu_calls import require
from .npu_environment import doubts, require_recoverable

if TYPE_CHECKING:
    from ..protocol.types import FaultAction

_log = logging.getLogger("midstep")

QUEUE_THREAD = "acl_thread"
# From a stop to the restart. The thread of torch-npu's queue asks after a call that was aborted whether the device is
# stopped. If it works again by then, the thread takes the abort for an error that it knows no way back from, and ends.
SETTLE_S = 0.05
# In the words that the exception patterns know.
QUEUE_ENDED = (
    "the task queue of device {device} has ended, and what was queued since has not been run. The process exits for "
    "this inner error; an earlier exception says which one it was"
)
# The results of stress_detect, as MindCluster's TaskD tells them apart.
STRESS_RESULTS = {
    0: "OK",
    1: "exec failed",
    2: "find fault rank",
    3: "exec timeout",
    4: "voltage recovery failed",
}
# What check_uce_in_memory returns.
NOTHING, OUTSIDE, TEMPORARY, PERSISTENT = 0, 1, 2, 3


class NpuDevice:
    """See Device. `library` is torch_npu, or a module with its calls."""

    def __init__(self, library: Any, name: str = "npu", version: str = "") -> None:
        """Check the library. Raises ConfigurationError if it lacks a call."""
        require(library, version or str(getattr(library, "__version__", "of unknown version")))
        self.name = name
        self.stopped = False
        self._library = library
        self._device: int | None = None
        self._memory_error = False  # by a memory error, since the last clean
        self._queue = QueueThread()
        self._written: torch.Tensor | None = None  # the number of times that `finish` has written to it
        self._writes = 0
        self._dropped = False  # a write had no effect
        self._not_stopped = ""  # why, in words
        self._stopped_s = 0.0  # when it was stopped last, on the monotonic clock

    @property
    def torch_device(self) -> torch.device:
        """The NPU of this process; the CPU where the library only plays one."""
        return torch.device("npu", self._here()) if self.name == "npu" else torch.device("cpu")

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Check the environment, and take the device whose number is `local_rank`."""
        npu = self._library.npu
        require_recoverable(environment, link_up_s, npu.get_allocator_backend())
        if local_rank == 0:
            for line in doubts(environment, link_up_s):
                _log.warning("%s.", line)
        while_busy(lambda: npu.set_device(local_rank))
        self._device = npu.current_device()
        self._queue.find()

    def stop(self) -> None:
        """Abort the device's queue and its tasks: blocked threads raise FORCE STOP.

        While a thread is inside HCCL that is put off until it comes out (`library_calls.py`).
        """
        LIBRARY_CALLS.stop(self._stop, self.restart)

    def _stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        here = self._here()
        self._library.npu.set_device(here)  # a thread that has chosen no device acts on device 0
        answer = self._library.npu.stop_device(here)
        self._stopped_s = time.monotonic()
        if answer:
            self._not_stopped = f"cannot stop device {here}: stop_device returned {answer}"
            raise RecoveryError(self._not_stopped)

    def memory_error_raised(self) -> None:
        """Have the next clean ask where the device's memory is damaged."""
        self._memory_error = True

    def clean(self) -> Damage:
        """Check the device's memory, if it has raised an error, and restart the device.

        A newer torch-npu never forgets an error: asked again it would find the old one, in memory that is repaired by
        now, or that it has given back since.
        """
        if not self.stopped:
            return Damage.NONE
        npu, device = self._library.npu, self._here()
        if self._dropped or self._queue.ended():
            raise RecoveryError(QUEUE_ENDED.format(device=device))
        if self._not_stopped:  # a stop that was put off fails in another thread, perhaps unseen
            raise RecoveryError(self._not_stopped)
        try:
            answer = npu.check_uce_in_memory(device) if self._memory_error else NOTHING
            if answer == OUTSIDE:
                raise RecoveryError(
                    f"device {device} has an uncorrectable error outside torch's memory, which this process cannot "
                    "repair (check_uce_in_memory returned 1)"
                )
            self.restart()
        except RuntimeError as error:
            raise RecoveryError(f"cannot restart device {device}: {_first_line(error)}") from error
        self._memory_error = False
        if answer == PERSISTENT:
            return Damage.PERSISTENT
        return Damage.TEMPORARY if answer == TEMPORARY else Damage.NONE

    def restart(self) -> None:
        """Have a stopped device take work again."""
        with LIBRARY_CALLS.no_stop():
            if self.stopped:
                time.sleep(max(0.0, self._stopped_s + SETTLE_S - time.monotonic()))
                self._library.npu.restart_device(self._here(), rebuild_all_resources=False)
                self.stopped = False

    def release_unused(self) -> None:
        """Collect garbage, which may hold tensors, and empty the allocator's cache.

        The device may have been stopped again meanwhile: then the next clean does it.
        """
        with LIBRARY_CALLS.inside("groups that nothing holds are dropped"):
            gc.collect()
        try:
            self._library.npu.empty_cache()
        except RuntimeError as error:
            if self.stopped:
                return
            raise RecoveryError(f"cannot empty the cache of device {self._here()}: {_first_line(error)}") from error

    def corrupted(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether torch-npu has marked one of these as unsafe."""
        safe = self._library.npu._recovery.check_npu_tensor_is_safe
        return any(not safe(tensor) for tensor in tensors)

    def mark_safe(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark these as safe in torch-npu."""
        for tensor in tensors:
            self._library.npu._recovery.update_npu_tensor_to_safe(tensor)

    def finish(self) -> None:
        """Synchronize with the device. Raises RuntimeError if its queue has ended, which torch-npu says only once."""
        self._library.npu.synchronize(self._here())
        if self._queue.ended() or not self._has_effect():
            raise RuntimeError(QUEUE_ENDED.format(device=self._here()))

    def _has_effect(self) -> bool:
        """Return whether what is queued now is done: the thread of a queue that has ended may live on.

        One small operator and one small copy; the device is idle, as it has just been synchronized with.
        """
        if self.name != "npu":
            return True
        if self._written is None:
            self._written = torch.zeros(1, dtype=torch.int64, device=self.torch_device)
        self._writes += 1
        self._written.fill_(self._writes)
        self._dropped = self._written.item() != self._writes
        return not self._dropped

    def capture_random(self) -> bytes:
        """Return the state of the generator: seed and offset, which are in host memory."""
        state: torch.Tensor = self._library.npu.get_rng_state(self._here())
        return state.cpu().numpy().tobytes()

    def restore_random(self, state: bytes) -> None:
        """Set the state of the generator."""
        self._library.npu.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), self._here())

    def now_us(self) -> int | None:
        """Record an event, and return its time. Waits for what is queued before."""
        event = self._library.npu.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return int(event.recorded_time())

    def rebuilt(self) -> None:
        """Do nothing: the device holds nothing that depends on communicators."""

    def inject(self, action: "FaultAction") -> None:
        """Inject a fault through the library: only the fake one can."""
        inject = getattr(self._library, "inject", None)
        if inject is None:
            raise ConfigurationError(f"{action} can only be injected on the fake device: `midstep run --device fake`")
        inject(action)

    def actions(self) -> Mapping[str, Callable[[Mapping[str, str]], str]]:
        """Return what MindCluster has ranks do between two steps: switch network cards, test the device under load."""
        return {"switch_nic": self._switch_nic, "stress_test": self._stress_test}

    def _switch_nic(self, arguments: Mapping[str, str]) -> str:
        """Have all communicators use the backup network card of `ranks`, or the first one again. On all ranks."""
        ranks = _numbers(arguments, "ranks")
        use_backup = [number != 0 for number in _numbers(arguments, "use_backup")]
        if len(ranks) != len(use_backup):
            raise ConfigurationError(
                f"switch_nic: {len(ranks)} ranks and {len(use_backup)} values of use_backup: give one for each rank"
            )
        self._library.npu.set_device(self._here())
        if not self._library.npu._comm_switch_nic(ranks, use_backup):
            raise RecoveryError("the network cards were not switched: _comm_switch_nic returned False")
        return "switched"

    def _stress_test(self, arguments: Mapping[str, str]) -> str:
        """Test the cores of the device under load, for minutes."""
        operation = arguments.get("operation", "aic")
        if operation != "aic":
            raise ConfigurationError(
                f"stress_test: operation={operation} is not there. The test of links (hccs) makes process groups of "
                "its own, which a process that replaces one would not have: use operation=aic"
            )
        self._library.npu.set_device(self._here())
        code = int(self._library.npu.stress_detect())
        result = f"{code}-{STRESS_RESULTS.get(code, STRESS_RESULTS[1])}"
        if code:
            raise RecoveryError(result)
        return result

    def _here(self) -> int:
        if self._device is None:
            self._device = self._library.npu.current_device()
        return self._device


class QueueThread:
    """The thread behind torch-npu's task queue, which has a name: whether it still runs.

    After an error that it knows no way back from, torch-npu ends its queue, and one exception says so. Where that is
    lost, nothing else does: operators are queued and dropped, and `synchronize` returns. In about half of the cases
    the thread ends then, too. Without a task queue (TASK_QUEUE_ENABLE=0) there is no such thread.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """Look for threads in `tasks`, a folder as /proc has it."""
        self._tasks = tasks
        self._found: list[Path] = []

    def find(self) -> None:
        """Remember the threads of the name that there are: torch-npu starts them when a device is taken."""
        self._found = [each for each in self._tasks.glob("*/comm") if _name(each) == QUEUE_THREAD]

    def ended(self) -> bool:
        """Return whether one that was there is gone. Cheap: it is asked at each commit."""
        return any(_name(each) != QUEUE_THREAD for each in self._found)


def _name(comm: Path) -> str:
    try:
        return comm.read_text().strip()
    except OSError:
        return ""


def _numbers(arguments: Mapping[str, str], key: str) -> list[int]:
    """Return the numbers of an argument, with commas between them. Raises ConfigurationError."""
    given = arguments.get(key, "")
    try:
        return [int(each) for each in given.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"switch_nic: {key}={given!r}: allowed: numbers with commas between them") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def npu_device() -> NpuDevice:
    """Return the device of a process on a real NPU. Raises ConfigurationError without a usable torch-npu."""
    return _on("npu", "torch_npu")


def fake_device() -> NpuDevice:
    """Return the device of a process on a CPU that behaves like an NPU."""
    return _on("fake", f"{__package__}.fake")


def _on(name: str, library: str) -> NpuDevice:
    try:
        return NpuDevice(import_module(library), name)
    except (ImportError, RuntimeError, OSError) as error:  # torch-npu without CANN fails in its own ways
        raise ConfigurationError(
            f"the device {name} of the policy needs {library}, which cannot be imported here: {error}. "
            "See `midstep doctor`."
        ) from error
