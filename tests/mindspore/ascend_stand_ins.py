"""What MindSpore has on Ascend only, for its own `Model.train` with `TrainFaultTolerance` on a CPU.

The device is one that can be stopped. Its collectives go through files, which can be stopped and made again: each rank
leaves its part, and waits for those of the others. What MindSpore calls is replaced by name, and noted.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.train.callback._train_fault_tolerance as tolerance
import mindspore.utils.utils as handle
import numpy as np
from mindspore import context, ops

FORCE_STOP = "ForceStopError occurs when execute. FORCE STOP"
LIMIT_S = 100.0
# What is called on the device, and returns nothing that is used.
_CALLED = ("_repair_device", "_finalize_comm", "_pre_launch_send_recv", "set_is_arf", "_reset_opt_event_info")
_CALLBACKS = ("stop", "clean", "repair")


class Device:
    """One rank's device and its links."""

    def __init__(self, records: Path, rank: int, world: int, life: int) -> None:
        self.rank, self.world, self.life = rank, world, life
        self._records, self._folder = records, records / "links"
        self._folder.mkdir(exist_ok=True)
        self._stopped = threading.Event()
        self._members = ""
        self.step = 0
        self.before_copy: Callable[[], None] = lambda: None
        _write(self._folder / f"life.{rank}", np.array(life))

    def stop(self, *_: Any) -> None:
        """Have everything on the device raise."""
        self._stopped.set()

    def clean(self) -> None:
        """Let it work again."""
        self._stopped.clear()

    def link(self) -> None:
        """Take as members the processes that are there now."""
        lives = [int(self._await(self._folder / f"life.{rank}")) for rank in range(self.world)]
        self._members = "-".join(map(str, lives))

    def allreduce(
        self, array: np.ndarray[Any, Any], what: str, ranks: Sequence[int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Add up over ranks, in their order; None: over all."""
        _write(self._place(what, self.rank), array)
        parts = [self._await(self._place(what, rank)) for rank in (range(self.world) if ranks is None else ranks)]
        total: np.ndarray[Any, Any] = np.sum(parts, axis=0, dtype=array.dtype)
        return total

    def send(self, array: np.ndarray[Any, Any], what: str) -> None:
        """Leave an array of this step for the rank that receives it."""
        _write(self._place(what, self.rank), array)

    def receive(self, what: str, source: int) -> np.ndarray[Any, Any]:
        """Wait for an array of this step from another rank."""
        return self._await(self._place(what, source))

    def _place(self, what: str, rank: int) -> Path:
        if not self._members:
            self.link()
        return self._folder / f"{self._members}.{self.step}.{what}.{rank}"

    def send_recv(self, parameters: list[ms.Parameter], source: int, destination: int) -> int:
        """Copy all parameters from one rank to another one."""
        self.before_copy()
        for index, parameter in enumerate(parameters):
            place = self._folder / f"{self._members}.copy.{destination}.{index}"
            if self.rank == source:
                _write(place, parameter.asnumpy())
            else:
                ops.assign(parameter, ms.Tensor(self._await(place).reshape(parameter.shape), parameter.dtype))
        return 0

    def note(self, what: str, *values: Any) -> None:
        """Write down a call."""
        with (self._records / f"handlers.{self.rank}.{self.life}").open("a") as file:
            print(json.dumps([what, *values]), file=file, flush=True)

    def _await(self, place: Path) -> np.ndarray[Any, Any]:
        deadline = time.monotonic() + LIMIT_S
        while not place.exists():
            if self._stopped.is_set() or time.monotonic() > deadline:
                raise RuntimeError(FORCE_STOP)
            time.sleep(0.002)
        if self._stopped.is_set():
            raise RuntimeError(FORCE_STOP)
        found: np.ndarray[Any, Any] = np.load(place)
        return found


def _write(place: Path, array: np.ndarray[Any, Any]) -> None:
    beside = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
    with beside.open("wb") as file:
        np.save(file, array)
    beside.rename(place)


class AllReduce(ops.Primitive):  # type: ignore[misc]
    """In place of `ops.AllReduce`, of the optimizer's flag."""

    device: Device

    def __init__(self) -> None:
        super().__init__("StandInAllReduce")

    def __call__(self, flag: Any) -> Any:
        return ms.Tensor(AllReduce.device.allreduce(flag.asnumpy(), "flag"))


class TensorReport(ops.Primitive):  # type: ignore[misc]
    """In place of the kernel that announces an update: it finds the library as MindSpore's C++ does, and calls it."""

    def __init__(self) -> None:
        super().__init__("StandInTensorReport")

    def __call__(self, name: str, flag: Any) -> Any:
        if "optimizer_end" not in self.attrs:
            import mindio_ttp

            home = Path(mindio_ttp.__path__[0])
            try:
                ctypes.CDLL(str(home / "framework_ttp" / "libttp_framework.so"))
                library = ctypes.CDLL(str(home / "mindspore_api" / "libttp_c_api.so"))
            except OSError:  # MindSpore warns, and continues without
                return flag
            if library.MindioTtpSetOptimStatusUpdating(ctypes.c_int64(-1)) != 0:
                raise RuntimeError(FORCE_STOP)
        return flag


class _Ascend:
    """The module `mindspore.context`, on a machine that has NPUs."""

    def __init__(self, parallel_mode: str) -> None:
        self._parallel_mode = parallel_mode

    def __getattr__(self, name: str) -> Any:
        return getattr(context, name)

    @staticmethod
    def get_context(key: str) -> Any:
        return {"device_target": "Ascend", "device_id": 0}.get(key) or context.get_context(key)

    def get_auto_parallel_context(self, key: str) -> Any:
        return self._parallel_mode if key == "parallel_mode" else context.get_auto_parallel_context(key)


class _CollectiveManager:
    """In place of MindSpore's, which has no communicator to resume."""

    @classmethod
    def get_instance(cls) -> "_CollectiveManager":
        return cls()

    def resume_hccl_comm(self) -> None:
        """Do nothing: files need no resume."""


class _Operators:
    """The module `mindspore.ops`, with links."""

    AllReduce = AllReduce

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


def install(device: Device, parallel_mode: str) -> None:
    """Replace by name what MindSpore's files for fault tolerance take from its library, and note their callbacks."""
    AllReduce.device = device
    module: Any = tolerance
    handle.context = module.context = _Ascend(parallel_mode)
    module.ops, module.TensorReport = _Operators(), TensorReport
    module.direct_copy_to_host = lambda parameter: int(parameter.asnumpy().item())
    module._stop_device, module.clean_tdt_channel = device.stop, device.clean
    module._rebuild_group, module.send_recv = device.link, device.send_recv
    module.CollectiveManager = _CollectiveManager
    module.reset_params = lambda parameters: 0
    module._tft_sem_enable = module._tft_sem_post = module._reset_snapshot_state = lambda: None
    for name in _CALLED:
        setattr(module, name, lambda *_: None)
    _note_callbacks(device, module)


def _note_callbacks(device: Device, module: Any) -> None:
    def noting(what: str, call: Any, values: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            device.note(what, arguments[-1].tft.tft_get_repair_type(), *values(*arguments))
            return call(*arguments)

        return noted

    module._tft_stop_callback = noting("stop", module._tft_stop_callback, lambda args, ctx: [])
    module._tft_clean_callback = noting("clean", module._tft_clean_callback, lambda uce, args, ctx: [uce])
    module._tft_rebuild_groups = noting("rebuild_group", module._tft_rebuild_groups, lambda ranks, args, ctx: [ranks])
    module._tft_repair_callback = noting(
        "repair",
        module._tft_repair_callback,
        lambda step, rebuild, ranks, info, args, ctx: [step, rebuild, ranks, info],
    )
