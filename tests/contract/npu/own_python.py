"""Runs torch-npu's own Python on midstep's process groups: what it does before and around each call into its library.

Runs in a process of its own: `own_python.py WHEEL`. The library below is a stand-in that writes down what is called;
the functions of the wheel are real, and so are torch's groups. torch is told that there is a device of the name npu.
"""

import ast
import logging
import sys
import types
import zipfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d
from torch.utils.backend_registration import rename_privateuse1_backend

from midstep.communicators.device_group import DeviceGroup
from midstep.communicators.hccl import CollectiveLibrary, HcclCommunicator, build_backend

HELPER = "_new_process_group_helper"
HELPER_HOMES = ("torch_npu/_compat/distributed.py", "torch_npu/distributed/distributed_c10d.py")
called: list[str] = []


class Backend(dist.ProcessGroupGloo):
    """Stands for ProcessGroupHCCL: the methods that torch-npu's Python calls on it."""

    def set_watchdog_status(self, status: int) -> None:
        called.append(f"watchdog {status}")

    def clear_workmeta_list(self) -> None:
        called.append("clear")

    def resume_hccl_comm(self, device: int) -> None:
        called.append("resume")

    def abort_hccl_comm(self, reason: str) -> None:
        called.append(f"abort {reason}")

    def _delete_tcpstore_key(self) -> None:
        called.append("delete keys")

    def batch_isend_irecv(self, kinds: list[str], tensors: list[Any], ranks: list[int]) -> None:
        called.append(f"batch {kinds} {ranks}")


def make_backend(options: Any, _: Any) -> Backend:
    """Make what torch-npu would, for torch's registry of backends."""
    return Backend(options.store, options.group_rank, options.group_size, timedelta(seconds=5))


def take(wheel: zipfile.ZipFile, path: str, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return functions of a file of the wheel, as they are written there, in a namespace of what they need."""
    tree = ast.parse(wheel.read(path).decode())
    found: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    space = dict(given)
    exec(compile(ast.Module(found, []), path, "exec"), space)
    return {name: space[name] for name in names if name in space}


def patch_torch(wheel: zipfile.ZipFile) -> bool:
    """Put torch-npu's way of making groups in place of torch's, where this release has one; say whether it has."""
    for path in HELPER_HOMES:
        if path in wheel.namelist():
            given = {**vars(c10d), "dist_c10d": c10d, "c10d": c10d, "torch": torch}
            taken = take(wheel, path, (HELPER,), given)
            if taken:
                c10d._new_process_group_helper = taken[HELPER]
                return True
    return False


def batches(wheel: zipfile.ZipFile, group: DeviceGroup) -> None:
    """Have torch-npu make a batch of a send and a receive, in both of its ways; print what came of it.

    There is no memory of a device here, so the tensors only say that they are of one.
    """
    tensor = types.SimpleNamespace(device=torch.device("npu", 0))
    for machine in ("Ascend310P3", "Ascend910B2"):
        given = {
            **vars(c10d),
            "npu": types.SimpleNamespace(get_device_name=lambda machine=machine: machine),
            "_CANN_VERSION": "8",
            "FakeProcessGroup": types.SimpleNamespace,
            "_check_p2p_op_list": lambda operators: None,
        }
        make = take(wheel, "torch_npu/distributed/distributed_c10d.py", ("_batch_isend_irecv",), given)
        called.clear()
        two = [types.SimpleNamespace(op=op, tensor=tensor, peer=0, group=group) for op in (dist.isend, dist.irecv)]
        try:
            make["_batch_isend_irecv"](two)
        except RuntimeError as error:  # torch's, of a library that cannot do it
            called.append(str(error))
        print(machine, called)


def main(wheel: zipfile.ZipFile) -> None:
    """Make groups, stop and restart the device, resume and rebuild; print what was called."""
    rename_privateuse1_backend("npu")
    torch.npu = types.SimpleNamespace(current_device=lambda: 0)  # type: ignore[attr-defined]
    dist.Backend.register_backend("hccl", make_backend, extended_api=True, devices=["npu"])
    print("helper", patch_torch(wheel))
    core = types.SimpleNamespace(_npu_stopDevice=lambda device: 0, _npu_restart_device=lambda device: None)
    npu = types.SimpleNamespace(_lazy_init=lambda: None, current_device=lambda: 0, set_device=lambda device: None)
    library = types.SimpleNamespace(_C=core, npu=npu)
    given = {
        **vars(c10d),
        "torch": torch,
        "torch_npu": library,
        "_pg_map": c10d._pg_map,
        "dist_c10d": c10d,
        "logger": logging.getLogger("torch_npu"),
        "_except_handler": types.SimpleNamespace(set_force_stop_exception=lambda on: None),
        "WATCHDOG_STATUS_RUN": 1,
        "WATCHDOG_STATUS_STOP": 2,
    }
    device = take(wheel, "torch_npu/npu/_recovery.py", ("stop_device", "restart_device"), given)
    reinit = take(wheel, "torch_npu/distributed/distributed_c10d.py", ("reinit_process_group",), given)
    communicator = HcclCommunicator(CollectiveLibrary(library, "hccl", "npu"))
    communicator.init(rank=0, world_size=1, generation=1, store=None, collective_s=5, link_up_s=5)
    device["stop_device"](0)
    print("unconnected", called)
    sub = dist.new_group([0])
    assert isinstance(sub, DeviceGroup)
    assert isinstance(c10d._get_default_group(), DeviceGroup)
    for number, group in enumerate(communicator._groups):
        build_backend(communicator._library, group, f"group{number}", HashStore(), communicator._scope)
    for name, call in (
        ("stop", lambda: device["stop_device"](0)),
        ("restart", lambda: device["restart_device"](0, rebuild_all_resources=False)),
        ("resume", lambda: reinit["reinit_process_group"](None, rebuild_link=False)),
        ("rebuild", lambda: reinit["reinit_process_group"](sub, rebuild_link=True)),
    ):
        called.clear()
        call()  # type: ignore[no-untyped-call]
        print(name, called)
    batches(wheel, sub)


if __name__ == "__main__":
    main(zipfile.ZipFile(sys.argv[1]))
