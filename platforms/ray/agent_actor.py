"""The actor of one node: it starts the node's agent, and its process is the agent's life.

Ray does not restart it (`max_restarts=0`). When its process ends, whatever ends it, the pipe to the agent closes, and
the agent ends everything that it has started.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec

from ...protocol.discovery import ENDPOINT_NAME
from ...protocol.keys import ClientKeys, JobKeys
from ...protocol.own_programs import own_program
from ...protocol.private_files import replace_file
from ...protocol.run_directories import RunDirectory, claim, clear_abandoned
from ...protocol.token import KeyPair
from ...protocol.types import node_address
from ..processes import NodeMark, kill_tree, open_log
from .library import library

METHODS_AT_ONCE = 8  # one waits for the agent's end; the others are short
_KEYS = "keys"


class NodeOrder(msgspec.Struct, frozen=True):
    """The order by which an actor becomes a node. `bundle`: its place in the job's placement group, if it has one.

    `environment`: that of the job. What an agent imports for its ranks it imports in their environment, and at once.
    """

    job: str
    node: str
    log_directory: str
    grace_s: float
    environment: dict[str, str]
    bundle: int | None = None


class Placed(msgspec.Struct, frozen=True):
    """The place where an agent runs. `machine`: Ray's id of it."""

    machine: str
    address: str
    pid: int
    bundle: int | None


class AgentActor:
    """Starts an agent on the machine on which Ray has placed this actor."""

    def __init__(self, order: NodeOrder) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._held: RunDirectory | None = None
        self._life = -1
        self._lock = threading.Lock()

    def start(self, keys: ClientKeys, endpoint: str, session: int) -> Placed:
        """Start the agent, if it has not been; and have it follow the controller to `endpoint`.

        Raises ConfigurationError, OSError.
        """
        with self._lock:
            if self._process is None:
                self._held = _claim(self._order)
                self.follow(endpoint)
                self._process = self._spawn(self._held.path, keys, endpoint, session)
        self.follow(endpoint)
        context = library().get_runtime_context()
        return Placed(context.get_node_id(), _address(), self._process.pid, self._order.bundle)

    def follow(self, endpoint: str) -> None:
        """Say where the controller listens now: the agent looks it up here while it hears nothing."""
        if self._held is not None:
            replace_file(self._held.path / ENDPOINT_NAME, f"{endpoint}\n".encode())

    def ended(self) -> str:
        """Wait for the agent's end, and say how it ended."""
        assert self._process is not None
        status = self._process.wait()
        with self._lock:
            if self._held is not None:
                NodeMark(self._held.path, self._order.node).kill_all()
                self._held.remove()
                self._held = None
        return f"its agent ended with {f'signal {-status}' if status < 0 else f'status {status}'}"

    def end(self) -> str:
        """Ask the agent to end, kill it after the job's grace, and say how it ended."""
        if self._process is None:
            return "its agent was never started"
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._order.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.ended()

    def kill(self) -> None:
        """Kill the agent and everything below it, as a power cut would."""
        if self._process is not None:
            kill_tree(self._process.pid)

    def _spawn(self, place: Path, keys: ClientKeys, endpoint: str, session: int) -> "subprocess.Popen[bytes]":
        order = self._order
        address = node_address(order.node)
        JobKeys.save_client(place / _KEYS, address, KeyPair(keys.public, keys.secret), keys.server_public)
        arguments = {
            "--job": order.job,
            "--controller": endpoint,
            "--node": order.node,
            "--keys": str(place / _KEYS),
            "--run-dir": str(place),
            "--failure-domain": socket.gethostname(),
            "--host": _address(),
            "--session": str(max(session, time.time_ns())),
        }
        theirs, self._life = os.pipe()
        command = [*own_program("midstep.cli.agent"), "--outlived", "--life-fd", str(theirs)]
        for option, value in arguments.items():
            command += [option, value]
        log = Path(order.log_directory) / f"agent-{order.node}.log"
        try:
            with (
                open(open_log(log), "ab", buffering=0) as output,
                NodeMark(place, order.node).inherited() as marks,
            ):
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **order.environment, **marks},
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)


def _address() -> str:
    address: str = library().util.get_node_ip_address()
    return address


def _claim(order: NodeOrder) -> RunDirectory:
    """Make the directory of the agent's sockets, after those of actors that have ended are cleared away."""
    base = Path(os.path.realpath("/tmp")) / f"midstep-{os.getuid()}"
    clear_abandoned(base, _end_leftovers)
    return claim(base, f"{order.job}.{order.node}")


def _end_leftovers(run_directory: Path) -> None:
    for folder in run_directory.iterdir():
        if not folder.is_symlink() and folder.is_dir():
            NodeMark(run_directory, folder.name).kill_all()
