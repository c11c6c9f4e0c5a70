"""`midstep policy apply`, `set`, `in-force`: change the policy of a job while it runs, and see which it goes by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..controller.endpoints.control_requests import ApplyPolicyRequest, PolicyReply, PolicyRequest, Refused
from ..launch.reached_job import ReachedJob, reached
from ..policies.files import load_policy, parse_policy, render
from ..policies.schema import Policy, changes, may_change, obstacle
from ..policies.yaml_text import read_tree
from ..protocol.errors import MidstepError, PolicyError
from ..protocol.plain_yaml import write_yaml
from .display.plain import echo
from .frame import Command, operator_options, tell
from .orders import ASK_S, asker, reason

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _change_options(command: _Command) -> _Command:
    """Add what both commands take that change a policy."""
    yes = click.option("--yes", "-y", is_flag=True, help="Do not ask whether the changes that are shown are meant.")
    why = click.option("--why", required=True, metavar="TEXT", help="The reason; it is kept in the job's journal.")
    return why(yes(operator_options(command)))


@click.command("apply", cls=Command)
@click.argument("job")
@click.argument("file", type=click.Path(path_type=Path))
@_change_options
def apply(*, job: str, file: Path, why: str, yes: bool, controller: str | None, token_file: Path | None) -> None:
    """Have JOB go by the policy in FILE from its next decision on, while it runs.

    The file is checked, and what differs from the policy in force is shown and confirmed. Ladders, budgets, limits and
    the deadlines of a recovery can change; what running processes go by cannot, and is named. The change is in the
    journal with who asked for it and why: each later controller goes by it, also after `midstep resume`.

    JOB is a job's name, the beginning of one, or a job directory. With --controller it is the job's whole name, and the
    role has to be operator or admin.

    \b
    Examples:
      midstep policy apply gpt policy.yaml --why "more kills than we thought"
    """
    target = reached(job, controller, token_file)
    _apply(target, load_policy(file), why, yes=yes)


@click.command("set", cls=Command)
@click.argument("job")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@_change_options
def set_keys(
    *, job: str, settings: tuple[str, ...], why: str, yes: bool, controller: str | None, token_file: Path | None
) -> None:
    """Change single keys of the policy of JOB while it runs: a budget, a deadline.

    A rung of the ladder is named by its rung. All else is as in `midstep policy apply`.

    \b
    Examples:
      midstep policy set gpt ladder.recover.budget.per_job=20 --why "the cluster is serviced this week"
      midstep policy set gpt deadlines.start_s=120 sub_health=ignore --why "imports are slow today"
    """
    target = reached(job, controller, token_file)
    known = _in_force(target)
    tree = msgspec.to_builtins(known.policy)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise click.UsageError(f"{setting!r}: write KEY=VALUE, as in ladder.recover.budget.per_job=20.")
        _put(tree, key, read_tree(text, setting))
    _apply(target, parse_policy(write_yaml(tree), "the changed policy"), why, yes=yes, known=known)


@click.command("in-force", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@operator_options
def in_force(*, job: str | None, controller: str | None, token_file: Path | None) -> None:
    """Print the policy that a running JOB goes by now, with every key.

    \b
    Examples:
      midstep policy in-force gpt > policy.yaml
    """
    known = _in_force(reached(job, controller, token_file))
    echo(render(known.policy).rstrip("\n"))


def _in_force(target: ReachedJob) -> PolicyReply:
    reply = target.ask(PolicyRequest(), ASK_S)
    if isinstance(reply, PolicyReply):
        return reply
    why = reply.reason if isinstance(reply, Refused) else "the answer does not fit the request"
    raise MidstepError(f"{target.name}: {why}.")


def _apply(target: ReachedJob, policy: Policy, why: str, *, yes: bool, known: PolicyReply | None = None) -> None:
    """Show what changes, have it confirmed, and ask for it. Raises ClickException, MidstepError."""
    known = known or _in_force(target)
    found = changes(known.policy, policy)
    for change in found:
        echo(f"{change.text}{'' if may_change(change.key) else '   (cannot change while the job runs)'}")
    why_not = obstacle(found)
    if why_not is not None:
        raise click.ClickException(f"{target.name}: {why_not}.")
    if not yes:
        click.confirm(f"Have {target.name} go by this from its next decision on?", abort=True)
    request = ApplyPolicyRequest(policy, known.changes + 1, asker(target), reason(why))
    echo(tell(target, request, ASK_S))


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Change one key of a policy's tree. Raises PolicyError for one that is not there."""
    *above, last = key.split(".")
    place: Any = tree
    for name in above:
        if isinstance(place, list | tuple):
            place = next((each for each in place if isinstance(each, dict) and each.get("rung") == name), None)
        else:
            place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        raise PolicyError(f"{key}: there is no such key; `midstep policy in-force` prints them all.")
    place[last] = value
