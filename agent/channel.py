"""Messages between an agent, its fork server and the processes it forks, and the socket pair that carries them.

The sockets keep messages whole. The bytes of a message lie in a memfd whose descriptor is passed first, so that an
environment of any size fits. The other descriptors of the message follow it.

A rank's program runs in an environment with torchrun's variables, so that scripts need no change, and midstep's own.
"""

import os
import socket
from collections.abc import Mapping

import msgspec

from ..protocol import environment as names
from ..protocol.errors import AgentError
from ..protocol.messages import CheckNode, StartProcess
from ..protocol.rank_logs import error_file
from ..protocol.types import JobSettings, JobSpec

MAX_FDS = 8
CHANNEL_FD = 3  # where a spawned process finds its end
_encoder = msgspec.msgpack.Encoder()
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What torchrun sets unless the user has.
DEFAULTS = {**dict.fromkeys(THREAD_LIMITS, "1"), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# Where `record` of torch.distributed.elastic writes an exception of the script; each process of a rank has its own.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ROLE = "default"
ROLE_NAME = "ROLE_NAME"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class ForkProcess(msgspec.Struct, frozen=True, tag=True):
    """Ask the fork server to fork an idle process that listens on the passed socket.

    `backends`: it imports torch's device backends before it says that it is idle.
    """

    backends: bool = False


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Ask the fork server to import these modules too, looking in `paths` as the user's script will."""

    modules: tuple[str, ...]
    paths: tuple[str, ...]


class ModulesImported(msgspec.Struct, frozen=True, tag=True):
    """From the fork server: it has imported its modules. Any other thread makes a fork unsafe."""

    threads: tuple[str, ...]  # names of all but the first
    failed: tuple[str, ...] = ()  # what could not be imported, and why


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Ask a fork server, an idle process or a store to answer with Pong."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ping. A store's process queries the store before it answers."""


class ProcessIdle(msgspec.Struct, frozen=True, tag=True):
    """From an idle process: it is the agent's child, dies with the agent, and waits for its assignment."""

    pid: int


class RunProgram(msgspec.Struct, frozen=True, tag=True):
    """Tell an idle process to become a training process. Descriptors: black box, log file, and those of its copies."""

    command: tuple[str, ...]
    is_module: bool
    no_python: bool
    environment: dict[str, str]
    working_directory: str


class BuildProgram(msgspec.Struct, frozen=True, tag=True):
    """Tell an idle process to run a program up to its train function, ahead of a fault. Descriptor: log file.

    The channel stays: the process says ProgramBuilt there, and waits for TakeRank.
    """

    program: RunProgram


class ProgramBuilt(msgspec.Struct, frozen=True, tag=True):
    """From a process that is built ahead: it stands at its train function, and waits for its rank."""


class TakeRank(msgspec.Struct, frozen=True, tag=True):
    """Tell a process that was built ahead to hold its rank from now on. Descriptors: as of RunProgram."""

    environment: dict[str, str]


class ServeStore(msgspec.Struct, frozen=True, tag=True):
    """Tell an idle process to serve a rendezvous store. Descriptors: the listening socket, a channel for pings."""

    host: str
    port: int


class ServeScheduler(msgspec.Struct, frozen=True, tag=True):
    """Tell an idle process to be MindSpore's scheduler, in this environment. Descriptor: log file.

    `again`: it follows one that has exited. `announces`: the process only says where the one that runs is, and exits.
    """

    environment: dict[str, str]
    again: bool = False
    announces: bool = False


class WriteCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Tell an idle process to write a copy in host memory to disk. Descriptors: a channel for its answer, the copy."""

    job: str
    directory: str
    keep: int
    within_s: float


class CheckpointWritten(msgspec.Struct, frozen=True, tag=True):
    """From that process: it has done its part, or failed as `error` says."""

    error: str = ""


class CheckOrder(msgspec.Struct, frozen=True, tag=True):
    """Tell a process to check the node, in a job with these settings."""

    check: CheckNode
    settings: JobSettings


class CheckFigures(msgspec.Struct, frozen=True, tag=True):
    """From a process that checks the node. None: it was not asked for, or has failed as `error` says."""

    product_s: float | None = None
    exchange_s: float | None = None
    error: str = ""


Assignment = RunProgram | BuildProgram | TakeRank | ServeStore | ServeScheduler | WriteCheckpoint


ChannelMessage = (
    ForkProcess
    | Preload
    | ModulesImported
    | Ping
    | Pong
    | ProcessIdle
    | ProgramBuilt
    | Assignment
    | CheckpointWritten
    | CheckOrder
    | CheckFigures
)


MessageWithFds = tuple[ChannelMessage, list[int]]  # the descriptors are the receiver's to close


_decoder: msgspec.msgpack.Decoder[ChannelMessage] = msgspec.msgpack.Decoder(ChannelMessage)


def pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: ChannelMessage, fds: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors. Raises AgentError when the other end is closed or its queue is full."""
    try:
        with os.fdopen(os.memfd_create("midstep-message", os.MFD_CLOEXEC), "wb") as payload:
            payload.write(_encoder.encode(message))
            payload.flush()
            socket.send_fds(end, [b"."], [payload.fileno(), *fds], socket.MSG_NOSIGNAL)
    except OSError as error:
        raise AgentError(f"cannot send {type(message).__name__}: {error}") from error


def receive(end: socket.socket) -> MessageWithFds | None:
    """Receive a message and its descriptors. Returns None when the other end is closed.

    Blocks if the socket does, and else raises BlockingIOError when there is nothing to read. Raises AgentError for
    what is not a message.
    """
    try:
        _, fds, flags, _ = socket.recv_fds(end, 1, MAX_FDS)
    except ConnectionError:
        return None
    if not fds:
        return None
    payload, *others = fds
    try:
        with os.fdopen(payload, "rb") as file:
            if flags & socket.MSG_CTRUNC:
                raise AgentError("descriptors were dropped: this process is at its limit of open files (ulimit -n)")
            file.seek(0)
            message = _decoder.decode(file.read())
    except (msgspec.MsgspecError, AgentError) as error:
        close_all(others)
        raise AgentError(f"cannot read a message of the agent's channel: {error}") from error
    for fd in others:
        os.set_inheritable(fd, False)
    return message, others


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def rank_environment(
    base: Mapping[str, str],
    job: JobSpec,
    order: StartProcess,
    *,
    node: str,
    agent_socket: str,
    started_s: float,
) -> dict[str, str]:
    """Return the environment of a training process: the agent's (`base`), the job's, and the rank's on top.

    Threads are limited to one per rank unless the user has set a limit, as torchrun does.
    """
    rank = {
        "RANK": order.rank,
        "LOCAL_RANK": order.local_rank,
        "GROUP_RANK": order.group_rank,
        "ROLE_RANK": order.rank,
        ROLE_NAME: job.environment.get(ROLE_NAME, ROLE),
        "WORLD_SIZE": order.world_size or job.world_size,
        "LOCAL_WORLD_SIZE": job.ranks_per_node,
        "GROUP_WORLD_SIZE": order.nodes or job.nodes,
        "ROLE_WORLD_SIZE": order.world_size or job.world_size,
        "MASTER_ADDR": order.store.host,
        "MASTER_PORT": order.store.port,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.job,
        ERROR_FILE: error_file(job.job_directory, order.rank, order.incarnation),
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 must not serve the store itself
        names.JOB: job.job,
        names.NODE: node,
        names.AGENT_SOCKET: agent_socket,
        names.GENERATION: order.generation,
        names.INCARNATION: order.incarnation,
        names.CONNECTED: int(order.connected),
        names.EARLY: int(order.early),
        names.SETTINGS: msgspec.json.encode(job.settings).decode(),
        names.JOB_DIRECTORY: job.job_directory,
        names.STORE: f"{order.store.host}:{order.store.port}",
        names.STORE_SECRET: order.store.secret,
        names.STARTED_S: started_s,
    }
    given = {**DEFAULTS, **base, **job.environment}
    if job.environment.get(names.TRAINJOB_REPORTED) == "1":
        for name in names.TRAINJOB:
            given.pop(name, None)
    if job.environment.get(names.VIRTUAL_LOCAL_RANK) == "1":
        rank |= {"LOCAL_RANK": 0, _VISIBLE_GPUS: _own_gpu(given.get(_VISIBLE_GPUS), order.local_rank)}
    return {**given, **{name: str(value) for name, value in rank.items()}}


def _own_gpu(visible: str | None, local_rank: int) -> str:
    """Return the GPU of a rank among those that are visible, None being all. With fewer than ranks it is shared."""
    if visible is None:
        return str(local_rank)
    gpus = [each.strip() for each in visible.split(",")]
    return gpus[local_rank % len(gpus)]


def rank_program(job: JobSpec, environment: Mapping[str, str]) -> RunProgram:
    """Return what a training process is to run, in its environment."""
    return RunProgram(
        command=job.command,
        is_module=job.is_module,
        no_python=job.no_python,
        environment=dict(environment),
        working_directory=job.working_directory,
    )
