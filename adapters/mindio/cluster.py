"""MindSpore's own cluster, in which ranks of `midstep run --mindio` meet when they call its `init`.

MindSpore's launcher starts a scheduler, and gives each process a role, the scheduler's address and its number. midstep
is in that launcher's place: an agent runs the scheduler, which leaves its address in the rendezvous store, and each
rank reads it there before the program begins. With recovery switched on MindSpore's processes wait for a scheduler that
is gone, and register with the next one; and a process that replaces another one is let in under its number.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from ...communicators.key_value_store import KeyValueClient
from ...communicators.libraries import HAS_TORCH
from ...protocol import environment as names
from ...protocol.errors import AgentError
from .values import is_mindspore

ROLE = "MS_ROLE"
HOST, PORT = "MS_SCHED_HOST", "MS_SCHED_PORT"
SETTLED = (ROLE, HOST, "MS_SIMULATION_LEVEL")  # with one of them set, the user runs the scheduler, or there is none
SCHEDULER, WORKER = "MS_SCHED", "MS_WORKER"
MCCL = "mccl"
RECOVERY = {"MS_ENABLE_RECOVERY": "1"}
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
FIND_S = 30.0  # for a scheduler to be found, and to answer: it may be starting. Less than a rank has to start
RETRY_S = 0.2
NO_MINDSPORE = (
    "MindSpore cannot be imported by the Python of midstep on the node of rank 0, so its scheduler is not started, and "
    "MindSpore's `init` will not find one. Install midstep where MindSpore is, or start a scheduler and set MS_ROLE, "
    "MS_SCHED_HOST and MS_SCHED_PORT."
)
STARTED_AGAIN = (
    "MindSpore's scheduler was started again in this world. In PyNative mode, and on CPUs, MindSpore's `init` now "
    "waits for addresses that went with the one before: this process will not be ready in time, and all start again."
)
STALE_LINKS = (
    "MindSpore's collectives on CPUs (MCCL) keep their links to the process that was replaced, and cannot be set up "
    "again. The next one fails after MS_CPU_COMM_OP_TIMEOUT (30 s), and its process with it."
)
_log = logging.getLogger("midstep")
# MindSpore's launcher sets these for scripts that ask for them.
_NUMBERS = {"MS_NODE_ID": "RANK", "MS_WORKER_NUM": "WORLD_SIZE"}
_OF_A_TABLE = {"RANK_ID": "RANK", "RANK_SIZE": "WORLD_SIZE", "DEVICE_ID": "LOCAL_RANK"}


class SchedulerPlace(msgspec.Struct, frozen=True):
    """Where the scheduler of a world is. `again`: it is not the first one."""

    host: str
    port: int
    again: bool = False


def needs_scheduler(environment: Mapping[str, str]) -> bool:
    """Return whether the ranks of a job with this environment meet at a scheduler that midstep has to run."""
    wanted = environment.get(names.MINDIO) == "1" and is_mindspore(environment)
    return wanted and not any(environment.get(name) for name in SETTLED)


def scheduler_variables(environment: Mapping[str, str], host: str, port: int) -> dict[str, str]:
    """Return the environment of the scheduler, from that of rank 0."""
    numbers = {"MS_WORKER_NUM": environment["WORLD_SIZE"], "RANK_ID": "0"}
    return {**RECOVERY, **environment, **numbers, ROLE: SCHEDULER, HOST: host, PORT: str(port)}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what MindSpore's launcher sets for a rank, where it is not set.

    Waits for the address of the scheduler. Raises AgentError when there is none, or it does not answer. Warns where
    MindSpore is not to be found by the Python of midstep: then there is no scheduler, and ranks get no role.
    """
    sources = {**_NUMBERS, **(_OF_A_TABLE if is_mindspore(environment) else {})}
    variables = {name: environment[source] for name, source in sources.items() if name not in environment}
    if not needs_scheduler(environment):
        return variables
    host, port = find(environment)
    if not host:
        _log.warning(NO_MINDSPORE)
        return variables
    recovery = {name: value for name, value in RECOVERY.items() if name not in environment}
    return {**variables, **recovery, ROLE: WORKER, HOST: host, PORT: port}


def find(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the address of the scheduler of this world; empty: there is none. Raises AgentError.

    Where the world starts together it need not answer yet. A process that replaces another one tries it: the machine
    of the scheduler may be lost, and MindSpore would try for half an hour.
    """
    deadline = time.monotonic() + FIND_S
    try:
        place = msgspec.msgpack.decode(_store(environment).get(_key(environment)), type=SchedulerPlace)
    except Exception as error:  # of torch's store, or of midstep's
        raise AgentError(
            f"the address of MindSpore's scheduler is not in the rendezvous store at {environment[names.STORE]}: "
            f"{error}. The log of the agent on rank 0's node says why the scheduler did not start; where its machine "
            "is lost, all ranks have to start again."
        ) from error
    if place.host and environment.get(names.CONNECTED) != "1":
        _await_answer(place, deadline)
        if place.again:
            _log.warning(STARTED_AGAIN)
    return place.host, str(place.port)


def _await_answer(place: SchedulerPlace, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise AgentError(
                    f"MindSpore's scheduler at {place.host}:{place.port} does not answer: {error}. Where its machine "
                    "is lost, all ranks have to start again."
                ) from error
            time.sleep(RETRY_S)
        else:
            return


def announce(environment: Mapping[str, str], *, again: bool = False) -> bool:
    """Leave the scheduler's address in the rendezvous store; return whether this Python has MindSpore for one.

    `again`: it is not the first one of its world. Raises what the store does.
    """
    is_there = find_spec("mindspore") is not None
    place = SchedulerPlace(environment[HOST] if is_there else "", int(environment[PORT]), again)
    _store(environment).set(_key(environment), msgspec.msgpack.encode(place))
    return is_there


def schedule(*, again: bool) -> None:
    """Be the scheduler, by this process's environment, until all ranks have left. Raises what MindSpore does."""
    if announce(os.environ, again=again):
        mindspore = import_module("mindspore")
        mindspore.set_device("CPU")  # it needs no device, and must take none from a rank
        mindspore.communication.init()


def warn_of_stale_links() -> None:
    """Warn in a process that stays while another one is replaced, if MindSpore's groups are those for CPUs."""
    management = sys.modules.get("mindspore.communication.management")
    backend = management.GlobalComm if management is not None else None
    if backend is not None and backend.INITED and str(backend.BACKEND) == MCCL:
        _log.warning(STALE_LINKS)


def _store(environment: Mapping[str, str]) -> Any:
    client = import_module("torch.distributed").TCPStore if HAS_TORCH else KeyValueClient
    host, _, port = environment[names.STORE].rpartition(":")
    return client(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=FIND_S))


def _key(environment: Mapping[str, str]) -> str:
    """Return the key of the address. A world that starts again meets at another scheduler."""
    return f"midstep/{environment[names.JOB]}/restart{environment[RESTARTS]}/mindspore"
