"""`midstep token`: the secret that all machines of a job have."""

import os
import time
from pathlib import Path

import click

from ..launch.directories import checked_name
from ..protocol.identities import Role
from ..protocol.token import FullToken, Token, expiry_text, full, job_of, new_token, read_token, token_text
from .display.plain import echo
from .frame import Command, token_file_option
from .numbers import duration_s


@click.command("token", cls=Command)
@click.option("--job", metavar="NAME", help="Make a token for this job only; --rdzv-id and --job can be left out then.")
@click.option(
    "--expires",
    "lasts_s",
    callback=duration_s,
    metavar="DURATION",
    help="Let no node join, and no operator connect, after so long: 30m, 12h, 7d.",
)
@click.option(
    "--join-only",
    is_flag=True,
    help="Make of the job's token (--token-file, MIDSTEP_TOKEN) one with which nodes can join, and that can do nothing "
    "else.",
)
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    help="Make of the job's token one for an operator on another machine. A viewer may use `midstep status` and "
    "`report`, an operator also `stop`, `inject` and `detect`, an admin all.",
)
@click.option(
    "--renew",
    is_flag=True,
    help="Make of the job's token the one that replaces it, also while the job runs: with the old one, and what was "
    "made of it, no node joins and no operator connects any more. Nodes that have joined stay.",
)
@token_file_option
def command(
    *, job: str | None, lasts_s: int | None, join_only: bool, role: str | None, renew: bool, token_file: Path | None
) -> None:
    """Print a new token: one line, the secret of a job.

    Keep it in a file that only you can read, and give it to each machine of the job: as --token-file FILE, or in the
    environment variable MIDSTEP_TOKEN. The keys of the controller, and those with which nodes join, follow from it.

    \b
        (umask 077; midstep token > job.token)
        midstep token --role viewer --job demo --token-file job.token > viewer.token
        (umask 077; midstep token --renew --token-file job.token > new) && mv new job.token

    No token follows from one that --join-only or --role has made.
    """
    if join_only + renew + (role is not None) > 1:
        raise click.UsageError("--join-only is for nodes, --role for operators, --renew for all: make several tokens.")
    if job is not None:
        checked_name(job)
    token: Token
    expires_s = 0 if lasts_s is None else int(time.time()) + lasts_s
    if renew:
        token = _renewed(job, token_file, expires_s)
    elif join_only or role is not None:
        secret, named = _to_start_from(job, token_file, lasts_s)
        token = secret.for_joining(named) if role is None else secret.for_role(named, Role(role))
    elif token_file is not None:
        raise click.UsageError(
            "--token-file is what --join-only, --role or --renew starts from; a new token has no other."
        )
    else:
        token = new_token(job=job or "", expires_s=expires_s)
    echo(token_text(token))
    if token.expires_s:
        who = "nodes can join" if role is None else "operators can connect"
        echo(f"{who} until {expiry_text(token.expires_s)}", err=True)


def _to_start_from(job: str | None, token_file: Path | None, lasts_s: int | None) -> tuple[FullToken, str]:
    """Return the job's token, and the name of the job."""
    if lasts_s is not None:
        raise click.UsageError("--expires belongs to the full token: its controller is what refuses.")
    token = _given(token_file)
    return token, job_of(token, job)


def _renewed(job: str | None, token_file: Path | None, expires_s: int) -> FullToken:
    """Return the token that replaces the job's."""
    token = _given(token_file)
    if job is not None and job != token.job:
        raise click.UsageError("--job: a token that is renewed stays one of the same job.")
    return token.renewed(expires_s)


def _given(token_file: Path | None) -> FullToken:
    token = read_token(token_file, os.environ)
    if token is None:
        raise click.UsageError("--join-only, --role and --renew need the job's token: --token-file or MIDSTEP_TOKEN.")
    return full(token)
