"""`midstep what-if`: what the loss of nodes or ranks would cost a job as it stands now.

It asks the ladder of the policy in force, as `midstep policy explain` does for a supposed job: with the job's nodes and
spares, what is spent, and what operators forbid. Nothing is done to the job. Pure, but for the command.
"""

import statistics
from collections.abc import Collection, Iterator
from pathlib import Path

import click
import msgspec

from ..controller.endpoints.control_requests import PolicyReply, PolicyRequest
from ..launch.job import POLICY_NAME
from ..launch.reached_job import HereJob, ReachedJob, founding_of, look, reached
from ..policies.budgets import Facts, NodeFailure, Spent
from ..policies.files import load_policy
from ..policies.ladder import Ladder
from ..policies.schema import Policy
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.incidents import Incident, JobStatus, Outcome
from ..protocol.types import Decision, FaultKind, FaultLevel, FaultReport, Rung, StandbyDepth
from ..protocol.wording import count, nodes_text, ranks_text
from .display.plain import echo, echo_json
from .frame import Command, operator_options
from .numbers import RANK
from .orders import ASK_S
from .views.kept_state import copy_left
from .views.wording import duration_text

_RESTARTS_ALL = frozenset({Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB})


class WhatIf(msgspec.Struct, frozen=True):
    """The answer: what would be lost, the decision, and what it would cost, in words. No decision: no rank is hurt."""

    lost: str
    decision: Decision | None
    costs: tuple[str, ...]


