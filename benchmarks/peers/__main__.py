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

from . import environment, report, results, schedule, schedule_table, trial
from .course import Course
from .kinds import COLUMNS, NODES, Draw, Fault, Setting, Trial
from .outcome import NoRecovery
from .picture import draw, draw_progress
from .plan import Peer
from .registry import PEERS, SHARDED
from .results import Attempt, Results

ALL = {**PEERS, **SHARDED}
ALL_SHARDED = "hsdp"
Kind = TypeVar("Kind")
console = Console(stderr=True, highlight=False)


def listed(read: Callable[[str], Kind], _: click.Context, __: click.Parameter, given: str | None) -> tuple[Kind, ...]:
    """Read a list with commas; none for an option that was not given."""
    if given is None:
        return ()
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


def one_fault(given: str) -> Fault:
    """Return a sort of fault, or that there is none."""
    if (fault := Fault(given)) is Fault.SCHEDULED:
        raise ValueError("many faults a run are asked for with --schedule")
    return fault


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
                came = trial.run(each, ALL[each.peer].plan, programs, limit_s)
                console.print(f"{each}: {report.in_short(came)}")
                if isinstance(came, Course):
                    found.attempts.append(Attempt(each, foreign, course=came))
                else:
                    found.attempts.append(Attempt(each, foreign, came))
            except NoRecovery as error:
                found.attempts.append(Attempt(each, foreign, why=str(error), course=error.course))
                console.print(f"{each}: {error}", style="red", markup=False)
            results.save(found, file)
            progress.advance(task)


def picture_of(found: Results, registry: Mapping[str, Peer], picture: Path | None) -> None:
    """Draw what was found: of single faults in the size of which there is most, or the last schedule."""
    if picture is None:
        return
    rows = report.rows_of(found, registry)
    sizes = [row.trial.ranks for row in rows if row.excess_s is not None]
    if sizes:
        draw(rows, registry, max(set(sizes), key=sizes.count), picture)
    scheduled = [each.trial for each in found.attempts if each.trial.fault is Fault.SCHEDULED]
    if scheduled and (drawn := scheduled[-1].drawn) is not None:
        draw_progress(schedule_table.rows(found, registry, drawn, scheduled[-1].ranks), registry, picture)


def machine() -> dict[str, Any]:
    """Say on what it is measured."""
    import psutil

    return {"cores": psutil.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


@click.command(context_settings={"show_default": True})
@click.option("--peers", default=",".join(PEERS), callback=peers_named,
              help="Tools, with commas; `hsdp`: those that shard the model over two rows of ranks.")  # fmt: skip
@click.option("--settings", default="default,tuned", callback=partial(listed, Setting), help="As they come, tuned.")
@click.option("--faults", default="none,kill,exception,stop,sleep", callback=partial(listed, one_fault),
              help="What happens to rank 1, `none`: to measure steps, and for the bits; or what is in a schedule, "
              "also `node`.")  # fmt: skip
@click.option("--schedule", "seed", type=int, metavar="SEED",
              help="Many faults a run, drawn from SEED, the same for all; and a run without.")  # fmt: skip
@click.option("--faults-per-run", type=click.IntRange(min=1), default=8, help="Faults of a schedule.")
@click.option("--steps", type=click.IntRange(min=1), default=120, help="Steps under a schedule.")
@click.option("--ranks", "sizes", callback=partial(listed, size_of), show_default="2,4,8; under a schedule 4",
              help="Sizes of the world.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=0), show_default="3; under a schedule 1",
              help="Runs of each kind, in the file's included.")  # fmt: skip
@click.option("--limit", "limit_s", default=trial.LIMIT_S,
              help="Seconds after which a run has failed; under a schedule, without a new step.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path),
              help="Keep all figures in FILE, and go on where an earlier call with it was stopped.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw an SVG.")
@click.option("--keep", is_flag=True, help="Keep all that was found, for docs/benchmarks.md; then run `make docs`.")
def main(
    *, peers: tuple[str, ...], settings: tuple[Setting, ...], faults: tuple[Fault, ...], seed: int | None,
    faults_per_run: int, steps: int, sizes: tuple[int, ...], repeat: int | None, limit_s: float, file: Path | None,
    picture: Path | None, keep: bool,
) -> None:  # fmt: skip
    """Measure midstep beside the tools that a user would pick instead: one workload, each tool's own idioms.

    The peers are installed into an environment of their own, `.versions/peers`, when they are first asked for.
    """
    scheduled = seed is not None
    sizes = sizes or ((4,) if scheduled else (2, 4, 8))
    sharded = set(peers) <= set(SHARDED)
    if sharded and scheduled:
        raise click.UsageError("tools that shard the model have no runs under a schedule")
    if sharded and any(size < 2 * COLUMNS or size % COLUMNS for size in sizes):
        raise click.UsageError(f"a sharded model has rows of {COLUMNS} ranks, and at least two: give --ranks 4")
    if not scheduled and Fault.NODE in faults:
        raise click.UsageError("nodes are lost under a schedule: give --schedule")
    sorts = tuple(fault for fault in faults if fault is not Fault.NONE)
    drawn = Draw(seed, faults_per_run, steps, sorts) if seed is not None else None
    wanted = _scheduled(peers, settings, sizes, drawn) if drawn else _product(peers, settings, faults, sizes)
    launching.end_jobs_on_sigterm()
    found = results.load(file, machine())
    programs = programs_for(peers, found)
    possible = [
        each
        for each in wanted
        if each.peer not in found.not_installed and (each.setting, each.fault) not in ALL[each.peer].cannot
    ]
    left = found.left(possible, (1 if scheduled else 3) if repeat is None else repeat)
    run_all(list(left), found, file, programs=programs, limit_s=limit_s)
    registry = SHARDED if sharded else PEERS
    shown = found.of(scheduled=scheduled)
    click.echo(report.page(shown, registry))
    picture_of(shown, registry, picture)
    if keep:
        kept, kept_picture = report.places(scheduled=scheduled, sharded=sharded)
        results.save(report.without_logs(shown), kept)
        picture_of(shown, registry, kept_picture)


def _product(
    peers: tuple[str, ...], settings: tuple[Setting, ...], faults: tuple[Fault, ...], sizes: tuple[int, ...]
) -> list[Trial]:
    """Return all combinations; what is compared with each other stands side by side."""
    return [
        Trial(peer, setting, fault, ranks)
        for ranks in sizes
        for fault in faults
        for setting in settings
        for peer in peers
    ]


def _scheduled(
    peers: tuple[str, ...], settings: tuple[Setting, ...], sizes: tuple[int, ...], drawn: Draw
) -> list[Trial]:
    """Return, for each size, all tools without a fault, as they come, and then all under the schedule."""
    calm = schedule_table.undisturbed(drawn)
    if Fault.NODE in drawn.sorts and any(ranks % NODES for ranks in sizes):
        raise click.UsageError(f"where nodes are lost there are {NODES}, of as many ranks each")
    try:
        schedule.draw(drawn, sizes[0])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return [
        trial
        for ranks in sizes
        for trial in (
            *(Trial(peer, Setting.DEFAULT, Fault.NONE, ranks, calm) for peer in peers),
            *(Trial(peer, setting, Fault.SCHEDULED, ranks, drawn) for setting in settings for peer in peers),
        )
    ]


if __name__ == "__main__":
    main()
