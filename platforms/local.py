"""The `local` platform: nodes on this machine, each an agent in a session of its own.

Runs in the launcher (`midstep run`), which owns the agents. A pipe tells each agent when the launcher has exited, even
when it was killed. The agents of a job that begins with several nodes are forks of one process (`forked_agents.py`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import psutil

from ..protocol.discovery import read_endpoint
from ..protocol.errors import ConfigurationError, MidstepError, PlatformError
from ..protocol.keys import JobKeys
from ..protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, NodeLost, NodeRefused, PlatformJoined
from ..protocol.own_programs import own_program
from ..protocol.run_directories import remove_tree
from ..protocol.types import PLATFORM, node_address
from .forked_agents import AgentForker, ForkAgent
from .peer import PlatformPeer
from .processes import NodeMark, WatchedProcess, can_limit_locks, kill_tree, open_log

KILLED_S = 5.0
MOST_NODES_HERE = 64  # on one machine
# An agent's own children, by their process names.
SERVICES = {"midstep-forksrv", "midstep-idle", "midstep-store", "midstep-writer"}

_log = logging.getLogger(__name__)


class LocalOptions(msgspec.Struct, frozen=True):
    """Options of the local platform.

    `grace_s`: from asking an agent to exit until it is killed; longer than the job's own `stop_grace_s`.
    """

    job: str
    controller: str  # its first endpoint, tcp://
    keys: str  # the job's key directory, in which keys for new nodes are made
    run_directory: str
    log_directory: str
    host: str = "127.0.0.1"
    max_nodes: int = MOST_NODES_HERE
    can_create: bool = True  # nodes beyond those that the job starts with
    grace_s: float = 15.0
    session: int = 0  # above those of agents and platforms that the job had before


class _Node:
    """A node: its agent's process, the launcher's end of the pipe to it, and whether it was deleted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pipe = -1
        self.process: WatchedProcess | None = None  # None: it is asked for
        self.deleted = False
        self.kill: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Close the pipe, which asks the agent to exit. Idempotent."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


