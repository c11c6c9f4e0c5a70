"""A job of several roles, each with a script, a world and a ladder of its own: its file, checked as a whole.

The file is a policy whose `roles` have scripts. What it says beside them holds for all roles; what a role says under
`policy` holds for that role alone. Each role becomes a job with the policy that follows from both.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ..protocol.errors import PolicyError
from ..protocol.types import Rung
from .code_files import with_codes_spelled_out
from .reading import Problem, problems_of
from .rules import ROLE_NAME, broken_rules
from .schema import Budget, Count, CountOrZero, Policy, RungPolicy
from .yaml_text import read_tree, refuse

STOP_ONLY = (RungPolicy(Rung.STOP),)
UNLIMITED = Budget(per_job=None)  # of the role; the job's own budget counts as well
_OWN_KEYS = ("roles", "until")  # the rest is policy
_VARIABLE = re.compile(r"[^\s=\0]+")


class ScriptedRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One role as the file has it: what runs, on how many ranks and nodes, and how it recovers.

    `ladder` None: a failure of the role restarts all roles. `resources`: what Ray reserves for each of its nodes.
    """

    script: str
    ranks: Count
    nnodes: Count = 1
    spares: CountOrZero = 0
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    env: dict[str, str] = {}
    max_restarts: CountOrZero = 0
    ladder: tuple[RungPolicy, ...] | None = None
    resources: dict[str, float] = {}


class RolesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the file that are not those of a policy. `until`: the roles that have to finish; empty: all."""

    roles: dict[str, ScriptedRole]
    until: tuple[str, ...] = ()


class PlannedRole(msgspec.Struct, frozen=True):
    """A role that can be started: what the file says of it, and the whole policy of its world.

    `failover`: how often it may have all roles restarted; None: when its own rungs are spent, the job ends.
    """

    name: str
    given: ScriptedRole
    policy: Policy
    failover: Budget | None

    @property
    def with_job(self) -> bool:
        """Return whether it fails over with the job at once, as it has no ladder."""
        return self.given.ladder is None

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each of its nodes."""
        return self.given.ranks // self.given.nnodes


