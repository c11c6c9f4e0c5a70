"""Explain what a policy would do, for faults that have not happened.

It makes the facts that the recovery machine would make and asks the same ladder, so the reasons are word for
word those that status, report and log would show.
"""

import difflib
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from ..protocol.errors import ConfigurationError
from ..protocol.types import Decision, FaultKind, FaultLevel, FaultReport, IntegrityAction, Rung
from .budgets import Facts, FailedRung, NodeFailure, Spent
from .fault_codes import TREATMENTS, Treatment, closed_text
from .ladder import Ladder
from .rungs import drain, drain_obstacle, may_drain
from .schema import Policy, SubHealthAction, default_policy

_NOW_S = 1_000_000.0  # far enough from zero for every window
_NOBODY_AT_FAULT = frozenset({FaultKind.COMMUNICATION, FaultKind.LINK_UP})
_Member = TypeVar("_Member")

_KEYS = ("kind", "rank", "node", "level", "code", "mendable")
_BOOLEANS = {"true": True, "false": False}


class SupposedWorld(msgspec.Struct, frozen=True):
    """The job in which the faults are supposed to happen. Nodes are named node-0, node-1, ..., spares spare-0, ..."""

    nodes: int = 2
    ranks_per_node: int = 2
    spares: int = 1
    can_create_nodes: bool = True
    resilient: bool = True
    max_restarts: int | None = None
    failed: tuple[Rung, ...] = ()
    spent: tuple[tuple[Rung, int], ...] = ()  # how often each was taken for those at fault, a moment ago
    node_failures: tuple[tuple[str, int], ...] = ()  # how often each node has failed, a moment ago

    @property
    def node_of(self) -> dict[int, str]:
        """The node of each rank."""
        return {rank: f"node-{rank // self.ranks_per_node}" for rank in range(self.nodes * self.ranks_per_node)}


class Supposition(msgspec.Struct, frozen=True):
    """Faults that are supposed to come together, with a title for people."""

    title: str
    faults: tuple[FaultReport, ...]
    world: SupposedWorld


def parse_fault(text: str) -> FaultReport:
    """Make a fault of text like `kind=exit,rank=3` or `kind=device,level=RestartNPU,rank=0,code=80E01801`.

    Raises ConfigurationError, with what is allowed, when it is not one.
    """
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigurationError(f"--fault {text!r}: {part!r} is not of the form key=value")
        if key not in _KEYS:
            raise ConfigurationError(f"--fault {text!r}: unknown key {key!r}{_choose(key, _KEYS)}")
        if key in values:
            raise ConfigurationError(f"--fault {text!r}: {key} stands twice")
        values[key] = value
    rank = values.get("rank")
    if rank is not None and not (rank.isascii() and rank.isdigit()):
        raise ConfigurationError(f"--fault {text!r}: rank is {rank!r}; allowed: a whole number of at least 0")
    level_name = values.get("level")
    kind_name = values.get("kind") or (FaultKind.DEVICE if level_name else "")
    kind = _member(text, "kind", kind_name, {member.value: member for member in FaultKind})
    if kind is FaultKind.DEVICE and level_name is None:
        raise ConfigurationError(f"--fault {text!r}: a device fault needs a level{_choose('', list(FaultLevel))}")
    levels = {member.value: member for member in FaultLevel}
    fallback = FaultLevel.NODE if kind is FaultKind.NODE_LOST else FaultLevel.SOFTWARE
    mendable = _member(text, "mendable", values.get("mendable", "false"), _BOOLEANS)
    if mendable and rank is None:
        raise ConfigurationError(f"--fault {text!r}: mendable=true needs a rank=...: its process mends the fault")
    level = fallback if level_name is None else _member(text, "level", level_name, levels)
    return FaultReport(
        kind=kind,
        at_s=_NOW_S,
        seen_by="supposed",
        detail="supposed",
        rank=None if rank is None else int(rank),
        node=values.get("node"),
        level=level,
        code=values.get("code"),
        mendable=mendable,
    )


