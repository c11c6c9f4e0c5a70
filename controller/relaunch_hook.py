"""Call a program of the user's when a node of the job was replaced, or is to be: `on_node_relaunch` of the policy.

It is for what lies outside of the job: a ticket, a machine to be drained, a page. So nothing waits for it, and what
becomes of it is only reported (`RelaunchHook`). With `node.relaunch_brings` it is what makes nodes for a job whose
machines join by themselves, and which no platform makes any for (`NodeBringer`): it is asked for each node that the job
lacks once it has run, and answers which come. Ranks wait for those as for the nodes of a platform.
"""

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from ..protocol.bounds import Name
from ..protocol.compat import within
from ..protocol.incidents import JobStatus
from ..protocol.messages import NodeRefused, PlatformJoined
from ..protocol.own_programs import end
from ..protocol.token import without_token
from .recovery.world import NodeState

LOOK_S = 1.0
MOST_BYTES = 64 * 1024  # of an answer
MOST_NODES = 64  # in an answer
MOST_WANTED = 256  # nodes that wait for a call
_MOST_REASON = 500
_HERE = frozenset({NodeState.ACTIVE, NodeState.SPARE})
_IN_USE = _HERE | {NodeState.REQUESTED}

_log = logging.getLogger(__name__)


class NodeRelaunch(msgspec.Struct, frozen=True):
    """A node has no rank any more, and other nodes, which had none, have its ranks.

    `state` and `note`: of the node that was left (lost, isolated, spare), and why. `replaced_by`: in the ranks' order.
    """

    node: str
    failure_domain: str
    state: str
    note: str
    ranks: tuple[int, ...]
    replaced_by: tuple[str, ...]


def homes_of(status: JobStatus) -> dict[int, str]:
    """Return the node of each rank that has one."""
    return {rank.rank: rank.node for rank in status.ranks if rank.node}


def relaunches(before: Mapping[int, str], status: JobStatus) -> tuple[NodeRelaunch, ...]:
    """Return the nodes that were replaced since ranks were where `before` says.

    A node that is left without another in its place, as by a job that gets smaller, was not replaced.
    """
    now = homes_of(status)
    left = sorted(set(before.values()) - set(now.values()))
    fresh = set(now.values()) - set(before.values())
    known = {node.node: node for node in status.nodes}
    found = []
    for name in left:
        ranks = tuple(rank for rank, node in sorted(before.items()) if node == name)
        instead = tuple(dict.fromkeys(now[rank] for rank in ranks if now.get(rank) in fresh))
        if instead:
            node = known.get(name)
            domain, state, note = ("", "gone", "") if node is None else (node.failure_domain, node.state, node.note)
            found.append(NodeRelaunch(name, domain, state, note, ranks, instead))
    return tuple(found)


class HookFailed(Exception):
    """The command could not be run, failed, or took too long; says which."""


class HookCommand:
    """The command, which runs for at most `within_s`, one call at a time."""

    def __init__(self, command: str, job: str, within_s: float) -> None:
        """`command`: is split into words as a shell does, and run without one."""
        self._words = shlex.split(command)
        self._job = job
        self._within_s = within_s

    async def call(self, facts: Mapping[str, Any], known: Mapping[str, str], *, answers: bool = False) -> bytes:
        """Run it with `facts` on its stdin and `known` in its environment; return its stdout, if it `answers`.

        Raises HookFailed.
        """
        line = msgspec.json.encode({"job": self._job, **facts})
        environment = without_token(os.environ) | {f"MIDSTEP_{name}": each for name, each in known.items()}
        stdout = asyncio.subprocess.PIPE if answers else None
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=stdout, env=environment, start_new_session=True
            )
        except OSError as error:
            raise HookFailed(f"{self._words[0]} cannot be run: {error}") from error
        try:
            return await within(self._within_s, self._communicate(process, line + b"\n"))
        except TimeoutError:
            raise HookFailed(f"{self._words[0]} takes more than {self._within_s:g} s, and is killed") from None
        finally:
            await end(process)

    async def _communicate(self, process: asyncio.subprocess.Process, line: bytes) -> bytes:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it need not read what it is told
            process.stdin.write(line)
            await process.stdin.drain()
        process.stdin.close()
        answer = b"" if process.stdout is None else await _read(process.stdout)
        if await process.wait():
            raise HookFailed(f"{self._words[0]} ended with status {process.returncode}")
        return answer


async def _read(stdout: asyncio.StreamReader) -> bytes:
    """Return all that a process says, as far as it is kept."""
    kept = b""
    while piece := await stdout.read(MOST_BYTES):
        kept += piece[: MOST_BYTES - len(kept)]
    return kept


class RelaunchHook:
    """Looks at the job while `run` runs. One call at a time; what changes meanwhile is seen after it."""

    def __init__(
        self, command: HookCommand, job: str, status: Callable[[], JobStatus], *, look_s: float = LOOK_S
    ) -> None:
        self._command, self._job = command, job
        self._status = status
        self._look_s = look_s

    async def run(self) -> None:
        """Look and call until cancelled. Where the ranks are at first counts as where they were."""
        homes = homes_of(self._status())
        while True:
            await asyncio.sleep(self._look_s)
            status = self._status()
            found = relaunches(homes, status)
            homes = {**homes, **homes_of(status)} if status.ranks else homes
            for relaunch in found:
                facts = {"generation": status.generation, **msgspec.to_builtins(relaunch)}
                known = {"JOB": self._job, "NODE": relaunch.node, "REPLACED_BY": ",".join(relaunch.replaced_by)}
                try:
                    await self._command.call(facts, known)
                except HookFailed as error:
                    _log.error("on_node_relaunch: %s", error)