class LocalPlatform:
    """The `local` platform. Construct it in the running loop, once the job's keys exist; `close` it in the end.

    `domain_of(node)` returns the failure domain of a node; by default each is its own. `on_end` is called when the
    controller ends the job. Raises ConfigurationError.
    """

    def __init__(
        self,
        options: LocalOptions,
        *,
        environment: Mapping[str, str] | None = None,
        domain_of: Callable[[str], str] | None = None,
        on_end: Callable[[EndJob], None] | None = None,
    ) -> None:
        self._options = options
        self._environment = dict(os.environ if environment is None else environment)
        self._domain_of = domain_of or str
        self._on_end = on_end
        self._nodes: dict[str, _Node] = {}
        self._forker: AgentForker | None = None
        self._ending = False
        self._session = max(time.time_ns(), options.session)  # of the agent that was started last
        self._peer = PlatformPeer(
            options.job,
            [options.controller],
            JobKeys.load_client(options.keys, PLATFORM),
            session=self._session,
            lookup=partial(read_endpoint, Path(options.run_directory)),
        )
        self._peer.serve(self)

    @property
    def agents(self) -> dict[str, int]:
        """The pids of the agents that run now, by node."""
        return {node.name: node.process.pid for node in self._nodes.values() if node.process is not None}

    @property
    def forker(self) -> int | None:
        """The process of which agents are forked; None where there is none."""
        return None if self._forker is None else self._forker.pid

    def has_ranks(self) -> bool:
        """Return whether a training process runs below the agents: any child that is not one of SERVICES."""
        names_below = set()
        for pid in self.agents.values():
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(pid).children():
                    with contextlib.suppress(psutil.Error):
                        names_below.add(child.name())
        return bool(names_below - SERVICES)

    def start(self, nodes: int) -> None:
        """Start the nodes of a new job, spare ones included: node0, node1, ... Raises PlatformError."""
        self.start_more(f"node{number}" for number in range(nodes))

    def start_more(self, names: Iterable[str]) -> None:
        """Start nodes of a job that continues, under names that it never had. Raises PlatformError."""
        wanted = list(names)
        if len(wanted) > 1:
            self._begin_to_fork()
        for name in wanted:
            self._create(name)
        self._peer.introduce()

    def report_lost(self, names: Iterable[str]) -> None:
        """Tell the controller of a job that continues which nodes ended with the last launcher."""
        for name in names:
            self._peer.post(NodeLost(node=name, reason="it ended with its launcher", at_s=time.time()))

    # --- commands of the controller ---------------------------------------------------------------------------

    def describe(self) -> PlatformJoined:
        """Return what can be done on this machine, and the nodes that are there."""
        return PlatformJoined(
            can_create=self._options.can_create,
            can_kill=True,
            nodes=tuple(name for name, node in self._nodes.items() if not node.deleted),
        )

    def create_node(self, command: CreateNode) -> None:
        """Make a node and start its agent. Answers with NodeRefused if it cannot."""
        if self._ending:
            return
        try:
            self._create(command.node)
        except MidstepError as error:
            self._peer.post(NodeRefused(node=command.node, reason=str(error)))

    def delete_node(self, command: DeleteNode) -> None:
        """Ask the node's agent to exit, and kill it after `grace_s`. Its keys open no new connection."""
        try:
            JobKeys.remove(self._options.keys, node_address(command.node))
        except (ConfigurationError, OSError) as error:
            _log.error("the keys of %s cannot be removed, so they still open connections: %s", command.node, error)
        node = self._nodes.get(command.node)
        if node is not None and not node.deleted:
            node.deleted = True
            self._ask_to_exit(node)

    def kill_node(self, command: KillNode) -> None:
        """Kill the node's agent and everything below it."""
        node = self._nodes.get(command.node)
        if node is not None and node.process is not None:
            kill_tree(node.process.pid)

    def end_job(self, command: EndJob) -> None:
        """Take note that the agents are about to exit, and tell the launcher."""
        self._ending = True
        if self._on_end is not None:
            self._on_end(command)

    async def close(self) -> None:
        """End all nodes. Returns when their agents have exited, or KILLED_S after the kill that follows `grace_s`."""
        self._ending = True
        nodes, forker = list(self._nodes.values()), self._forker
        for node in nodes:
            self._ask_to_exit(node)
        if forker is not None:
            await forker.settled()
        deadline = time.monotonic() + self._options.grace_s + KILLED_S
        for node in nodes:
            if node.process is not None and not await node.process.wait(max(0.0, deadline - time.monotonic())):
                _log.error("agent %d of %s does not exit after SIGKILL", node.process.pid, node.name)
        if forker is not None:
            await forker.ended(KILLED_S)
            self._forker = None
        self._peer.disconnect()

    # --- inside -------------------------------------------------------------------------------------------------

    def _create(self, name: str) -> None:
        if name in self._nodes:
            if self._nodes[name].deleted:
                raise PlatformError(f"{name} is still being ended; ask for a node of another name")
            return
        if len(self._nodes) >= self._options.max_nodes:
            raise PlatformError(f"{name} would be one more than {self._options.max_nodes} nodes on this machine")
        if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
            raise PlatformError(f"{name!r} is not a valid node name: use letters, digits, - and _")
        try:
            JobKeys.add(self._options.keys, node_address(name))
        except ConfigurationError as error:
            raise PlatformError(f"cannot make keys for {name}: {error}") from error
        node = _Node(name)
        try:
            self._start_agent(node)
        except OSError as error:
            node.end()
            raise PlatformError(f"the agent of {name} cannot be started: {error}") from error
        self._nodes[name] = node

    def _begin_to_fork(self) -> None:
        """Start the process of which agents are forked; without it each is a new interpreter."""
        if not can_limit_locks():  # nothing would mark a fork as its node's
            return
        try:
            self._forker = AgentForker(
                self._environment,
                Path(self._options.log_directory),
                on_forked=self._forked,
                on_gone=self._start_without_forks,
            )
        except OSError as error:
            _log.warning("no agent is forked, so each imports torch for itself: %s", error)

    def _start_agent(self, node: _Node) -> None:
        """Have the agent of a node forked, or start it as a new interpreter. Raises OSError."""
        node.end()
        theirs, node.pipe = os.pipe()
        arguments = self._arguments(node.name)
        try:
            with open(open_log(Path(self._options.log_directory) / f"agent-{node.name}.log"), "ab") as output:
                mark = self._mark(node.name)
                order = ForkAgent(node.name, arguments, mark.variables, mark.limit)
                if self._forker is not None and self._forker.fork(order, output.fileno(), theirs):
                    return
                with mark.inherited() as marks:
                    process = subprocess.Popen(
                        [*own_program("midstep.cli.agent"), *arguments, "--life-fd", str(theirs)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**self._environment, **marks},
                        pass_fds=(theirs,),
                        start_new_session=True,
                    )
        finally:
            os.close(theirs)
        process.returncode = 0  # WatchedProcess reaps it; Popen must not do so too
        node.process = WatchedProcess(process.pid, lambda status: self._ended(node, status))

    def _forked(self, name: str, pid: int, pidfd: int) -> None:
        """Take over an agent that was asked for."""
        node = self._nodes[name]
        assert self._forker is not None
        node.process = self._forker.watch(pid, pidfd, lambda status: self._ended(node, status))
        if node.deleted or self._ending:
            self._ask_to_exit(node)

    def _start_without_forks(self) -> None:
        """Start agents that were asked for and will not be forked."""
        self._forker = None
        for node in [each for each in self._nodes.values() if each.process is None]:
            if node.deleted or self._ending:
                node.end()
                del self._nodes[node.name]
                continue
            try:
                self._start_agent(node)
            except OSError as error:
                node.end()
                del self._nodes[node.name]
                reason = f"its agent cannot be started: {error}"
                self._peer.post(NodeLost(node=node.name, reason=reason, at_s=time.time()))

    def _arguments(self, name: str) -> tuple[str, ...]:
        options = self._options
        arguments = {
            "--job": options.job,
            "--controller": self._peer.endpoint,
            "--node": name,
            "--keys": options.keys,
            "--run-dir": options.run_directory,
            "--failure-domain": self._domain_of(name),
            "--host": options.host,
            "--session": str(self._next_session()),
        }
        return tuple(part for option in arguments.items() for part in option)

    def _next_session(self) -> int:
        """Return a number above those of all agents before, also when the clock was set back in between."""
        self._session = max(time.time_ns(), self._session + 1)
        return self._session

    def _mark(self, name: str) -> NodeMark:
        return NodeMark(Path(self._options.run_directory), name)

    def _folder(self, name: str) -> Path:
        return Path(self._options.run_directory).resolve() / name

    def _ask_to_exit(self, node: _Node) -> None:
        node.end()
        if node.process is not None and node.kill is None:
            node.process.signal(signal.SIGTERM)
            loop = asyncio.get_running_loop()
            node.kill = loop.call_later(self._options.grace_s, kill_tree, node.process.pid)

    def _ended(self, node: _Node, status: int) -> None:
        node.end()
        if node.kill is not None:
            node.kill.cancel()
        del self._nodes[node.name]
        # An agent that was killed leaves its socket, and perhaps processes that its ranks had started.
        self._mark(node.name).kill_all()
        for left in remove_tree(self._folder(node.name)):
            _log.warning("cannot remove %s", left)
        if not node.deleted and not self._ending:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            reason = f"its agent ended with {how}"
            self._peer.post(NodeLost(node=node.name, reason=reason, at_s=time.time()))
