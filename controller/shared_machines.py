"""Leave a machine that another role of the job has left: what was wrong with it is wrong for all that runs there.

Each role is a job with a controller of its own, and they share the directory of the whole job. There each writes which
machines its role has left, and reads what the others have. A node of its own on such a machine is taken for one that
the platform takes away: its ranks move at a step boundary where there is another node, at no budget's cost, and stay
where there is none. A machine that was lost is not told of: each role that had a node there misses it, too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ..protocol import environment as env
from ..protocol.bounds import MOST_NODES, Name, Seconds, Text
from ..protocol.incidents import JobStatus, NodeStatus
from ..protocol.messages import GoingCause, NodeGoing, NodeStaying
from ..protocol.private_files import make_private_directory, replace_file
from ..protocol.types import FaultReport
from .recovery.nodes import NODE_GOING
from .recovery.world import NodeState

LOOK_S = 1.0
FRESH_S = 300.0  # a node that comes to a machine later than that after it was left is not asked to leave it
FOLDER = "machines"  # of the directory of the whole job
MOST_BYTES = 4 << 20  # of what one role says
AGAIN_S = 30.0  # what was told and is not known yet is told again
_MOST_WHY = 500  # characters
_IN_USE = frozenset({NodeState.ACTIVE, NodeState.SPARE, NodeState.UNFIT})

_log = logging.getLogger(__name__)


class MachineLeft(msgspec.Struct, frozen=True):
    """A machine that a role has left. `node`: the role's name of it. `at_s`: wall-clock seconds."""

    machine: Name
    node: Name
    why: Text
    at_s: Seconds


MachinesLeft = Annotated[tuple[MachineLeft, ...], msgspec.Meta(max_length=MOST_NODES)]
Going = NodeGoing | NodeStaying
_decode = msgspec.json.Decoder(MachinesLeft).decode


def active_nodes(status: JobStatus) -> frozenset[str]:
    """Return the nodes that have ranks, and are well."""
    return frozenset(node.node for node in status.nodes if node.state == NodeState.ACTIVE)


def left(
    before: tuple[MachineLeft, ...], were_active: frozenset[str], status: JobStatus, now_s: float
) -> tuple[MachineLeft, ...]:
    """Return the machines that are left now: those of `before` that still are, and of nodes that were active till now.

    They are until the node is used again. One that is left because another role has left it is not told of.
    """
    isolated = {node.node: node for node in status.nodes if node.state == NodeState.ISOLATED}
    gone = {node.node for node in status.nodes if node.state == NodeState.LOST}
    still = tuple(each for each in before if each.node in gone or each.node in isolated)
    known = {each.node for each in still} | _with_others(status)
    fresh = [node for name, node in isolated.items() if name in were_active and name not in known]
    return still + tuple(MachineLeft(each.failure_domain, each.node, _why(each, status), now_s) for each in fresh)


def followed(status: JobStatus, others: Mapping[str, Iterable[MachineLeft]], now_s: float) -> tuple[Going, ...]:
    """Return which nodes are to be left with other roles, and which of them are to stay after all.

    `others`: the machines that each other role has left. Only what the job does not know yet is returned.
    """
    reasons = {
        each.machine: (f"role {role} has left machine {each.machine}: {each.why}", each.at_s)
        for role, machines in others.items()
        for each in machines
    }
    going = {report.node for report in _going(status)}
    told = _with_others(status)
    answer: list[Going] = []
    for node in status.nodes:
        why, since_s = reasons.get(node.failure_domain, ("", 0.0))
        if not why and node.node in told and node.state != NodeState.LOST:
            answer.append(NodeStaying(node.node, GoingCause.ROLE))
        elif why and node.node not in going and node.state in _IN_USE and now_s - since_s < FRESH_S:
            answer.append(NodeGoing(node.node, why, cause=GoingCause.ROLE))
    return tuple(answer)


def _going(status: JobStatus) -> list[FaultReport]:
    return [standing.report for standing in status.faults if standing.report.code == NODE_GOING]


def _with_others(status: JobStatus) -> set[str]:
    """Return the nodes that were told to go because another role has left their machine."""
    return {each.node for each in _going(status) if each.node and each.fault_id == GoingCause.ROLE.fault_of(each.node)}


def _why(node: NodeStatus, status: JobStatus) -> str:
    """Say why a node was left: by its note, or else by what stands against it or was last reported of it."""
    reports = [standing.report for standing in status.faults]
    reports += [report for incident in status.incidents[-1:] for report in reversed(incident.reports)]
    details = (each.detail for each in reports if each.node == node.node)
    return (node.note or next(details, "it failed"))[:_MOST_WHY]


class SharedMachines:
    """Looks at the job, and at what other roles say, while `run` runs. `tell`: takes in what follows."""

    def __init__(
        self,
        place: tuple[Path, str, int],
        status: Callable[[], JobStatus],
        tell: Callable[[Going], None],
        *,
        now: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
    ) -> None:
        """`place`: the directory of the whole job, the name of this role, and its attempt."""
        directory, role, attempt = place
        self._folder, self._ending = directory / FOLDER, f".{attempt}.json"
        self._own = self._folder / f"{role}{self._ending}"
        self._status, self._tell, self._now = status, tell, now
        self._look_s = look_s
        self._told_s: dict[str, float] = {}
        self._complained: set[str] = set()

    async def run(self) -> None:
        """Look and tell until cancelled. A node that is isolated at first counts if an earlier controller said so."""
        written = await asyncio.to_thread(self._read, self._own) if self._own.exists() else ()
        machines, active = written, active_nodes(self._status())
        while True:
            await asyncio.sleep(self._look_s)
            status, now_s = self._status(), self._now()
            machines = left(machines, active, status, now_s)
            active |= active_nodes(status)
            if machines != written and await asyncio.to_thread(self._write, machines):
                written = machines
            for each in followed(status, await asyncio.to_thread(self._read_others), now_s):
                if now_s - self._told_s.get(each.node, -AGAIN_S) >= AGAIN_S:
                    self._told_s[each.node] = now_s
                    self._tell(each)

    def _write(self, machines: tuple[MachineLeft, ...]) -> bool:
        try:
            make_private_directory(self._folder)
            replace_file(self._own, msgspec.json.encode(machines) + b"\n")
        except OSError as error:
            self._complain(f"{self._own}: other roles do not learn which machines this one has left: {error}")
            return False
        return True

    def _read_others(self) -> dict[str, tuple[MachineLeft, ...]]:
        if not self._folder.is_dir():
            return {}
        paths = sorted(self._folder.glob(f"*{self._ending}"))
        return {path.name.removesuffix(self._ending): self._read(path) for path in paths if path != self._own}

    def _read(self, path: Path) -> tuple[MachineLeft, ...]:
        try:
            with path.open("rb") as file:
                return _decode(file.read(MOST_BYTES))
        except (OSError, msgspec.MsgspecError) as error:
            self._complain(f"{path}: which machines that role has left cannot be read: {error}")
            return ()

    def _complain(self, text: str) -> None:
        if text not in self._complained:
            self._complained.add(text)
            _log.error("%s", text)


def place_among_roles(environment: Mapping[str, str]) -> tuple[Path, str, int] | None:
    """Return the directory of the whole job, the role and its attempt, of a job that is a role; None of any other."""
    role, attempt, store = (environment.get(name, "") for name in (env.ROLE, env.ROLE_ATTEMPT, env.ROLE_STORE))
    return (Path(store).parent, role, int(attempt)) if role and store and attempt.isdecimal() else None