class BroughtNodes(msgspec.Struct, frozen=True):
    """The answer of the command: the names under which nodes join."""

    nodes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NODES)] = ()


Told = PlatformJoined | NodeRefused
_decode = msgspec.json.Decoder(BroughtNodes).decode


def answered(wanted: str, names: Sequence[str], status: JobStatus) -> tuple[Told, ...]:
    """Return the messages for the machine when nodes of these names come in the place of the one that it wanted.

    A node that is lost or isolated is not one that comes: a machine joins again under another name.
    """
    states = {node.node: node.state for node in status.nodes}
    coming = [name for name in dict.fromkeys(names) if states.get(name, NodeState.REQUESTED) in _IN_USE]
    if not coming:
        said = f"names only nodes that the job has left: {', '.join(names)}" if names else "brings no node"
        return (NodeRefused(wanted, f"on_node_relaunch {said}"[:_MOST_REASON]),)
    told: list[Told] = []
    if any(name not in states for name in coming):
        told.append(is_there(status, *coming))
    if wanted not in coming:
        told.append(NodeRefused(wanted, f"on_node_relaunch brings {', '.join(coming)} in its place"[:_MOST_REASON]))
    return tuple(told)


def is_there(status: JobStatus, *coming: str) -> PlatformJoined:
    """Return that there is what makes nodes, and the nodes that are on their way."""
    awaited = [node.node for node in status.nodes if node.state == NodeState.REQUESTED]
    return PlatformJoined(can_create=True, can_kill=False, nodes=tuple(dict.fromkeys((*awaited, *coming))))


class NodeBringer:
    """Has the command bring nodes while `run` runs, one at a time. `tell`: takes in what becomes of that."""

    def __init__(
        self,
        command: HookCommand,
        job: str,
        status: Callable[[], JobStatus],
        tell: Callable[[Told], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._command, self._job = command, job
        self._status, self._tell = status, tell
        self._look_s = look_s
        self._asked: set[str] = set()
        self._wanted: asyncio.Queue[str] = asyncio.Queue(MOST_WANTED)
        self._awaited: dict[str, bool] = {}  # True: the command has said that it comes, under its own name
        self._known: set[str] = set()  # nodes that come in the place of none of these

    def bring(self, node: str) -> None:
        """Want a node of this name, soon, or say that too many are wanted. In the loop's thread; idempotent."""
        if node in self._asked:
            return
        self._asked.add(node)
        if not self._awaited:
            self._known = {each.node for each in self._status().nodes if each.state in _IN_USE}
        try:
            self._wanted.put_nowait(node)
            self._awaited[node] = False
        except asyncio.QueueFull:
            refused = NodeRefused(node, f"on_node_relaunch: {self._wanted.maxsize} other nodes are waited for")
            asyncio.get_running_loop().call_soon(self._tell, refused)  # the order for it is just being carried out

    async def run(self) -> None:
        """Call until cancelled. Nothing is made for a job that has not run yet: its machines are on their way."""
        while self._status().generation == 0:
            await asyncio.sleep(self._look_s)
        self._tell(is_there(self._status()))
        while True:
            try:
                wanted = await within(self._look_s, self._wanted.get())
            except TimeoutError:
                self._look()
                continue
            status = self._status()
            gone = [node for node in status.nodes if node.state in {NodeState.LOST, NodeState.ISOLATED}]
            left = [{"node": node.node, "failure_domain": node.failure_domain, "state": node.state} for node in gone]
            facts = {"generation": status.generation, "wanted": wanted, "left": left}
            try:
                answer = _decode(await self._command.call(facts, {"JOB": self._job, "WANTED": wanted}, answers=True))
            except (HookFailed, msgspec.MsgspecError) as error:
                why = (
                    f"its answer is not understood: {error}" if isinstance(error, msgspec.MsgspecError) else str(error)
                )
                _log.error("on_node_relaunch: %s", why)
                del self._awaited[wanted]
                self._tell(NodeRefused(wanted, f"on_node_relaunch: {why}"[:_MOST_REASON]))
                continue
            self._known.update(answer.nodes)
            if wanted in answer.nodes:
                self._awaited[wanted] = True
            else:
                del self._awaited[wanted]
            for told in answered(wanted, answer.nodes, self._status()):
                self._tell(told)

    def _look(self) -> None:
        """Count no longer on a node that was said to come, when one of another name has come."""
        if not any(self._awaited.values()):
            return
        states = {node.node: node.state for node in self._status().nodes}
        for name in [name for name, said in self._awaited.items() if said and states.get(name) != NodeState.REQUESTED]:
            del self._awaited[name]
        instead = [name for name, state in states.items() if state in _HERE and name not in self._known]
        for name, other in zip([name for name, said in self._awaited.items() if said], instead, strict=False):
            del self._awaited[name]
            self._known.add(other)
            self._tell(NodeRefused(name, f"{other} has come in its place"))