class JobOfRoles(msgspec.Struct, frozen=True):
    """The whole file. `restarts`: how often all roles may be restarted together; None: never."""

    roles: tuple[PlannedRole, ...]
    until: tuple[str, ...]
    restarts: Budget | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the roles, as the file lists them."""
        return tuple(role.name for role in self.roles)

    def role(self, name: str) -> PlannedRole | None:
        """Return a role by its name."""
        return next((role for role in self.roles if role.name == name), None)


def is_job_of_roles(tree: object) -> bool:
    """Tell whether the tree of a file is of roles with scripts, and not a policy of one world."""
    roles = tree.get("roles") if isinstance(tree, dict) else None
    return isinstance(roles, dict) and any(isinstance(role, dict) and "script" in role for role in roles.values())


def parse_roles(text: str, source: str) -> JobOfRoles:
    """Make a job of roles of YAML text; `source` names it in errors.

    Raises PolicyError: one line for each mistake, with the path of its key, what was found and what is allowed.
    """
    tree = read_tree(text, source)
    if not is_job_of_roles(tree):
        raise PolicyError(
            f"{source}: roles: no role has a script; allowed: a mapping from each role's name to its script, ranks, ..."
        )
    common = with_codes_spelled_out({key: value for key, value in tree.items() if key not in _OWN_KEYS})
    roles, own = _without_policies(tree["roles"])
    problems = problems_of({**{key: tree[key] for key in _OWN_KEYS if key in tree}, "roles": roles}, RolesFile)
    problems += problems_of(common, Policy)
    for name, policy in own.items():
        problems += [_below(f"roles.{name}.policy", each) for each in _policy_problems(policy)]
    refuse(problems, source)
    file = msgspec.convert({"roles": roles, "until": tree.get("until", [])}, RolesFile)
    planned = {name: _planned(name, role, merged(common, own.get(name, {}))) for name, role in file.roles.items()}
    refuse(_rules_between(file) + _broken(_converted(common), planned), source)
    restart = _converted(common).rung(Rung.RESCHEDULE_JOB)
    return JobOfRoles(
        tuple(planned.values()), file.until or tuple(file.roles), None if restart is None else restart.budget
    )


def advice_on_roles(job: JobOfRoles) -> tuple[str, ...]:
    """Return what is allowed, and perhaps not meant."""
    notes = []
    for role in job.roles:
        restart = "restarts all roles" if job.restarts else "stops the job: the job's ladder has no reschedule_job"
        if role.with_job:
            notes.append(f"roles.{role.name} has no ladder: a fault of one of its ranks {restart}")
        elif role.failover is not None and job.restarts is None:
            notes.append(f"roles.{role.name}.ladder has reschedule_job, which {restart}")
        if role.failover is not None and role.policy.checkpoint.every_steps == 0:
            notes.append(f"roles.{role.name} writes no checkpoint: when all roles are restarted it begins at its first")
    return tuple(notes)


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both, `own` first; mappings are merged in the same way, anything else is replaced."""
    result = dict(common)
    for key, value in own.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def _without_policies(roles: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the roles without their `policy`, and those policies by role."""
    rest, own = {}, {}
    for name, role in roles.items():
        if isinstance(role, dict) and "policy" in role:
            own[name] = with_codes_spelled_out(role["policy"])
        rest[name] = {key: value for key, value in role.items() if key != "policy"} if isinstance(role, dict) else role
    return rest, own


def _policy_problems(policy: object) -> list[Problem]:
    problems = problems_of(policy, Policy)
    for key, instead in (("ladder", "the role's own `ladder`, beside `policy`"), ("roles", "roles of their own")):
        if isinstance(policy, dict) and key in policy:
            problems.append(Problem(key, f"not here; write it as {instead}"))
    return problems


def _below(key: str, problem: Problem) -> Problem:
    return Problem(f"{key}.{problem.key}" if problem.key else key, problem.text)


def _converted(tree: Mapping[str, Any]) -> Policy:
    return msgspec.convert(dict(tree), Policy)


def _planned(name: str, role: ScriptedRole, tree: Mapping[str, Any]) -> PlannedRole:
    """Return a role with its policy. The job that `reschedule_job` is about are all roles, so it is none of its own."""
    ladder = STOP_ONLY if role.ladder is None else role.ladder
    restart = next((entry for entry in ladder if entry.rung is Rung.RESCHEDULE_JOB), None)
    failover = UNLIMITED if role.ladder is None else None if restart is None else restart.budget
    own = tuple(entry for entry in ladder if entry is not restart)
    return PlannedRole(name, role, msgspec.structs.replace(_converted(tree), ladder=own), failover)


def _broken(common: Policy, planned: Mapping[str, PlannedRole]) -> list[Problem]:
    """Return the rules that are broken: those of what all share once, and of each role what it adds."""
    shared = broken_rules(common)
    problems = list(shared)
    for name, role in planned.items():
        written = msgspec.structs.replace(role.policy, ladder=STOP_ONLY if role.with_job else role.given.ladder or ())
        for problem in broken_rules(written):
            if problem in shared:
                continue
            of_ladder = problem.key.startswith("ladder")
            problems.append(_below(f"roles.{name}" if of_ladder else f"roles.{name}.policy", problem))
    return problems


def _rules_between(file: RolesFile) -> list[Problem]:
    problems = []
    for name, role in file.roles.items():
        key = f"roles.{name}"
        if not ROLE_NAME.fullmatch(name):
            allowed = "letters, digits, - and _, of which the first is a letter"
            problems.append(Problem(key[:80], f"is not the name of a role; allowed: {allowed}"))
        if role.ranks % role.nnodes:
            allowed = f"a multiple of nnodes, which is {role.nnodes}: each node has as many"
            problems.append(Problem(f"{key}.ranks", f"found {role.ranks}; allowed: {allowed}"))
        if role.module and role.no_python:
            problems.append(Problem(f"{key}.no_python", "found with module; a script is one or the other"))
        wrong = [variable for variable in role.env if _VARIABLE.fullmatch(variable) is None]
        problems += [Problem(f"{key}.env.{variable[:64]}", "is not the name of a variable") for variable in wrong]
    known = ", ".join(file.roles)
    for index, name in enumerate(file.until):
        if name not in file.roles:
            problems.append(Problem(f"until[{index}]", f"found {name[:64]!r}; allowed: the roles of this job: {known}"))
    return problems