@click.command("what-if", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="A node that is lost; can be given again.")
@click.option("--rank", "ranks", multiple=True, type=RANK, metavar="RANK", help="A rank whose process is killed.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@operator_options
def command(
    *,
    job: str | None,
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
    as_json: bool,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Tell what the loss of nodes or ranks would cost a running job now. Nothing is done to it.

    The job's policy in force is asked, with the nodes and spares that it has, what is spent of its budgets, and what
    operators forbid. On the page nodes and ranks are selected on the map.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and a token of any role will do.

    \b
    Examples:
      midstep what-if --rank 3
      midstep what-if gpt --node node1 --node node2
    """
    target = reached(job, controller, token_file)
    status, note = look(target)
    found = what_if(status, policy_of(target, is_live=not note), nodes, ranks, can_create_nodes=can_create(target))
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    echo(f"{status.job}: {found.lost}")
    for line in lines(found):
        echo(f"  {line}")


def lines(found: WhatIf) -> Iterator[str]:
    """Yield the answer in words: the rung, those that are passed over, and what it costs."""
    *passed_over, taken = found.decision.in_words() if found.decision is not None else ["training continues"]
    yield taken
    yield from found.costs
    yield from passed_over


def policy_of(job: ReachedJob, *, is_live: bool) -> Policy:
    """Return the policy in force; of a job without a controller, that of its start. Raises MidstepError."""
    if is_live:
        reply = job.ask(PolicyRequest(), ASK_S)
        if isinstance(reply, PolicyReply):
            return reply.policy
    if not isinstance(job, HereJob):
        raise MidstepError(f"{job.name}: its controller does not say by which policy it goes.")
    return load_policy(job.directory / POLICY_NAME)


def can_create(job: ReachedJob) -> bool | None:
    """Return whether the platform of a job can bring nodes; None: that is not known here."""
    try:
        return founding_of(job.directory).can_create_nodes if isinstance(job, HereJob) else None
    except MidstepError:
        return None


def what_if(
    status: JobStatus, policy: Policy, nodes: Collection[str], ranks: Collection[int], *, can_create_nodes: bool | None
) -> WhatIf:
    """Return what the loss of nodes and of ranks' processes, all at once, would lead to.

    Raises ConfigurationError when the job does not have them, or none is named.
    """
    if status.exit_code is not None:
        raise ConfigurationError(f"{status.job} has ended: nothing of it can be lost any more.")
    node_of = {rank.rank: rank.node for rank in status.ranks}
    known = {node.node for node in status.nodes if node.state != "lost"}
    if unknown := sorted({*nodes} - known):
        raise ConfigurationError(f"{status.job} has no node {unknown[0]!r}: `midstep status` names those that it has.")
    if missing := sorted({*ranks} - node_of.keys()):
        raise ConfigurationError(f"{status.job} has no rank {missing[0]}: it has {len(node_of)} of them.")
    gone = frozenset(nodes)
    alone = sorted(rank for rank in {*ranks} if node_of[rank] not in gone)
    if not gone and not alone:
        raise ConfigurationError("name a node or a rank: --node NODE, --rank RANK.")
    lost = [f"{nodes_text(gone)} lost" if gone else "", f"the process of {ranks_text(alone)} killed" if alone else ""]
    said = " and ".join(filter(None, lost))
    if not alone and gone.isdisjoint(node_of.values()):
        left = [node for node in status.nodes if node.state == "spare" and node.node not in gone]
        return WhatIf(said, None, (f"no rank is there, and {count(len(left), 'spare node')} would be left",))
    decision = Ladder(policy).decide(_facts(status, policy, gone, alone, bool(can_create_nodes)))
    return WhatIf(said, decision, tuple(_costs(status, decision, gone, can_create_nodes)))


def _facts(status: JobStatus, policy: Policy, gone: frozenset[str], alone: list[int], can_create_nodes: bool) -> Facts:
    """Make the facts that the machine would make, as far as the status has them."""
    now, node_of = status.at_s, {rank.rank: rank.node for rank in status.ranks}
    culprits = sorted({*alone, *(rank for rank, node in node_of.items() if node in gone)})
    faults = [
        FaultReport(FaultKind.NODE_LOST, now, "supposed", "supposed", node=node, level=FaultLevel.NODE)
        for node in sorted(gone)
    ]
    faults += [
        FaultReport(FaultKind.EXIT, now, "supposed", "supposed", rank=rank, node=node_of[rank]) for rank in alone
    ]
    resilient = status.committed > 0
    training = (rank.rank for rank in status.ranks if rank.state == "training")
    hurt = sorted({node_of[rank] for rank in culprits})
    return Facts(
        now=now,
        faults=tuple(faults),
        culprits=tuple(culprits),
        nodes=node_of,
        healthy=frozenset(training).difference(culprits) if resilient else frozenset(),
        resilient=resilient,
        nodes_lost=gone,
        isolated=frozenset(node.node for node in status.nodes if node.state in {"isolated", "unfit"}),
        spare_nodes=tuple(node.node for node in status.nodes if node.state == "spare" and node.node not in gone),
        built_ahead={
            node.node: built.ranks
            for node in status.nodes
            if node.state == "spare"
            for built in node.prepared
            if built.depth is StandbyDepth.BUILT
        },
        can_create_nodes=can_create_nodes,
        min_nodes=policy.scale.min_nodes,
        spent=tuple(_spent(status)),
        node_failures=(
            *(NodeFailure(node.node, now) for node in status.nodes for _ in range(node.failures)),
            *(NodeFailure(node, now) for node in hurt),
        ),
        forbidden={order.rung: order.reason for order in status.controls.rungs if order.until_s > now},
    )


def _spent(status: JobStatus) -> Iterator[Spent]:
    """Yield what was taken: by the incidents that the status has, and so often in all as its budgets say."""
    used = {each.name.partition(" per job")[0]: each.used for each in status.budgets if each.name.endswith(" per job")}
    known: dict[Rung, list[Spent]] = {}
    for incident in status.incidents:
        nodes = tuple(sorted({report.node for report in incident.reports if report.node}))
        for decision in () if incident.outcome is Outcome.DISMISSED else incident.decisions:
            spent = Spent(decision.rung, incident.began_s, incident.replaced, nodes)
            known.setdefault(decision.rung, []).append(spent)
    for rung in Rung:
        times = used.get(rung.value, 0)
        latest = known.get(rung, [])[-times:] if times else []
        yield from latest
        yield from (Spent(rung, status.at_s) for _ in range(times - len(latest)))


def _costs(status: JobStatus, decision: Decision, gone: frozenset[str], can_create_nodes: bool | None) -> Iterator[str]:
    rung = decision.rung
    if rung is Rung.STOP:
        yield "the job would end, with a checkpoint where that is possible"
    took = [each.recovery_s for each in status.incidents if _was(each, rung) and each.recovery_s is not None]
    if took:
        yield f"it took {duration_text(statistics.median(took))} so far ({count(len(took), 'incident')})"
    elif rung is not Rung.STOP:
        yield "this job has had no such recovery: how long it takes is not known"
    held = _copies_left(status, gone)
    if rung in _RESTARTS_ALL:
        yield "all processes start again, from the newest checkpoint or one that the healthy ones write first"
        if held:
            yield f"on the same nodes from host copies {held}, if these are newer"
    elif rung is not Rung.STOP:
        source = f", or from host copies {held}" if held else ""
        yield f"state comes from ranks that hold the same{source}; where none does, from the newest checkpoint"
    if rung is not Rung.STOP and not held and copy_left(status.ranks):
        yield f"host copies of step {copy_left(status.ranks):,} go with {nodes_text(gone)}"
    for budget in status.budgets:
        if budget.name == f"{rung} per job" and budget.limit:
            yield f"budget {budget.name}: {budget.used + 1} of {budget.limit} would be spent"
    spares = [node for node in status.nodes if node.state == "spare" and node.node not in gone]
    if gone and rung is not Rung.STOP:
        needed = len({rank.node for rank in status.ranks if rank.node in gone})
        yield f"spare nodes: {len(spares)}, of which {min(needed, len(spares))} would be used"
    if can_create_nodes is None:
        yield "whether its platform could bring a node is not known here, and is taken for no"


def _copies_left(status: JobStatus, gone: Collection[str]) -> str:
    """Return of which step host memory has copies of all ranks then, in words; empty: of none."""
    step = copy_left(status.ranks, gone)
    return f"of step {step:,}, {count(max(0, status.committed - step), 'step')} ago" if step else ""


def _was(incident: Incident, rung: Rung) -> bool:
    return incident.rung is rung and incident.outcome is Outcome.RESUMED and not incident.is_requested
