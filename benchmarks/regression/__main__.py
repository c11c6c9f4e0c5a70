"""`make bench`: run the benchmarks, write their figures into one file, and compare it with the last kept one."""

import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from midstep.benchmarks import figures, launching

from . import comparison, record, text
from .record import Figure, Record
from .sources import SOURCES

FOLDER = Path(__file__).parents[1]
LIMIT_S = 3600.0


def names(_: click.Context, __: click.Parameter, given: str) -> tuple[str, ...]:
    """Read a list of benchmarks."""
    asked = tuple(dict.fromkeys(given.split(",")))
    if unknown := set(asked) - set(SOURCES):
        raise click.BadParameter(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    return asked


def run(name: str, *, short: bool) -> dict[str, Any]:
    """Run one benchmark; return its JSON. Raises ClickException when it fails."""
    source = SOURCES[name]
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        file = Path(folder) / "found.json"
        arguments = (source.short if short else source.arguments).split()
        command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments, "--json", str(file)]
        click.echo(f"--- {name} {' '.join(arguments)}")
        if subprocess.run(command, timeout=LIMIT_S, check=False).returncode != 0:
            raise click.ClickException(f"benchmarks/{name}.py failed; nothing was written")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def commit() -> str:
    """Return what is measured: the commit, with a plus if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


def measure(asked: tuple[str, ...], *, short: bool) -> Record:
    """Run what was asked for; return its figures."""
    found: list[Figure] = []
    foreign = []
    for name in asked:
        foreign.append(launching.foreign_cores())
        found += SOURCES[name].figures(run(name, short=short))
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Record(day, commit(), figures.machine(), max(foreign), tuple(found))


@click.command(context_settings={"show_default": True})
@click.option("--only", "asked", default=",".join(SOURCES), callback=names, help="Benchmarks, with commas.")
@click.option("--short", is_flag=True, help="As few repetitions as possible: to see that it works.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/bench.json"),
              help="Where the figures go.")  # fmt: skip
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Compare with this file instead of the last one in benchmarks/history.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the figures in benchmarks/history; `make docs` then shows them.")
def main(*, asked: tuple[str, ...], short: bool, file: Path, against: Path | None, keep: bool) -> None:
    """Measure recovery, overhead, repair, the recovery machine and the controller; compare with the last kept figures.

    A figure has moved if no repetition of one day is among those of the other. Values that are no ratio to something
    measured in the same minutes are judged on the same, quiet machine only. Exit status 1: something got worse.
    """
    launching.end_jobs_on_sigterm()
    earlier = [record.read(against)] if against is not None else record.kept()
    now = measure(asked, short=short)
    record.write(now, file)
    click.echo(f"\nwritten to {file}; foreign cores {now.foreign_cores:.2f}")
    if keep:
        click.echo(f"kept as {record.keep(now)}")
    if not earlier:
        click.echo("nothing was kept before: nothing to compare with")
        return
    movements = comparison.compare(earlier[-1], now)
    click.echo("\n".join(text.lines(movements)))
    if comparison.got_worse(movements):
        sys.exit(1)


if __name__ == "__main__":
    main()
