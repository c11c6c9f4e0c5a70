"""The fork server process: a Python that has imported everything slow and does nothing but fork.

Importing torch and what its first optimizer needs takes seconds; a fork takes milliseconds. The fork server stays
single-threaded and touches no device, so that a fork of it is as good as a fresh interpreter. It forks idle processes,
which become children of the agent, and keeps no record of them: when it is killed, no rank is affected.

`import torch` loads every device backend that is installed, and torch-npu's start threads of CANN. A process with
threads must not be forked: a fork has none of them, and their locks as they were. So the fork server imports torch
alone, and a process that was forked ahead imports the backends before it says that it is idle.

Runs as `python -m midstep.agent.fork_server AGENT_PID`, with the channel to the agent as descriptor 3.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from importlib.metadata import entry_points
from typing import NamedTuple, NoReturn

from ..communicators.libraries import HAS_TORCH
from ..processor.exceptions import patterns_here
from ..protocol import environment as names
from ..protocol.errors import AgentError, MidstepError
from . import channel
from .channel import THREAD_LIMITS
from .linux import die_with_parent, name_process, other_threads, thread_count

PRELOAD_STORE = "store"  # for ranks that do not train with torch: 2 s of CPU less for each node
# torch._dynamo is what the first optimizer of a process imports; the rest are midstep's own.
TORCH_IMPORTS = (
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.data",
    "numpy",
    "safetensors.torch",
    "torch.profiler",
    "encodings.idna",
    "midstep.devices.cpu",
    "midstep.devices.cuda",
    "midstep.communicators.gloo.communicator",
    "midstep.communicators.nccl",
    "midstep.processor.resilient",
    "midstep.adapters.ddp.state",
)
WITHOUT_TORCH = (
    "numpy",
    "encodings.idna",
    "midstep.devices.cpu",
    "midstep.communicators.tcp.communicator",
    "midstep.processor.resilient",
)
FIRST_IMPORTS = ("torch", "torch.distributed") if HAS_TORCH else ("midstep.communicators.key_value_store",)
LATER_IMPORTS = TORCH_IMPORTS if HAS_TORCH else WITHOUT_TORCH
VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's: "1" or unset loads them
GROUP = "torch.backends"


def main() -> None:
    """Import modules, then fork on demand, until the agent closes the channel."""
    agent, end = int(sys.argv[1]), socket.socket(fileno=channel.CHANNEL_FD)
    end.set_inheritable(False)
    serve(end, agent, HeldBackBackends())


def serve(
    end: socket.socket, agent: int, held_back: "HeldBackBackends", imported: tuple[str, ...] | None = None
) -> NoReturn:
    """Be the fork server of an agent. `imported`: the imports are done, and these have failed."""
    die_with_parent(agent)
    name_process("midstep-forksrv")
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the launcher to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held_back.hold()
    for name in THREAD_LIMITS:
        os.environ.setdefault(name, "1")
    forked = _serve(end, agent, imported)
    if forked is not None:
        # In a fork, the frames of the fork server are left behind: from here on this is another process.
        from .training_process import wait_for_assignment

        wait_for_assignment(forked.end, agent, held_back.load if forked.backends else lambda: None)
    sys.exit()


class _Forked(NamedTuple):
    """The task of a forked process: listen here, after it has loaded torch's device backends if it should."""

    end: socket.socket
    backends: bool


def import_modules() -> tuple[str, ...]:
    """Import all that forks need. Return what cannot be imported, with the reason."""
    for name in THREAD_LIMITS:
        os.environ.setdefault(name, "1")
    importlib.import_module(f"{__package__}.training_process")
    return _import_all(FIRST_IMPORTS) + _import_all(_later_imports())


def _later_imports() -> tuple[str, ...]:
    return () if os.environ.get(names.PRELOAD) == PRELOAD_STORE else LATER_IMPORTS


