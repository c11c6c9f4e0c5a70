"""Reads and writes policy files, and what they name; with `code_files.py` and `yaml_text.py`, all that touches one."""

from pathlib import Path

import msgspec

from ..protocol.errors import PolicyError
from ..protocol.plain_yaml import write_yaml
from .code_files import load_codes, with_codes_spelled_out
from .reading import problems_of
from .rules import broken_rules
from .schema import Policy, WebhookPolicy
from .scripted_roles import JobOfRoles, PlannedRole, is_job_of_roles, parse_roles
from .yaml_text import MAX_FILE_BYTES, read_text, read_tree, refuse

__all__ = ["MAX_FILE_BYTES", "load_policy", "load_policy_or_roles", "load_roles", "parse_policy", "render"]


def load_policy(path: str | Path) -> Policy:
    """Read the policy at `path`, and the code table that it names. Paths in it start at the policy's directory.

    Raises PolicyError, every mistake on its own line, when one of them is wrong.
    """
    path = Path(path)
    return _with_its_files(parse_policy(read_text(path), str(path)), path)


def load_roles(path: str | Path) -> JobOfRoles:
    """Read the job of roles at `path`, and what it names. Paths in it, of scripts too, start at the file's directory.

    Raises PolicyError, every mistake on its own line, when one of them is wrong.
    """
    path = Path(path)
    job = parse_roles(read_text(path), str(path))
    return msgspec.structs.replace(job, roles=tuple(_placed(role, path) for role in job.roles))


def load_policy_or_roles(path: str | Path) -> Policy | JobOfRoles:
    """Read a policy, or a job of roles, whichever the file is. Raises PolicyError."""
    tree = read_tree(read_text(path), str(path))
    return load_roles(path) if is_job_of_roles(tree) else load_policy(path)


def _placed(role: PlannedRole, path: Path) -> PlannedRole:
    given = role.given
    if not given.module and not given.no_python:
        given = msgspec.structs.replace(given, script=str((path.parent / given.script).absolute()))
    return msgspec.structs.replace(role, given=given, policy=_with_its_files(role.policy, path))


def _with_its_files(policy: Policy, path: Path) -> Policy:
    """Return a policy with the table of codes that it names, and with absolute paths. Raises PolicyError."""
    faults = policy.faults
    if faults.codes_file is not None:
        codes = {**load_codes(path.parent / faults.codes_file), **faults.codes}
        faults = msgspec.structs.replace(faults, codes=codes, codes_file=None)
    sources = tuple(str((path.parent / source).absolute()) for source in faults.sources)
    notify = msgspec.structs.replace(
        policy.notify, webhooks=tuple(_webhook_placed(each, path) for each in policy.notify.webhooks)
    )
    return msgspec.structs.replace(policy, faults=msgspec.structs.replace(faults, sources=sources), notify=notify)


def _webhook_placed(webhook: WebhookPolicy, path: Path) -> WebhookPolicy:
    header = None if webhook.header_file is None else str((path.parent / webhook.header_file).absolute())
    url = str((path.parent / webhook.url_file).absolute())
    return msgspec.structs.replace(webhook, url_file=url, header_file=header)


def parse_policy(text: str, source: str) -> Policy:
    """Make a policy of YAML text; `source` names it in errors. An empty text is the default policy.

    Raises PolicyError: one line for each mistake, with the path of its key, what was found and what is
    allowed.
    """
    tree = read_tree(text, source)
    if tree is None:
        return Policy()
    if is_job_of_roles(tree):
        raise PolicyError(
            f"{source}: roles: they have scripts, so this is a job of several roles and no policy of one world. Start "
            f"it with `midstep run --roles {source}`; `midstep policy show {source} --role NAME` has the policy of one."
        )
    tree = with_codes_spelled_out(tree)
    refuse(problems_of(tree), source)
    try:
        policy = msgspec.convert(tree, Policy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{source}: {error}") from error
    refuse(broken_rules(policy), source)
    return policy


def render(policy: Policy) -> str:
    """Return `policy` as YAML text with every key; `parse_policy` makes the same policy of it."""
    tree = msgspec.to_builtins(policy)
    return write_yaml(tree)