def suppose(faults: Iterable[FaultReport], world: SupposedWorld, policy: Policy | None = None) -> Facts:
    """Make the facts of `faults` happening together in `world`, as the machine would for the ladder of `policy`.

    Faults for which it would not ask the ladder are left out. Raises ConfigurationError for a rank or node that is not
    in the world.
    """
    policy = policy or default_policy()
    node_of = world.node_of
    known = {name for name, _ in world.node_failures} - set(node_of.values())
    if known:
        raise ConfigurationError(f"--node-failures: there is no node {min(known)!r}")
    located = _all_located(faults, world)
    asking = tuple(fault for fault in located if _asks(fault, policy))
    culprits = sorted({rank for fault in asking if not fault.mendable for rank in _blamed(fault, node_of)})
    mendable = sorted({fault.rank for fault in asking if fault.mendable and fault.rank is not None} - {*culprits})
    at_fault = (*culprits, *mendable)
    return Facts(
        now=_NOW_S,
        faults=asking,
        culprits=tuple(culprits),
        mendable=tuple(mendable),
        nodes=node_of,
        healthy=frozenset(node_of).difference(at_fault) if world.resilient else frozenset(),
        resilient=world.resilient,
        max_restarts=None if world.resilient else world.max_restarts,
        nodes_lost=frozenset(fault.node for fault in located if fault.kind is FaultKind.NODE_LOST and fault.node),
        closed=_closed(located, node_of),
        spare_nodes=tuple(f"spare-{index}" for index in range(world.spares)),
        can_create_nodes=world.can_create_nodes,
        min_nodes=policy.scale.min_nodes,
        taken=world.failed,
        failed=tuple(FailedRung(rung, "supposed") for rung in world.failed),
        spent=_spent(policy, world, at_fault),
        node_failures=(
            *(NodeFailure(node, _NOW_S) for node, times in world.node_failures for _ in range(times)),
            *(NodeFailure(node, _NOW_S) for node in sorted({node_of[rank] for rank in at_fault})),  # these, too
        ),
    )


def answer(policy: Policy, supposition: Supposition) -> tuple[Decision | None, tuple[str, ...]]:
    """Return what is decided, in the machine's own words, and what is to be said of faults that no rung is taken for.

    No decision: no process is touched. Raises ConfigurationError for a rank or node that is not in the supposed world.
    """
    world, ladder = supposition.world, Ladder(policy)
    facts = suppose(supposition.faults, world, policy)
    quiet = [fault for fault in _all_located(supposition.faults, world) if not _asks(fault, policy)]
    if facts.faults or not quiet:
        return ladder.decide(facts), tuple(_said(fault, policy) for fault in quiet)
    drained = next((fault for fault in quiet if TREATMENTS[fault.level] is Treatment.WATCH), None)
    if drained is None or drained.node is None:
        return None, tuple(_said(fault, policy) for fault in quiet)
    asked = may_drain(_NOW_S, drained.node, facts.nodes, _spent(policy, world, ()))
    why_not = drain_obstacle(policy, ladder.refusals(asked, Rung.RECOVER), world.spares)
    if why_not is not None:
        return None, (f"node {drained.node} is not well, {why_not}",)
    stay = len(facts.nodes) - len(asked.culprits)
    return drain(drained.node, facts.spare_nodes[0], asked.culprits, stay, drained), ()


def typical(world: SupposedWorld) -> tuple[Supposition, ...]:
    """Return the faults that every operator asks about, in `world`."""
    last = world.nodes * world.ranks_per_node - 1
    last_node = f"node-{world.nodes - 1}"

    def case(title: str, *faults: str, **changes: object) -> Supposition:
        changed = msgspec.structs.replace(world, **changes)
        return Supposition(title, tuple(parse_fault(fault) for fault in faults), changed)

    everybody = [f"kind=exit,rank={rank}" for rank in range(last + 1)]
    return (
        case("rank 0 raises an exception", "kind=exception,rank=0"),
        case(f"the process of rank {last} is killed", f"kind=exit,rank={last}"),
        case(f"rank {last} stands still", f"kind=stall,rank={last}"),
        case("a collective fails, no rank is at fault", "kind=communication"),
        case("the communicators cannot be built", "kind=link_up"),
        case("a device asks for its process to be restarted", "level=RestartRequest,rank=0"),
        case("a device must be reset", "level=RestartNPU,rank=0"),
        case("a node is lost", f"kind=node_lost,node={last_node}"),
        case("a node is lost, and no spare is left", f"kind=node_lost,node={last_node}", spares=0),
        case(
            "a process is killed, its restart in place fails",
            "kind=exit,rank=0",
            failed=(Rung.RECOVER_IN_PLACE,),
        ),
        case(
            "a process is killed, a hundred restarts in place are spent",
            "kind=exit,rank=0",
            spent=((Rung.RECOVER_IN_PLACE, 100),),
        ),
        case("all processes are killed at once", *everybody),
        case("a rank dies in a script that knows nothing of midstep", "kind=exit,rank=0", resilient=False),
    )


