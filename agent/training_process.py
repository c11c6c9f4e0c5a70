"""A training process, from its start as an idle process to its exit.

An idle process waits for an assignment. It can become the process of a rank, one that is built ahead of a fault, the
one that serves the rendezvous store, MindSpore's scheduler, or one that writes a copy in host memory to disk. A warm
one was forked by the fork server; a cold one is a new interpreter, started while there is no fork server
(`python -m midstep.agent.training_process AGENT_PID`). Both end when the agent ends.

- A log that cannot be written loses lines, but never fails a step. Python raises from `print` when the file system is
  full, read-only or gone. That would be a fault of the rank, and its replacement would fail in the same way.
- A process that is built ahead runs the script up to its train function and stops there for a rank; where the script's
  groups are its own (`--mindio`), up to these. Until then it takes no part in the job: nothing reads its black box, and
  its only line to the agent is the channel.
- torch's `env://` rendezvous uses the agents' store as it is. After a restart of the world it would read the addresses
  of processes that have ended. So each generation has a part of the store for itself, by a prefix.
"""

import contextlib
import errno
import hashlib
import importlib
import io
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from ..adapters.mindio.cluster import RESTARTS, announce, rank_variables, schedule
from ..adapters.mindio.package import path_with_package, put_on_path
from ..communicators.libraries import HAS_TORCH
from ..processor import built_ahead
from ..protocol import environment as names
from ..protocol.blackbox import BlackBox
from ..protocol.errors import AgentError, MidstepError
from ..protocol.exits import heard
from ..protocol.private_files import make_private_directory, open_for_appending
from ..protocol.rank_logs import debug_log, show_once
from ..protocol.types import JobSettings
from . import channel
from .linux import await_adoption, die_with_parent, name_process
from .process_exit import end_process

ADOPTION_S = 10.0
STDERR = 2
WRITER_NICE = 10
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})
# The file system refuses the data. Other errors, such as a descriptor that the script has closed, are raised.
_CANNOT_TAKE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.EPIPE}
)
STORE_S = 300.0  # timeout of the store's own client in its process, for which nothing waits
LIBUV_LISTENS = "2.9"  # the first torch whose libuv store takes a socket that is bound already; 2.7 refuses it
_PINGED = "midstep/ping"
_prefix: str | None = None  # of the keys of this process; None: torch's own handler is in its place


def main() -> None:
    """Start as a cold idle process."""
    agent = int(sys.argv[1])
    end = socket.socket(fileno=channel.CHANNEL_FD)
    end.set_inheritable(False)
    wait_for_assignment(end, agent)


def wait_for_assignment(end: socket.socket, agent: int, prepare: Callable[[], None] = lambda: None) -> NoReturn:
    """Wait for an assignment, and carry it out. End when the agent closes the channel instead.

    `prepare` does what is worth doing ahead, before this process says that it is idle.
    """
    if not await_adoption(agent, ADOPTION_S):
        os._exit(os.EX_UNAVAILABLE)
    die_with_parent(agent)
    name_process("midstep-idle")
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    channel.send(end, channel.ProcessIdle(pid=os.getpid()))
    while (received := channel.receive(end)) is not None and isinstance(received[0], channel.Ping):
        channel.send(end, channel.Pong())
    if received is None:
        os._exit(os.EX_OK)
    assignment, fds = received
    if isinstance(assignment, channel.BuildProgram) and len(fds) == 1:
        build_program(assignment.program, end, log=fds[0])
    end.close()
    match assignment:
        case channel.RunProgram() if len(fds) >= 2:
            run_program(assignment, *fds)
        case channel.ServeStore() if len(fds) == 2:
            serve_store(assignment, fds[0], socket.socket(fileno=fds[1]))
        case channel.ServeScheduler() if len(fds) == 1:
            serve_scheduler(assignment, fds[0])
        case channel.WriteCheckpoint() if len(fds) == 2:
            write_checkpoint(assignment, socket.socket(fileno=fds[0]), fds[1])
        case _:
            os._exit(os.EX_USAGE)


# --- the user's program ---------------------------------------------------------------------------------------------


def run_program(assignment: channel.RunProgram, black_box: int, log: int, *copies: int) -> NoReturn:
    """Take over the program's environment, directory, arguments and output, run it, and exit."""
    _reset_signals()
    _take_over(assignment.environment, black_box, log, copies)
    reopen_output()
    time.tzset()
    mindio = assignment.environment.get(names.MINDIO) == "1"
    program, directory = assignment.command[0], assignment.working_directory
    try:
        if mindio:
            os.environ.update(rank_variables(assignment.environment))
        os.chdir(directory)
        if assignment.no_python:
            if mindio:
                os.environ["PYTHONPATH"] = path_with_package(os.environ.get("PYTHONPATH", ""))
            for fd in (black_box, *copies):
                os.set_inheritable(fd, True)
            os.execvp(program, assignment.command)
    except (OSError, AgentError) as error:
        what = f"{program} cannot be started in {directory}: " if isinstance(error, OSError) else ""
        print(f"midstep: {what}{error}")  # noqa: T201
        end_process(1)
    _reseed()
    if mindio:
        put_on_path(_folder_of(assignment))
        if built_ahead.is_waiting():
            from ..adapters.mindio.device import await_rank_before_groups

            await_rank_before_groups()
    _separate(assignment.environment)
    end_process(_run_python(assignment))


