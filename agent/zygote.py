"""The zygote: a Python that has imported everything slow and does nothing but fork.

Importing torch and what its first optimizer wants takes seconds; a fork takes milliseconds. The zygote stays
single- threaded and touches no device, so that a fork of it is as good as a fresh interpreter. It forks
standbys, which become children of the agent, and hears of nothing that they do: it may be killed without
anybody noticing but its agent.

Runs as `python -m midstep.agent.zygote AGENT_PID`, with the channel to the agent as descriptor 3.
"""

import gc
import importlib
import os
import signal
import socket
import sys

from ..protocol import environment as names
from ..protocol.errors import AgentError
from . import orders
from .environment import THREAD_LIMITS
from .kernel import die_with_parent, name_process, thread_count

PRELOAD_STORE = "store"  # for ranks that do not train with torch: 2 s of CPU less for each node
FIRST_IMPORTS = ("torch", "torch.distributed")
# torch._dynamo is what the first optimizer of a process imports; the rest are midstep's own.
LATER_IMPORTS = (
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.data",
    "numpy",
    "safetensors.torch",
    "torch.profiler",
    "encodings.idna",
    "midstep.devices.cpu",
    "midstep.communicators.gloo.communicator",
    "midstep.processor.resilient",
    "midstep.adapters.ddp.state",
)


def main() -> None:
    """Import, then fork on demand, until the agent closes the channel."""
    agent = int(sys.argv[1])
    die_with_parent(agent)
    name_process("midstep-zygote")
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is the launcher's business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in THREAD_LIMITS:
        os.environ.setdefault(name, "1")
    if not sys.flags.safe_path:
        sys.path.pop(0)  # `-m` has put the working directory there; a user's own `random.py` must not be ours
    end = socket.socket(fileno=orders.CHANNEL_FD)
    end.set_inheritable(False)
    standby = _serve_all(end, agent)
    if standby is not None:
        # Imported by now or not, the frames of the zygote are left behind: from here on this is another process.
        from .child import stand_by

        stand_by(standby, agent)


def _serve_all(end: socket.socket, agent: int) -> socket.socket | None:
    """Return, in a standby, its own channel; in the zygote, None when the agent is gone."""
    importlib.import_module(f"{__package__}.child")
    failed = _import_all(FIRST_IMPORTS)
    # The agent asks for its store's process before anything else. It need not wait for the other imports.
    end.setblocking(False)
    try:
        while True:
            message = orders.receive(end)
            if message is None:
                return None
            standby = _carry_out(message, end, agent)
            if standby is not None:
                return standby
    except BlockingIOError:
        end.setblocking(True)
    failed += _import_all(() if os.environ.get(names.PRELOAD) == PRELOAD_STORE else LATER_IMPORTS)
    gc.collect()
    gc.freeze()  # what is there now is shared with all forks for good; collections need not touch it
    orders.send(end, orders.ZygoteUp(threads=thread_count(), failed=failed))
    while (message := orders.receive(end)) is not None:
        standby = _carry_out(message, end, agent)
        if standby is not None:
            return standby
    return None


def _carry_out(message: tuple[orders.Order, list[int]], end: socket.socket, agent: int) -> socket.socket | None:
    order, fds = message
    match order:
        case orders.ForkStandby() if len(fds) == 1:
            standby = socket.socket(fileno=fds[0])
            if _fork_away():
                end.close()
                standby.setblocking(True)
                return standby
            standby.close()
            return None
        case orders.Ping():
            orders.send(end, orders.Pong())
            return None
        case orders.Preload(modules=modules, paths=paths):
            sys.path[:0] = paths
            failed = _import_all(modules)
            del sys.path[: len(paths)]
            gc.collect()
            gc.freeze()
            orders.send(end, orders.ZygoteUp(threads=thread_count(), failed=failed))
            return None
        case _:
            orders.close_all(fds)
            raise AgentError(f"a zygote cannot carry out a {type(order).__name__} with {len(fds)} descriptors")


def _fork_away() -> bool:
    """Fork twice and end the middle one, so that the agent adopts the new process. True in the new process."""
    try:
        middle = os.fork()
    except OSError as error:
        print(f"midstep zygote: no fork: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its only voice
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
    """Import modules; those that are not installed or fail are named with their reason, and left to the
    user's script.

    Nothing is collected meanwhile: imports make millions of objects that stay, and to look through them again and
    again is a quarter of the time that torch takes.
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


if __name__ == "__main__":
    main()