def compared_copies(policy: Policy) -> tuple[str, ...]:
    """Say what votes find, by how many ranks hold a shard, which the layout of a job decides; empty: none are held."""
    integrity = policy.integrity
    if not integrity.every_steps or policy.script_writes:
        return ()
    then = {
        IntegrityAction.ROLLBACK: "it gets a copy of the others, and where something wrong may have spread all go back",
        IntegrityAction.REPAIR: "it gets a copy of the others",
        IntegrityAction.REPORT: "it is shown, and training continues",
    }[integrity.then]
    both = "it is shown" if integrity.then is IntegrityAction.REPORT else "all go back, and the repetition tells which"
    two = "FSDP with a buddy" if policy.replica == "buddy" else "HSDP with two rows"
    return (
        f"a shard that three ranks or more hold (DDP, say): the rank with the odd copy is named; {then}",
        f"a shard that two ranks hold ({two}, say): a vote finds that they differ, naming neither; {both}",
        "a shard that one rank holds (FSDP on one mesh dimension, or Megatron with replica none or one data parallel "
        "rank, say): it is not checked by votes, and a copy that went wrong between two steps is not found; `midstep "
        "status` of the job names these shards once it has voted",
    )


def _asks(fault: FaultReport, policy: Policy) -> bool:
    """Return whether the machine asks the ladder about a fault; others are noted, close a node, or are waited out."""
    treatment = TREATMENTS[fault.level]
    if treatment is Treatment.WATCH:
        return policy.sub_health is SubHealthAction.LEAVE_NOW
    return treatment not in {Treatment.NOTE, Treatment.CLOSE}


def _said(fault: FaultReport, policy: Policy) -> str:
    """Say what is done about a fault for which the ladder is not asked."""
    if TREATMENTS[fault.level] is Treatment.CLOSE and fault.node is not None:
        return f"{closed_text(fault.node, fault.level, _what(fault))}; what runs there stays until it fails"
    if TREATMENTS[fault.level] is Treatment.WATCH:
        return f"node {fault.node} is not well, sub_health is {policy.sub_health}"
    return f"{fault.level} asks for nothing: it is shown in midstep status"


def _closed(faults: Iterable[FaultReport], node_of: dict[int, str]) -> dict[str, str]:
    return {
        fault.node: closed_text(fault.node, fault.level, _what(fault))
        for fault in faults
        if fault.node in node_of.values() and fault.node and TREATMENTS[fault.level] is Treatment.CLOSE
    }


def _what(fault: FaultReport) -> str:
    code = f"{fault.code} " if fault.code else ""
    return f"{code}of rank {fault.rank}" if fault.rank is not None else f"{code}of the node"


def _spent(policy: Policy, world: SupposedWorld, at_fault: tuple[int, ...]) -> tuple[Spent, ...]:
    """Make the record of the rungs that were taken before, for the ranks at fault and charged to their party."""
    node_of, entries = world.node_of, []
    for party, ranks in Ladder(policy).roles.divide(at_fault) or ((None, []),):
        nodes = tuple(sorted({node_of[rank] for rank in ranks}))
        role = "" if party is None else party.charged
        entries += [Spent(rung, _NOW_S, tuple(ranks), nodes, role) for rung, times in world.spent for _ in range(times)]
    return tuple(entries)


def _all_located(faults: Iterable[FaultReport], world: SupposedWorld) -> tuple[FaultReport, ...]:
    node_of = world.node_of
    nodes = dict.fromkeys(node_of.values())
    return tuple(_located(fault, node_of, nodes) for fault in faults)


def _located(fault: FaultReport, node_of: dict[int, str], nodes: dict[str, None]) -> FaultReport:
    """Fill in the node of a fault of a rank; refuse ranks and nodes that the world does not have."""
    if fault.rank is not None and fault.rank not in node_of:
        raise ConfigurationError(f"--fault: there is no rank {fault.rank}; allowed: 0 to {len(node_of) - 1}")
    if fault.node is not None and fault.node not in nodes:
        raise ConfigurationError(f"--fault: there is no node {fault.node!r}{_choose(fault.node, list(nodes)[:16])}")
    if fault.rank is not None and fault.node not in (None, node_of[fault.rank]):
        raise ConfigurationError(f"--fault: rank {fault.rank} is on {node_of[fault.rank]}, not on {fault.node}")
    if fault.rank is None and fault.node is None and fault.kind not in _NOBODY_AT_FAULT:
        raise ConfigurationError(f"--fault: kind={fault.kind} needs a rank=... or a node=...")
    if fault.rank is None or fault.kind in _NOBODY_AT_FAULT:
        return fault
    return msgspec.structs.replace(fault, node=node_of[fault.rank])


def _blamed(fault: FaultReport, node_of: dict[int, str]) -> list[int]:
    if fault.kind in _NOBODY_AT_FAULT:
        return []
    if fault.kind is FaultKind.NODE_LOST or fault.rank is None:
        return [rank for rank, node in node_of.items() if node == fault.node]
    return [fault.rank]


def _member(text: str, key: str, value: str, members: dict[str, _Member]) -> _Member:
    if value not in members:
        found = f"{key} is {value!r}" if value else f"{key} is missing"
        raise ConfigurationError(f"--fault {text!r}: {found}{_choose(value, list(members))}")
    return members[value]


def _choose(value: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(value, names, n=1)
    return f"; allowed: {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")
