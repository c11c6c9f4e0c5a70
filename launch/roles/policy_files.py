"""`midstep policy` on the file of a job of several roles: what it says of each, and the policy of one."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ...policies.files import load_policy, load_roles
from ...policies.rules import advice
from ...policies.schema import Policy, default_policy
from ...policies.scripted_roles import JobOfRoles, PlannedRole, advice_on_roles
from ...protocol.errors import PolicyError


def role_option(command: Any) -> Any:
    """Add --role to a command."""
    return click.option(
        "--role",
        metavar="NAME",
        help="Of a job of several roles, whose scripts are in FILE: the role that is meant.",
    )(command)


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
