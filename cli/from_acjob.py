"""`midstep policy from-acjob`: a MindCluster job's recovery settings as a policy."""

import sys
from pathlib import Path

import click

from ..policies.acjob.translation import translate
from ..policies.yaml_text import MAX_FILE_BYTES, decoded_text, read_text
from ..protocol.errors import PolicyError
from .display.plain import echo

EXIT_WRONG_FILE = 1


@click.command("from-acjob")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the policy here and not to stdout.")
@click.option("--force", is_flag=True, help="Let --output replace a file that is there.")
@click.option("--job", metavar="NAME", help="Which AscendJob, where FILE has several (metadata.name).")
def command(*, file: Path, output: Path | None, force: bool, job: str | None) -> None:
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
        found = translate(_text(file), "stdin" if str(file) == "-" else str(file), job)
        if output is not None:
            _write(output, found.text, force=force)
    except PolicyError as error:
        echo(str(error), err=True)
        sys.exit(EXIT_WRONG_FILE)
    if output is None:
        click.echo(found.text, nl=False)
    for note in found.notes:
        echo(str(note), err=True)


def _text(file: Path) -> str:
    if str(file) != "-":
        return read_text(file)
    return decoded_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "stdin")


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PolicyError(f"{path}: is there already, and nothing was written; --force replaces it") from error
    except OSError as error:
        raise PolicyError(f"{path}: cannot be written: {error.strerror or error}") from error
