"""`midstep policy`: is a policy file right, and what would it do?"""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ..controller.recovery.buddies import Location, buddies
from ..policies.acjob.translation import translate
from ..policies.budgets import Roles, beyond
from ..policies.explain import (
    SupposedWorld,
    Supposition,
    answer,
    compared_copies,
    parse_fault,
    suppose,
    typical,
)
from ..policies.files import load_policy, load_policy_or_roles, load_roles, render
from ..policies.rules import advice
from ..policies.schema import Policy, default_policy
from ..policies.scripted_roles import JobOfRoles, PlannedRole, advice_on_roles
from ..policies.yaml_text import MAX_FILE_BYTES, decoded_text, read_text
from ..protocol.errors import ConfigurationError, PolicyError
from ..protocol.types import Decision, RestoreSource, Rung
from ..protocol.wording import nodes_text, ranks_text
from .display.plain import echo, echo_json
from .display.terminal import Terminal
from .numbers import NODES, RANKS_OF_A_NODE, RESTARTS, SPARES
from .policy_change import apply, in_force, set_keys

EXIT_WRONG_FILE = 1
_KEEPING_STATE = frozenset({Rung.RETRY_STEP, Rung.STOP})
_REPLACING = frozenset({Rung.RECOVER_IN_PLACE, Rung.RECOVER})
MAX_RANKS = 200_000  # answers stay a matter of seconds

_STYLES = {
    Rung.RETRY_STEP: "green",
    Rung.RECOVER_IN_PLACE: "green",
    Rung.RECOVER: "cyan",
    Rung.RESCHEDULE_POD: "yellow",
    Rung.RESCHEDULE_JOB: "yellow",
    Rung.STOP: "red",
}


class Answer(msgspec.Struct, frozen=True):
    """The decision of a policy about one supposition; the form of `--json`.

    `decision` is null where no process is touched. `said`: of faults for which no rung is taken.
    """

    title: str
    decision: Decision | None
    said: tuple[str, ...] = ()


class SpentCount(click.ParamType[tuple[Rung, int]]):
    """`RUNG=N`: a rung and how often it was taken."""

    name = "rung=n"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Rung, int]:
        """Make a rung and a count of the text; refuse anything else as wrong usage."""
        name, _, times = str(value).partition("=")
        if name not in list(Rung) or not (times.isascii() and times.isdigit()) or int(times) > 1000:
            self.fail(f"{value!r} is not RUNG=N; rungs: {', '.join(Rung)}; N: 0 to 1000", param, ctx)
        return Rung(name), int(times)


