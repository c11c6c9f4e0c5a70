"""`python -m benchmarks.peers`: runs all trials by turns, from where it was stopped, and shows the tables."""

import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from midstep.benchmarks import launching

from . import environment, report, results, trial
from .kinds import COLUMNS, Fault, Setting, Trial
from .outcome import NoRecovery
from .picture import draw
from .plan import Peer
from .registry import PEERS, SHARDED
from .results import Attempt, Results

ALL = {**PEERS, **SHARDED}
ALL_SHARDED = "hsdp"
Kind = TypeVar("Kind")
console = Console(stderr=True, highlight=False)


def listed(read: Callable[[str], Kind], _: click.Context, __: click.Parameter, given: str) -> tuple[Kind, ...]:
    """Read a list with commas."""
    try:
        return tuple(dict.fromkeys(map(read, given.split(","))))
    except (KeyError, ValueError) as error:
        raise click.BadParameter(f"{error} in {given!r}") from error


def peers_named(_: click.Context, __: click.Parameter, given: str) -> tuple[str, ...]:
    """Read a list of peers with one workload; `hsdp` is all that shard the model."""
    names = tuple(dict.fromkeys(given.replace(" ", "").split(","))) if given != ALL_SHARDED else tuple(SHARDED)
    for registry in (PEERS, SHARDED):
        if set(names) <= set(registry):
            return names
    there_are = f"there are {', '.join(PEERS)}; and, with another workload, {', '.join(SHARDED)}"
    raise click.BadParameter(f"{given!r}: {there_are}")


def size_of(given: str) -> int:
    """Return the size of a world in which rank 1 can fail, and another one has what it loses."""
    if int(given) < 2:
        raise ValueError("a world has at least 2 ranks")
    return int(given)


def programs_for(peers: tuple[str, ...], found: Results) -> Path:
    """Return where the programs are, after installing what is missing. midstep and torchrun are here already.

    Raises ClickException when no environment can be made.
    """
    if not any(ALL[name].requirements for name in peers):
        return Path(sys.executable).parent
    with console.status("the peers' environment"):
        try:
            found.not_installed = environment.make({name: ALL[name] for name in peers})
        except environment.NotMade as error:
            raise click.ClickException(str(error)) from error
    return environment.programs()


def run_all(left: list[Trial], found: Results, file: Path | None, *, programs: Path, limit_s: float) -> None:
    """Run them one after another, and keep what is found after each."""
    with launching.progress(console) as progress:
        task = progress.add_task("", total=len(left))
        for each in left:
            progress.update(task, description=str(each))
            foreign = launching.foreign_cores()
            try:
                outcome = trial.run(each, ALL[each.peer].plan, programs, limit_s)
                found.attempts.append(Attempt(each, foreign, outcome))
                console.print(f"{each}: excess {outcome.excess_s:.2f} s, step {outcome.step_s:.2f} s")
            except NoRecovery as error:
                found.attempts.append(Attempt(each, foreign, why=str(error)))
                console.print(f"{each}: {error}", style="red", markup=False)
            results.save(found, file)
            progress.advance(task)


def picture_of(found: Results, registry: Mapping[str, Peer], picture: Path | None) -> None:
    """Draw what was found in the size of which there is most."""
    rows = report.rows_of(found, registry)
    sizes = [row.trial.ranks for row in rows if row.excess_s is not None]
    if picture is not None and sizes:
        draw(rows, registry, max(set(sizes), key=sizes.count), picture)


def machine() -> dict[str, Any]:
    """Say on what it is measured."""
    import psutil

    return {"cores": psutil.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


@click.command(context_settings={"show_default": True})
@click.option("--peers", default=",".join(PEERS), callback=peers_named,
              help="Tools, with commas; `hsdp`: those that shard the model over two rows of ranks.")  # fmt: skip
@click.option("--settings", default="default,tuned", callback=partial(listed, Setting), help="As they come, tuned.")
@click.option("--faults", default="none,kill,exception,stop,sleep", callback=partial(listed, Fault),
              help="What happens to rank 1; `none` measures steps, and the bits to compare with.")  # fmt: skip
@click.option("--ranks", "sizes", default="2,4,8", callback=partial(listed, size_of), help="Sizes of the world.")
@click.option("--repeat", type=click.IntRange(min=0), default=3, help="Runs of each kind, in the file's included.")
@click.option("--limit", "limit_s", default=trial.LIMIT_S, help="Seconds after which a run has failed.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path),
              help="Keep all figures in FILE, and go on where an earlier call with it was stopped.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw an SVG.")
@click.option("--keep", is_flag=True, help="Keep all that was found, for docs/benchmarks.md; then run `make docs`.")
def main(
    *, peers: tuple[str, ...], settings: tuple[Setting, ...], faults: tuple[Fault, ...], sizes: tuple[int, ...],
    repeat: int, limit_s: float, file: Path | None, picture: Path | None, keep: bool,
) -> None:  # fmt: skip
    """Measure midstep beside the tools that a user would pick instead: one workload, each tool's own idioms.

    The peers are installed into an environment of their own, `.versions/peers`, when they are first asked for.
    """
    sharded = set(peers) <= set(SHARDED)
    if sharded and any(size < 2 * COLUMNS or size % COLUMNS for size in sizes):
        raise click.UsageError(f"a sharded model has rows of {COLUMNS} ranks, and at least two: give --ranks 4")
    launching.end_jobs_on_sigterm()
    found = results.load(file, machine())
    programs = programs_for(peers, found)
    wanted = [Trial(*each) for each in _product(peers, settings, faults, sizes)]
    possible = [
        each
        for each in wanted
        if each.peer not in found.not_installed and (each.setting, each.fault) not in ALL[each.peer].cannot
    ]
    run_all(list(found.left(possible, repeat)), found, file, programs=programs, limit_s=limit_s)
    registry = SHARDED if sharded else PEERS
    click.echo(report.page(found, registry))
    picture_of(found, registry, picture)
    if keep:
        results.save(report.without_logs(found), report.KEPT_SHARDED if sharded else report.KEPT)
        picture_of(found, registry, None if sharded else report.PICTURE)


def _product(
    peers: tuple[str, ...], settings: tuple[Setting, ...], faults: tuple[Fault, ...], sizes: tuple[int, ...]
) -> list[tuple[str, Setting, Fault, int]]:
    """Return all combinations; what is compared with each other stands side by side."""
    return [
        (peer, setting, fault, ranks) for ranks in sizes for fault in faults for setting in settings for peer in peers
    ]


if __name__ == "__main__":
    main()
