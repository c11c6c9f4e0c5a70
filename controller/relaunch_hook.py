"""Call a program of the user's when a node of the job was replaced: `on_node_relaunch` of the policy.

For what lies outside of the job: a ticket, a machine to be drained, a page. It is part of no recovery: nothing waits
for it, and whatever becomes of it is only reported.
"""

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping

import msgspec

from ..protocol.compat import within
from ..protocol.incidents import JobStatus
from ..protocol.token import without_token

LOOK_S = 1.0
HOOK_S = 60.0  # then it is killed

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


class RelaunchHook:
    """Looks at the job while `run` runs. One call at a time; what changes meanwhile is seen after it."""

    def __init__(self, command: str, job: str, status: Callable[[], JobStatus], *, look_s: float = LOOK_S) -> None:
        """`command`: is split into words as a shell does, and run without one."""
        self._words = shlex.split(command)
        self._job = job
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
                await self._call(relaunch, status)

    async def _call(self, relaunch: NodeRelaunch, status: JobStatus) -> None:
        line = msgspec.json.encode({"job": self._job, "generation": status.generation, **msgspec.to_builtins(relaunch)})
        known = {"JOB": self._job, "NODE": relaunch.node, "REPLACED_BY": ",".join(relaunch.replaced_by)}
        environment = without_token(os.environ) | {f"MIDSTEP_{name}": value for name, value in known.items()}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, env=environment, start_new_session=True
            )
        except OSError as error:
            _log.error("on_node_relaunch: %s cannot be run: %s", self._words[0], error)
            return
        try:
            await within(HOOK_S, process.communicate(line + b"\n"))
        except TimeoutError:
            _log.error("on_node_relaunch: %s takes more than %g s, and is killed", self._words[0], HOOK_S)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode:
            _log.error("on_node_relaunch: %s ended with status %d", self._words[0], process.returncode)
