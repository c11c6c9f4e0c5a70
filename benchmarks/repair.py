"""How fast lost state comes back: a repair's transfer beside what the transport alone does, in the same processes."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from midstep.benchmarks import figures
from midstep.benchmarks.peers.plan import free_port
from midstep.benchmarks.repair_job import SHAPES, Order

LIMIT_S = 300.0
COLUMNS = (
    *(
        "MB",
        "sources",
        "repair, GB/s",
        "over pair links, GB/s",
        "transport alone, GB/s",
        "share",
        "share over pair links",
    ),
    "CPU ms of all: repair, over pair links, transport",
    *("open, accept, adopt, ms", "extra MB: newcomer, source"),
)
WARM_UP = 2  # rounds that are not counted: the first of everything


def numbers(_: click.Context, parameter: click.Parameter, given: str) -> tuple[int, ...]:
    """Read a list of numbers with commas."""
    try:
        found = tuple(map(int, given.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{error}") from error
    if parameter.name == "sizes" and (unknown := set(found) - set(SHAPES)):
        raise click.BadParameter(f"no size {sorted(unknown)[0]}; there are {', '.join(map(str, SHAPES))}")
    if min(found) < 1:
        raise click.BadParameter("at least 1")
    return found


def measure(megabytes: int, sources: int, rounds: int) -> list[dict[str, Any]]:
    """Run all processes; return what each wrote down, the newcomer as the last. Raises ClickException."""
    port = free_port()
    script = str(Path(__file__).with_name("repair_job.py"))
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        notes = [Path(folder) / f"{rank}.json" for rank in range(sources + 1)]
        processes = []
        for rank, path in enumerate(notes):
            order = msgspec.json.encode(Order(rank, sources, port, megabytes, rounds + WARM_UP, str(path)))
            processes.append(subprocess.Popen([sys.executable, script, order.decode()]))
        try:
            for process in processes:
                if process.wait(LIMIT_S) != 0:
                    raise click.ClickException(f"a process ended with status {process.returncode}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(path.read_text()) for path in notes]


def cell(megabytes: int, sources: int, repeat: int) -> dict[str, Any]:
    """Return the figures of one size from so many sources, as the newcomer has them."""
    *senders, newcomer = measure(megabytes, sources, repeat)
    rounds = newcomer["rounds"][WARM_UP:]
    sent = [each for sender in senders for each in sender["rounds"][WARM_UP:]]
    stages = {"open": statistics.median(each["stages"]["open_shard"] for each in sent)}
    for name in ("accept", "adopt"):
        stages[name] = statistics.median(each["stages"][f"{name}_shard"] for each in rounds)
    return {
        "size_bytes": newcomer["size_bytes"],
        "sources": sources,
        "repair_bytes_per_s": figures.spread([each["repair"] for each in rounds]),
        "pairs_bytes_per_s": figures.spread([each["pairs"] for each in rounds]),
        "transport_bytes_per_s": figures.spread([each["raw"] for each in rounds]),
        "share": figures.spread([each["repair"] / each["raw"] for each in rounds]),
        "pairs_share": figures.spread([each["pairs"] / each["raw"] for each in rounds]),
        "stages_s": stages,
        "cpu_s": {
            kind: statistics.median(each[f"{kind}_cpu_s"] for each in rounds)
            + len(senders) * statistics.median(each[f"{kind}_cpu_s"] for each in sent)
            for kind in ("repair", "pairs", "raw")
        },
        "extra_bytes": {
            "newcomer": max(each["extra_bytes"] for each in rounds),
            "source": max(each["extra_bytes"] for each in sent),
        },
    }


def line(found: dict[str, Any]) -> str:
    """Return the figures of a cell as a row of a table."""
    names = ("repair", "pairs", "transport")
    speeds = " | ".join(figures.text(found[f"{name}_bytes_per_s"], 1e-9) for name in names)
    extra = ", ".join(f"{extra / 1e6:.0f}" for extra in found["extra_bytes"].values())
    python = ", ".join(f"{1000 * spent:.1f}" for spent in found["stages_s"].values())
    share = f"{figures.text(found['share'])} | {figures.text(found['pairs_share'])}"
    cpu = ", ".join(f"{1000 * spent:.0f}" for spent in found["cpu_s"].values())
    size = f"{found['size_bytes'] / 1e6:.0f}"
    return f"| {size} | {found['sources']} | {speeds} | {share} | {cpu} | {python} | {extra} |"


@click.command(context_settings={"show_default": True})
@click.option("--sizes", default="126", callback=numbers, help="Megabytes of state, of 10, 126 and 1000; with commas.")
@click.option("--sources", default="1", callback=numbers, help="Ranks that have the state; with commas.")
@click.option("--repeat", type=click.IntRange(min=1), default=15, help="Repairs of each kind.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to FILE.")
def main(*, sizes: tuple[int, ...], sources: tuple[int, ...], repeat: int, file: Path | None) -> None:
    """Measure the transfer of a repair beside the transport alone.

    Processes over gloo on this machine; a GPT with Adam's state. By turns the bytes move 4 MiB at a time into memory
    that was used before, and as a repair moves them, with checksums, after a link-up, into the memory of a process that
    has no optimizer state yet: over the group of all ranks, and over links between pairs, as what moves early does. All
    is measured at the receiver.
    """
    click.echo(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    cells = []
    for megabytes in sizes:
        for count in sources:
            cells.append(cell(megabytes, count, repeat))
            click.echo(line(cells[-1]))
    if file is not None:
        file.write_text(json.dumps({"cells": cells, "machine": figures.machine()}, indent=2))


if __name__ == "__main__":
    main()
