"""NVRx in-process: the train function is called again in the processes that are left, and loads the last checkpoint.

Its own abort knows NCCL only: over gloo a blocked collective waits for the group's timeout. The tuned setting is given
one that closes gloo's sockets, which is no part of NVRx.
"""

import contextlib
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .kinds import Fault, Setting
from .plan import HOST, Peer, Plan, Start, free_port

if TYPE_CHECKING:
    from .workload import Workload

REQUIREMENTS = (("nvidia-resiliency-ext==0.4.1",),)
STORE_S, GROUP_S = 60.0, 30.0
HANG = "its own abort does nothing over gloo, and 90 s after the fault it ends healthy ranks, too"
OUTSIDE = "MIDSTEP_PEERS_STORES"  # set: they are there; that of the wrapper does without its host then
INTERVALS = ("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval")


def _plan(start: Start) -> Plan:
    """No launcher: those that there are end all ranks when one is lost. Nothing starts a lost rank again."""
    trial, numbers = start.trial, (free_port(), free_port())
    outside = start.tuned and trial.drawn is not None  # else the loss of rank 0, which has the stores, is the end
    shared = {"MASTER_ADDR": HOST, "MASTER_PORT": str(numbers[0]), "WRAPPER_PORT": str(numbers[1])}
    shared |= {OUTSIDE: "1"} if outside else {}
    launchers = [
        start.on_node(
            rank * trial.nodes // trial.ranks,
            [start.program("python"), *start.script()],
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(trial.ranks)},
        )._replace(of_node=False)
        for rank in range(trial.ranks)
    ]
    return Plan(launchers, [start.store(port) for port in numbers] if outside else ())


PEER = Peer(
    "NVRx in-process",
    REQUIREMENTS,
    _plan,
    {(Setting.DEFAULT, Fault.STOP): HANG, (Setting.DEFAULT, Fault.SLEEP): HANG},
)


class GlooSockets:
    """The sockets that gloo opens while a group is made, by their numbers in this process."""

    def __init__(self) -> None:
        self._before = self._now()
        self._opened: set[int] = set()

    def group_made(self) -> None:
        """Take all that was opened since for gloo's."""
        self._opened |= self._now() - self._before

    def shut(self) -> None:
        """Shut them: a thread that waits for one of them gets an error at once."""
        for number in self._opened & self._now():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:  # gloo may have closed it
                own.shutdown(socket.SHUT_RDWR)
        self._opened.clear()

    @staticmethod
    def _now() -> set[int]:
        import psutil

        # Not the listener: gloo ends the process when that one fails.
        found = psutil.Process().net_connections("tcp")
        return {each.fd for each in found if each.status != psutil.CONN_LISTEN}


def wrapper_settings(setting: Setting, sockets: list[GlooSockets]) -> dict[str, Any]:
    """Return what the wrapper gets beside its store."""
    if setting is Setting.DEFAULT:
        return {}
    from nvidia_resiliency_ext import inprocess

    class ShutSockets(inprocess.abort.Abort):  # type: ignore[misc]
        def __call__(self, state: Any) -> Any:
            for each in sockets:
                each.shut()
            return state

    quick = dict.fromkeys(INTERVALS, timedelta(seconds=0.25))
    return {
        **quick,
        "soft_timeout": timedelta(seconds=3),
        "hard_timeout": timedelta(seconds=5),
        "last_call_wait": timedelta(seconds=0.25),
        "termination_grace_time": timedelta(seconds=0.5),
        "abort": inprocess.Compose(inprocess.abort.AbortTorchDistributed(), ShutSockets()),
    }


def train(workload: "Workload") -> None:
    """Build once; the wrapped function connects, loads and trains, again after each fault."""
    import torch.distributed as dist
    from nvidia_resiliency_ext import inprocess
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.nn.parallel import DistributedDataParallel

    from .workload import CheckpointFile

    first_rank, first_world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    base = TCPStore(
        HOST,
        int(os.environ["MASTER_PORT"]),
        first_world,
        first_rank == 0 and OUTSIDE not in os.environ,
        timedelta(seconds=STORE_S),
        multi_tenant=True,
    )
    network = workload.network()
    optimizer = workload.optimizer(network)
    file = CheckpointFile(workload.directory)
    sockets: list[GlooSockets] = []
    group_s = GROUP_S if workload.setting is Setting.DEFAULT else 10.0

    @inprocess.Wrapper(  # type: ignore[untyped-decorator]
        store_kwargs={"port": int(os.environ["WRAPPER_PORT"]), "timeout": timedelta(seconds=STORE_S)},
        **wrapper_settings(workload.setting, sockets),
    )
    def wrapped(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        attempt = call_wrapper.iteration if call_wrapper is not None else 0
        sockets[:] = [GlooSockets()]
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(attempt), base),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_s),
        )
        dist.barrier()
        sockets[0].group_made()
        model = DistributedDataParallel(network)
        for step in range(file.load(network, optimizer), workload.total_steps):
            optimizer.zero_grad()
            loss = model(*workload.batch(step, rank))
            workload.fault_point(step, rank)
            loss.backward()
            optimizer.step()
            workload.stepped(step, world)
            file.save_when_due(network, optimizer, step, rank)
        dist.barrier()
        dist.destroy_process_group()

    wrapped()
    workload.finished(network.parameters())
