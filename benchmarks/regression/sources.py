"""The benchmarks that `make bench` runs, and the figures of their JSON that it follows. Pure: JSON in, figures out."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .record import Better, Figure


class Source(NamedTuple):
    """One benchmark: its command line, a shorter one for a try, and what is taken from its JSON."""

    arguments: str
    short: str
    figures: Callable[[Mapping[str, Any]], Iterator[Figure]]


def of_recovery(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Take the excess of a killed rank, and what part of torchrun's it is, round by round."""
    for ranks, ours in found["midstep"].items():
        excess = [run["recovery"]["excess_s"] for run in ours["runs"]]
        yield _figure(f"recovery, {ranks} ranks: excess", excess, "s")
        theirs = [run["recovery"]["excess_s"] for run in found.get("torchrun", {}).get(ranks, {}).get("runs", [])]
        if ratios := [own / other for own, other in zip(excess, theirs, strict=False)]:
            yield _figure(f"recovery, {ranks} ranks: excess to torchrun's", ratios, yardstick=True)


def of_overhead(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Take a step's ratios to plain DDP."""
    for ranks, ours in found["ranks"].items():
        for key, name in (("ratio", "step"), ("cpu_ratio", "CPU time of a step")):
            yield _spread(f"overhead, {ranks} ranks: {name} to plain DDP", ours[key], yardstick=True)


def of_repair(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Take the share of the transport's rate that a repair comes to."""
    yield _spread("repair: share of the transport", found["cells"][0]["share"], better=Better.HIGHER, yardstick=True)


def of_machine(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Take the CPU time of an incident in the recovery machine."""
    for row in found["rows"]:
        spread = {"median": row["cpu_s"], "min": row["cpu_s_least"], "max": row["cpu_s_greatest"]}
        yield _spread(f"recovery machine, {row['ranks']} ranks: CPU of an incident", spread, "s")


def of_scale(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Take what a lost rank costs a controller over real sockets, and when the last rank has its orders."""
    for row in found["rows"]:
        for key, name in (("cpu_s", "CPU of the controller"), ("quiesce_s", "last Quiesce")):
            values = [lost[key] for lost in row["losses"]["a rank"]]
            yield _figure(f"scale, {row['ranks']} ranks, one lost: {name}", values, "s")


SOURCES = {
    "recovery": Source("--ranks 4 --repeat 5", "--ranks 2 --repeat 1 --steps 12", of_recovery),
    "overhead": Source(
        "--ranks 4 --repeat 5 --steps 30 --no-jobs", "--ranks 2 --repeat 1 --steps 4 --no-jobs", of_overhead
    ),
    "repair": Source("--repeat 15", "--repeat 3", of_repair),
    "machine": Source("--ranks 1000 10000 --repeats 5", "--ranks 100 --repeats 2", of_machine),
    "scale": Source("--ranks 80 --repeat 5 --idle 2", "--ranks 16 --repeat 1 --idle 1", of_scale),
}


def _figure(name: str, values: Sequence[float], unit: str = "", *, yardstick: bool = False) -> Figure:
    return Figure(name, statistics.median(values), min(values), max(values), unit, Better.LOWER, yardstick)


def _spread(
    name: str, spread: Mapping[str, float], unit: str = "", *, better: Better = Better.LOWER, yardstick: bool = False
) -> Figure:
    return Figure(name, spread["median"], spread["min"], spread["max"], unit, better, yardstick)