class NodeCount(click.ParamType[tuple[str, int]]):
    """`NODE=N`: a node and how often it has failed."""

    name = "node=n"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Make a node and a count of the text; refuse anything else as wrong usage."""
        node, _, times = str(value).partition("=")
        if not node or not (times.isascii() and times.isdigit()) or int(times) > 1000:
            self.fail(f"{value!r} is not NODE=N; N: 0 to 1000", param, ctx)
        return node, int(times)


_RUNG = click.Choice([rung.value for rung in Rung])


def role_option(command: Any) -> Any:
    """Add --role to a command."""
    return click.option(
        "--role",
        metavar="NAME",
        help="Of a job of several roles, whose scripts are in FILE: the role that is meant.",
    )(command)


@click.group(name="policy")
def command() -> None:
    """Check policy files, and ask what they would do.

    A policy is a YAML file: the ladder of ways to recover, their budgets, and the deadlines. Exit status: 0
    when all is well, 1 when a file is wrong, 2 when the command line is.
    """


@command.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
def check(files: tuple[Path, ...]) -> None:
    """Find every mistake in policy FILES, also of jobs of several roles, with its key and what is allowed there.

    A file that is right may still come with notes: things that are allowed and perhaps not meant. Exit
    status: 0 when all files are right, 1 when any is wrong.
    """
    console = Terminal(soft_wrap=True)
    wrong = 0
    for file in files:
        try:
            policy = load_policy_or_roles(file)
        except PolicyError as error:
            wrong += 1
            console.print(Text(str(error), style="red"))
            continue
        if isinstance(policy, JobOfRoles):
            show_checked_roles(console, file, policy)
            continue
        rungs = " -> ".join(entry.rung for entry in policy.ladder)
        console.print(Text.assemble(str(file), ": ", ("ok", "green"), f" ({rungs})"))
        for note in advice(policy):
            console.print(Text.assemble(str(file), ": ", ("note", "yellow"), f": {note}"))
    sys.exit(EXIT_WRONG_FILE if wrong else 0)


@command.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@role_option
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="A fault to ask about, e.g. kind=exit,rank=3 or kind=node_lost,node=node-1 or level=RestartNPU,rank=0 or "
    "kind=memory,rank=0,mendable=true (keys: kind, rank, node, level, code, mendable). Several together are one "
    "incident. Without any, typical faults are explained.",
)
@click.option("--nodes", type=NODES, help="Nodes of the job.  [default: 2, or as many as the roles need]")
@click.option("--ranks-per-node", type=RANKS_OF_A_NODE, default=2, show_default=True, help="Ranks on each.")
@click.option("--spares", type=SPARES, default=1, show_default=True, help="Spare nodes left.")
@click.option(
    "--create-nodes/--no-create-nodes",
    default=True,
    show_default=True,
    help="Whether the platform can bring new nodes.",
)
@click.option("--failed", multiple=True, type=_RUNG, help="A rung that failed in this incident.")
@click.option("--spent", multiple=True, type=SpentCount(), help="A rung taken N times for those at fault.")
@click.option("--node-failures", multiple=True, type=NodeCount(), help="A node that has failed N times before.")
@click.option("--not-resilient", is_flag=True, help="No rank has reached a resilient train function.")
@click.option("--max-restarts", type=RESTARTS, help="As of `midstep run`, for --not-resilient.")
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
def explain(
    *,
    file: Path | None,
    role: str | None,
    faults: tuple[str, ...],
    nodes: int | None,
    ranks_per_node: int,
    spares: int,
    create_nodes: bool,
    failed: tuple[str, ...],
    spent: tuple[tuple[Rung, int], ...],
    node_failures: tuple[tuple[str, int], ...],
    not_resilient: bool,
    max_restarts: int | None,
    as_json: bool,
) -> None:
    """Tell which rung the policy in FILE would take, and why none of the cheaper ones.

    Without FILE it is the default policy. Nodes are named node-0, node-1, ...; ranks fill them in order.

    \b
    midstep policy explain job.yaml
    midstep policy explain job.yaml --fault kind=exit,rank=3 --failed recover_in_place
    midstep policy explain job.yaml --fault kind=node_lost,node=node-1 --spares 0 --no-create-nodes
    midstep policy explain job.yaml --fault kind=memory,rank=3,mendable=true --node-failures node-1=6
    """
    try:
        policy = policy_in(file, role)
    except PolicyError as error:
        echo(str(error), err=True)
        sys.exit(EXIT_WRONG_FILE)
    nodes = nodes or max(2, -(-(Roles(policy).highest_rank + 1) // ranks_per_node))
    if nodes * ranks_per_node > MAX_RANKS:
        raise click.UsageError(f"--nodes x --ranks-per-node is {nodes * ranks_per_node}; allowed: up to {MAX_RANKS}")
    world = SupposedWorld(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        spares=spares,
        can_create_nodes=create_nodes,
        resilient=not not_resilient,
        max_restarts=max_restarts,
        failed=tuple(Rung(rung) for rung in failed),
        spent=spent,
        node_failures=node_failures,
    )
    out_of_range = beyond(policy, nodes * ranks_per_node)
    if out_of_range is not None:
        raise click.UsageError(f"{file}: {out_of_range}; see --nodes and --ranks-per-node")
    try:
        answers = _answers(policy, world, faults)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(answers), indent=2).decode())
    else:
        _show_roles(policy)
        _show(answers)


@command.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@role_option
def show(file: Path | None, role: str | None) -> None:
    """Print the policy of FILE with every key that it leaves to its default; without FILE, the default policy."""
    try:
        click.echo(render(policy_in(file, role)), nl=False)
    except PolicyError as error:
        echo(str(error), err=True)
        sys.exit(EXIT_WRONG_FILE)


def _answers(policy: Policy, world: SupposedWorld, faults: tuple[str, ...]) -> list[Answer]:
    if faults:
        cases = [Supposition(" + ".join(faults), tuple(parse_fault(fault) for fault in faults), world)]
    else:
        cases = list(typical(world))
    found = []
    for case in cases:
        decision, said = answer(policy, case)
        left = (*_buddies_left(policy, case, decision), *_copies_left(policy, case, decision))
        found.append(Answer(case.title, decision, (*said, *left)))
    compared = () if faults else compared_copies(policy)
    return [*found, Answer("the copies of a shard are not equal", None, compared)] if compared else found


def _buddies_left(policy: Policy, case: Supposition, decision: Decision | None) -> tuple[str, ...]:
    """Say where a piece comes from that one rank held alone, if the policy asks for a buddy."""
    if policy.replica != "buddy" or decision is None or decision.rung not in _REPLACING:
        return ()
    facts = suppose(case.faults, case.world, policy)
    pairs = buddies({rank: Location(node, node) for rank, node in facts.nodes.items()})
    lost = {rank for rank in facts.culprits if pairs.get(rank, rank) in facts.culprits}
    what = "what a rank held alone (FSDP on one mesh dimension, say)"
    if not lost:
        return (f"{what} comes from its buddy on another node, and no step is lost",)
    return (f"{what} is lost with its buddy ({ranks_text(lost)}): all go back to the next source of restore",)


def _copies_left(policy: Policy, case: Supposition, decision: Decision | None) -> tuple[str, ...]:
    """Say where state comes from that no other rank holds, if the policy asks for copies in host memory."""
    if RestoreSource.HOST_COPY not in policy.restore or decision is None or decision.rung in _KEEPING_STATE:
        return ()
    facts = suppose(case.faults, case.world, policy)
    if not facts.culprits or not facts.resilient:
        return ()
    left = set(facts.nodes_lost)
    if decision.rung is Rung.RECOVER:  # the ranks of those at fault get other nodes
        left |= {facts.nodes[rank] for rank in facts.culprits}
    homeless = {rank for rank, node in facts.nodes.items() if node in left}
    what = "what no other rank holds comes from"
    if not homeless:
        return (f"{what} copies in host memory",)
    keepers = buddies({rank: Location(node, node) for rank, node in facts.nodes.items()})
    kept = policy.host_copy.copies > 1
    bare = {rank for rank in homeless if not kept or facts.nodes[keepers.get(rank, rank)] in left}
    if bare:
        why = f"the copies of {ranks_text(bare)} in host memory were on {nodes_text(left)}"
        return (f"{what} a checkpoint: {why}{'' if kept else ' only, as host_copy.copies is 1'}",)
    senders = ranks_text(keepers[rank] for rank in homeless)
    return (f"{what} copies in host memory; those of {ranks_text(homeless)} are with {senders} on other nodes",)


def _show_roles(policy: Policy) -> None:
    console = Terminal(soft_wrap=True)
    for party in Roles(policy).named:
        ladder = " -> ".join(entry.rung for entry in party.ladder)
        by = "fails over with the job" if party.with_job else ladder
        console.print(Text(f"role {party.role}, ranks {policy.roles[party.role].ranks}: {by}"))
    if policy.roles:
        console.print(Text(f"all other ranks: {' -> '.join(entry.rung for entry in policy.ladder)}\n"))


def _show(answers: list[Answer]) -> None:
    console = Terminal(soft_wrap=True)
    for each in answers:
        decision = each.decision
        console.print(Text(each.title, style="bold"))
        if decision is None:
            console.print(Text("  no process is touched"))
        else:
            rung = (decision.rung, f"bold {_STYLES[decision.rung]}")
            console.print(Text.assemble("  ", rung, f": {decision.reason}"))
        for skipped in () if decision is None else decision.skipped:
            console.print(Text(f"    not {skipped.rung}: {skipped.reason}", style="dim"))
        for said in each.said:
            console.print(Text(f"    {said}", style="dim"))
        console.print()


def policy_in(file: Path | None, role: str | None) -> Policy:
    """Return the policy of a file, or of one role in it; without a file, the default policy. Raises PolicyError."""
    if role is None:
        return default_policy() if file is None else load_policy(file)
    if file is None:
        raise PolicyError("--role names a role of FILE; write the FILE, too")
    job = load_roles(file)
    found = job.role(role)
    if found is None:
        raise PolicyError(f"{file}: there is no role {role[:64]!r}; its roles: {', '.join(job.names)}")
    return found.policy


def show_checked_roles(console: Console, file: Path, job: JobOfRoles) -> None:
    """Print what a file that is right says of each role, and what is perhaps not meant."""
    console.print(Text.assemble(str(file), ": ", ("ok", "green"), f" ({len(job.roles)} roles)"))
    for role in job.roles:
        console.print(Text(f"  {role.name}: {_shape(role)}, {_ladder(role)}"))
    notes = list(advice_on_roles(job))
    for role in job.roles:
        notes += [f"roles.{role.name}: {note}" for note in advice(role.policy)] if not role.with_job else []
    for note in notes:
        console.print(Text.assemble(str(file), ": ", ("note", "yellow"), f": {note}"))


def _shape(role: PlannedRole) -> str:
    given = role.given
    spares = f" and {given.spares} to spare" if given.spares else ""
    return f"{Path(given.script).name} on {given.ranks} ranks, nodes: {given.nnodes}{spares}"


def _ladder(role: PlannedRole) -> str:
    if role.given.ladder is None:
        return "fails over with the job"
    return " -> ".join(entry.rung for entry in role.given.ladder)


@command.command("from-acjob")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the policy here and not to stdout.")
@click.option("--force", is_flag=True, help="Let --output replace a file that is there.")
@click.option("--job", metavar="NAME", help="Which AscendJob, where FILE has several (metadata.name).")
def from_acjob(*, file: Path, output: Path | None, force: bool, job: str | None) -> None:
    """Translate the AscendJob (acjob) in FILE into a midstep policy; - reads it from stdin.

    Understood are the labels and annotations of MindCluster's recovery, runPolicy.backoffLimit, and a few values of
    the pod templates. The policy goes to stdout (or to --output), each key with the line that it comes from. What has
    no counterpart, and what midstep does differently, goes to stderr and into the policy's comments; docs/acjob.md
    has the whole table.

    Exit status: 0 when the policy was made, 1 when FILE is wrong, 2 when the command line is.

    \b
    midstep policy from-acjob training.yaml --output policy.yaml
    kubectl get acjob my-job -o yaml | midstep policy from-acjob -
    midstep policy explain policy.yaml
    """
    try:
        found = translate(_text_of(file), "stdin" if str(file) == "-" else str(file), job)
        if output is not None:
            _write_new(output, found.text, force=force)
    except PolicyError as error:
        echo(str(error), err=True)
        sys.exit(EXIT_WRONG_FILE)
    if output is None:
        click.echo(found.text, nl=False)
    for note in found.notes:
        echo(str(note), err=True)


for each in (apply, set_keys, in_force):
    command.add_command(each)


def _text_of(file: Path) -> str:
    if str(file) != "-":
        return read_text(file)
    return decoded_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "stdin")


def _write_new(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PolicyError(f"{path}: is there already, and nothing was written; --force replaces it") from error
    except OSError as error:
        raise PolicyError(f"{path}: cannot be written: {error.strerror or error}") from error