def _separate(environment: Mapping[str, str]) -> None:
    """Keep this process's `env://` rendezvous apart from those of processes that have ended."""
    if environment.get(names.MINDIO) == "1":
        separate_worlds(environment[names.JOB], int(environment[RESTARTS]))
    else:
        separate_generations(int(environment.get(names.GENERATION, 0)), environment.get(names.STORE_SECRET, ""))


def _take_over(environment: Mapping[str, str], black_box: int, log: int, copies: Sequence[int]) -> None:
    """Take an environment, an output, a black box and files for copies in place of those before."""
    name_process(f"midstep-{'b' if built_ahead.is_waiting() else 'r'}{environment['RANK']}")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[names.BLACK_BOX_FD] = str(black_box)
    if copies:
        os.environ[names.HOST_COPY_FDS] = ",".join(map(str, copies))


def _run_python(assignment: channel.RunProgram) -> int:
    """Run the script or module as `__main__`, and return the exit status of a plain Python."""
    _dump_crashes(assignment.environment)
    name = assignment.command[0]
    sys.argv = list(assignment.command)
    sys.path.insert(0, str(_folder_of(assignment)))
    try:
        if assignment.is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as request:
        return _exit_status(request)
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        show_once(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _folder_of(assignment: channel.RunProgram) -> Path:
    """Return the folder from which the program imports first, as with a plain Python."""
    return Path.cwd() if assignment.is_module else Path(assignment.command[0]).resolve().parent


def _dump_crashes(environment: Mapping[str, str]) -> None:
    import faulthandler

    faulthandler.enable(_crash_log(environment))


def _crash_log(environment: Mapping[str, str]) -> int:
    """Return the descriptor for the interpreter's dump after a crash. It stays open until the process exits.

    It is not the rank's output, which operators read: the incident describes a crash to them in one line.
    """
    try:
        path = debug_log(
            environment[names.JOB_DIRECTORY], int(environment["RANK"]), int(environment[names.INCARNATION])
        )
        make_private_directory(path.parent)
        return open_for_appending(path)
    except OSError:
        return STDERR


def _exit_status(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)  # noqa: T201 - what Python does with `sys.exit("text")`
    return 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames through which the script was started."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace or first


def _reset_signals() -> None:
    for number in heard(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _reseed() -> None:
    """Seed numpy's global generator, as a fresh process does. Python's `random` does so by itself after a fork."""
    numpy = sys.modules.get("numpy")
    with contextlib.suppress(AttributeError):
        if numpy is not None and "numpy.random" in sys.modules:
            numpy.random.seed(None)


# --- a process that is built ahead ----------------------------------------------------------------------------------


def build_program(request: channel.RunProgram, end: socket.socket, log: int) -> NoReturn:
    """Run a program up to its train function, wait there for the rank, and then be its process.

    A program that ends before that ends this process, as in any other one. `log` is for what it prints until then.
    """
    settings = msgspec.json.decode(request.environment[names.SETTINGS], type=JobSettings)
    unread = BlackBox.create(int(request.environment["RANK"]), settings.black_box_bytes)
    black_box = os.dup(unread.fd)  # the program attaches it, and then it is the program's to close
    unread.close()
    built_ahead.hold_back(partial(_await_rank, end, request.environment))
    run_program(request, black_box, log)


def _await_rank(end: socket.socket, began_with: Mapping[str, str]) -> Mapping[str, str]:
    """Say that the program is built, and wait for the rank. End when the agent closes the channel instead.

    `began_with`: the environment in which the program was started. What it has changed there stays as it is.
    """
    channel.send(end, channel.ProgramBuilt())
    while (received := channel.receive(end)) is not None and isinstance(received[0], channel.Ping):
        channel.send(end, channel.Pong())
    end.close()
    if received is None:
        os._exit(os.EX_OK)
    order, fds = received
    if not isinstance(order, channel.TakeRank) or len(fds) < 2:
        os._exit(os.EX_USAGE)
    sys.stdout.flush()
    sys.stderr.flush()
    own = {name: value for name, value in os.environ.items() if value != began_with.get(name)}
    own.pop(names.BLACK_BOX_FD, None)
    removed = began_with.keys() - os.environ.keys()
    _take_over(order.environment, fds[0], fds[1], fds[2:])
    _separate(order.environment)
    _dump_crashes(order.environment)
    os.environ.update(own)
    for name in removed:
        os.environ.pop(name, None)
    return os.environ


# --- its output -----------------------------------------------------------------------------------------------------


class LossyFile(io.FileIO):
    """A file that drops what the file system refuses, and writes how much was lost once it accepts data again."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Write to `descriptor`, which stays the caller's; `name` is shown in messages."""
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self._lost_bytes = 0
        self._reason = ""

    def write(self, data: Any, /) -> int:
        """Write some of `data` and return how many bytes; all of them when they had to be dropped."""
        size_bytes = memoryview(data).nbytes
        try:
            if self._lost_bytes:
                super().write(f"midstep: {self._lost_bytes} bytes of output were lost: {self._reason}\n".encode())
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _CANNOT_TAKE:
                raise
            self._lost_bytes += size_bytes
            self._reason = os.strerror(error.errno)
            return size_bytes


def reopen_output() -> None:
    """Write `sys.stdout` and `sys.stderr` through a `LossyFile`, line by line.

    So a log has what a process printed just before it was killed.
    """
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]


def _stream(descriptor: int, present: object) -> io.TextIOWrapper:
    wrapped = present if isinstance(present, io.TextIOWrapper) else None
    file = LossyFile(descriptor, "<stdout>" if descriptor == 1 else "<stderr>")
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=wrapped.encoding if wrapped is not None else None,
        errors=wrapped.errors if wrapped is not None else "backslashreplace",
        line_buffering=True,
    )