def _serve(end: socket.socket, agent: int, imported: tuple[str, ...] | None) -> _Forked | None:
    """Carry out what the agent asks for.

    Returns, in a forked process, what it is to do; in the fork server, None when the agent has ended.
    """
    failed = imported or ()
    if imported is None:
        importlib.import_module(f"{__package__}.training_process")
        failed = _import_all(FIRST_IMPORTS)
        # The agent asks for its store's process before anything else. It need not wait for the other imports.
        end.setblocking(False)
        try:
            while True:
                message = channel.receive(end)
                if message is None:
                    return None
                forked = _carry_out(message, end, agent)
                if forked is not None:
                    return forked
        except BlockingIOError:
            end.setblocking(True)
        failed += _import_all(_later_imports())
    with contextlib.suppress(MidstepError):  # the ranks say what is wrong with the file
        patterns_here()
    _report_imports(end, failed)
    while (message := channel.receive(end)) is not None:
        forked = _carry_out(message, end, agent)
        if forked is not None:
            return forked
    return None


def _carry_out(received: channel.MessageWithFds, end: socket.socket, agent: int) -> _Forked | None:
    """Carry out one message. Returns, in a forked process, what it is to do."""
    message, fds = received
    match message:
        case channel.ForkProcess(backends=backends) if len(fds) == 1:
            forked = socket.socket(fileno=fds[0])
            if thread_count() == 1 and _fork():  # else a lock may be held for ever there; the agent starts it cold
                end.close()
                forked.setblocking(True)
                return _Forked(forked, backends)
            forked.close()
            return None
        case channel.Ping():
            channel.send(end, channel.Pong())
            return None
        case channel.Preload(modules=modules, paths=paths):
            sys.path[:0] = paths
            failed = _import_all(modules)
            del sys.path[: len(paths)]
            _report_imports(end, failed)
            return None
        case _:
            channel.close_all(fds)
            raise AgentError(f"a fork server cannot carry out a {type(message).__name__} with {len(fds)} descriptors")


def _report_imports(end: socket.socket, failed: tuple[str, ...]) -> None:
    gc.freeze()  # shared with all forks for good. Collecting first would take 0.3 s, and free a few pages
    channel.send(end, channel.ModulesImported(threads=other_threads(), failed=failed))


def _fork() -> bool:
    """Fork twice and end the middle process, so that the agent adopts the new one. Returns True in the new process."""
    try:
        middle = os.fork()
    except OSError as error:
        print(f"midstep fork server: cannot fork: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its only voice
        return False
    if middle:
        os.waitpid(middle, 0)
        return False
    try:
        new = os.fork()
    except OSError:
        os._exit(os.EX_OSERR)
    if new:
        os._exit(os.EX_OK)
    return True


def _import_all(names: tuple[str, ...]) -> tuple[str, ...]:
    """Import modules, and return those that cannot be imported, with the reason. The user's script may still try.

    Garbage collection is off meanwhile: imports make millions of objects that stay, and scanning them over and over
    is a quarter of the time that torch takes.
    """
    failed = []
    gc.disable()
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    finally:
        gc.enable()
    return tuple(failed)


class HeldBackBackends:
    """The backends that torch would have loaded in this environment. `load` makes up for it, in a fork."""

    def __init__(self) -> None:
        """Have torch load none when it is imported."""
        self._given = os.environ.get(VARIABLE)
        self._wanted = self._given in {None, "1"} and bool(entry_points(group=GROUP))
        self.hold()

    def hold(self) -> None:
        """Have torch load none, from now on."""
        os.environ[VARIABLE] = "0"

    def load(self) -> None:
        """Load them as torch does, where torch is imported. What fails is printed, and left to the script."""
        if self._given is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._given
        if not self._wanted or "torch" not in sys.modules:
            return
        for backend in entry_points(group=GROUP):
            try:
                backend.load()()
            except Exception as error:  # of a library without its driver, in its own ways
                text = f"midstep: the device backend {backend.name} cannot be loaded ahead: {error}"
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - its only voice


if __name__ == "__main__":
    main()
