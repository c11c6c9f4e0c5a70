"""`midstep watch`: tell another program when a job's leader or phase changes."""

import os
import shlex
import subprocess
from pathlib import Path

import click
import msgspec

from ..launch.watching import EVERY_S, JobView, watch
from ..protocol.token import without_token
from .display.plain import echo
from .frame import Command, operator_options
from .numbers import seconds

HOOK_S = 60.0


@click.command("watch", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--on-change",
    "hook",
    metavar="COMMAND",
    help="Run this on each change, without a shell. MIDSTEP_JOB, MIDSTEP_LEADER, MIDSTEP_TERM and MIDSTEP_PHASE are in "
    "its environment, and the whole line is on its stdin.",
)
@click.option("--on-beat", is_flag=True, help="Print a line, and run the command, at each look, changed or not.")
@click.option(
    "--every",
    "every_s",
    type=seconds(0.1),
    default=EVERY_S,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@operator_options
def command(
    *,
    job: str | None,
    hook: str | None,
    on_beat: bool,
    every_s: float,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Print a line of JSON when a job's leader, term, phase or generation changes, until the job has ended.

    While no controller answers, the last answer is kept, with `"answered":false`; after 10 minutes of that it gives up.
    A command that fails or takes more than 60 s is reported on stderr, and the watch continues. In Python:
    `midstep.watch(callback)`.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and a token of any role will do.

    \b
    Examples:
      midstep watch demo
      midstep watch demo --on-change './page-me.sh --urgent'
      midstep watch --controller m0:29400,m1:29400 --token-file viewer.token
    """
    words = shlex.split(hook) if hook else []

    def changed(view: JobView) -> None:
        line = msgspec.json.encode(view)
        echo(line.decode())
        if words:
            _run(words, view, line)

    try:
        watch(changed, job, on_each_beat=on_beat, every_s=every_s, controller=controller, token_file=token_file)
    except KeyboardInterrupt:
        return


def _run(words: list[str], view: JobView, line: bytes) -> None:
    known = {"JOB": view.job, "LEADER": view.leader, "TERM": str(view.term), "PHASE": view.phase}
    environment = without_token(os.environ) | {f"MIDSTEP_{name}": value for name, value in known.items()}
    try:
        done = subprocess.run(words, input=line + b"\n", env=environment, timeout=HOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        echo(f"midstep watch: {words[0]}: {error}", err=True)
        return
    if done.returncode:
        echo(f"midstep watch: {words[0]} ended with status {done.returncode}", err=True)