# --- a checkpoint -----------------------------------------------------------------------------------------------------


def write_checkpoint(order: channel.WriteCheckpoint, end: socket.socket, copy: int) -> NoReturn:
    """Write a copy in host memory to disk, beside what trains here; answer on `end`, and exit."""
    from ..processor.checkpoints.copied import write_copy

    name_process("midstep-writer")
    os.nice(WRITER_NICE)
    error = ""
    try:
        write_copy(order, copy)
    except Exception as found:  # whatever it is, the agent says it
        error = str(found) if isinstance(found, MidstepError) else f"{type(found).__name__}: {found}"
    channel.send(end, channel.CheckpointWritten(error))
    os._exit(os.EX_OK)


# --- the rendezvous store -------------------------------------------------------------------------------------------


def serve_store(assignment: channel.ServeStore, listener: int, end: socket.socket) -> NoReturn:
    """Serve the store on the socket that the agent has bound, until the agent ends this process.

    It is torch's TCPStore where torch is installed. A ping on `end` is answered after the store has answered this
    process's own client.
    """
    name_process("midstep-store")
    store = _torch_store(assignment, listener) if HAS_TORCH else _own_store(assignment, listener)
    end.setblocking(True)
    while channel.receive(end) is not None:
        store.check([_PINGED])
        channel.send(end, channel.Pong())
    os._exit(os.EX_OK)


def _own_store(assignment: channel.ServeStore, listener: int) -> Any:
    from ..communicators.key_value_store import KeyValueClient, KeyValueServer

    KeyValueServer(socket.socket(fileno=listener))
    return KeyValueClient(assignment.host, assignment.port, timeout=timedelta(seconds=STORE_S))


def _torch_store(assignment: channel.ServeStore, listener: int) -> Any:
    import torch
    from packaging.version import Version
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..communicators.dns import disable_dns_in_this_process

    disable_dns_in_this_process()
    return TCPStore(
        assignment.host,
        assignment.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
        master_listen_fd=listener,
        use_libuv=Version(torch.__version__) >= Version(LIBUV_LISTENS),
    )


def serve_scheduler(assignment: channel.ServeScheduler, log: int) -> NoReturn:
    """Be MindSpore's scheduler until its ranks have left, or the agent ends this process; or say where it is."""
    name_process("midstep-sched")
    _reset_signals()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(assignment.environment)
    try:
        if assignment.announces:
            announce(assignment.environment, again=assignment.again)
        else:
            schedule(again=assignment.again)
    except SystemExit as request:
        end_process(_exit_status(request))
    except Exception as error:  # whatever it is, the log says it
        show_once(error)
        end_process(1)
    end_process(0)


def separate_generations(generation: int, secret: str) -> None:
    """Prefix all keys that this process's `env://` rendezvous writes with `generation`. Without torch: do nothing.

    The prefix is derived from the generation's `secret`, so that a stranger cannot know it in advance.
    """
    _prefix_keys(f"midstep/g{generation}/env/{secret}")


def separate_worlds(job: str, restarts: int) -> None:
    """Prefix all keys that this process's `env://` rendezvous writes with the number of restarts of the whole world.

    For groups that are the framework's own: a replacement has to find what the survivors wrote in earlier generations.
    """
    _prefix_keys(f"midstep/{job}/restart{restarts}/env")


def _prefix_keys(what: str) -> None:
    global _prefix
    known, _prefix = _prefix, hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
    if known is not None:
        return
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch.distributed.rendezvous")
        distributed = importlib.import_module("torch.distributed")
        original = module._rendezvous_handlers["env"]

        def prefixed(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
            for store, rank, world_size in original(url, **options):
                yield distributed.PrefixStore(_prefix, store), rank, world_size

        module._rendezvous_handlers["env"] = prefixed


if __name__ == "__main__":
    main()
