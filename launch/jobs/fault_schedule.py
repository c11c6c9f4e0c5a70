"""Faults on purpose from a file: `midstep run --faults FILE`.

```
faults:
  - {rank: 1, do: memory-persistent, at: forward, step: 40}
  - {node: node1, do: link-down, at: collective, operation: allreduce, group: [0, 1, 2, 3], rate: 0.001}
```
"""

from pathlib import Path
from typing import Annotated

import msgspec

from ...policies.yaml_text import read_text, read_tree
from ...protocol.bounds import LARGEST_COUNT, Count, Rank
from ...protocol.errors import ConfigurationError
from ...protocol.injection import ArmedFault, FaultAction, InjectionPoint


class ScheduledFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: of a rank, or of every rank that starts on a node. `life` is an older name of `incarnation`."""

    do: str
    rank: Rank | None = None
    node: str | None = None
    at: InjectionPoint | None = None
    step: Count | None = None
    incarnation: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)] | None = (
        None  # only this process of the rank, from 1
    )
    life: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)] | None = None
    operation: str = ""
    group: tuple[Rank, ...] = ()
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    faults: tuple[ScheduledFault, ...]


def load_schedule(path: Path, nodes: int, ranks_per_node: int) -> tuple[ArmedFault, ...]:
    """Read the faults of a job of this size. Raises ConfigurationError naming file and entry."""
    try:
        schedule = msgspec.convert(read_tree(read_text(path), str(path)), Schedule)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from error
    armed: list[ArmedFault] = []
    for number, entry in enumerate(schedule.faults):
        try:
            armed += _armed(entry, nodes, ranks_per_node)
        except ValueError as error:
            raise ConfigurationError(f"{path}: faults[{number}]: {error}") from error
    return tuple(armed)


def _armed(entry: ScheduledFault, nodes: int, ranks_per_node: int) -> list[ArmedFault]:
    action = FaultAction(entry.do.replace("-", "_"))
    point = entry.at
    if entry.operation or entry.group:
        if point not in {None, InjectionPoint.COLLECTIVE}:
            raise ValueError(f"operation and group are of a collective, and `at` is {point}")
        point = InjectionPoint.COLLECTIVE
    if point is None:
        point = InjectionPoint.FORWARD
    incarnation = entry.life if entry.incarnation is None else entry.incarnation
    return [
        ArmedFault(rank, action, point, entry.step, incarnation, entry.operation, entry.group, entry.rate)
        for rank in _ranks(entry, nodes, ranks_per_node)
    ]


def _ranks(entry: ScheduledFault, nodes: int, ranks_per_node: int) -> list[int]:
    if (entry.rank is None) == (entry.node is None):
        raise ValueError("name either a rank or a node")
    if entry.rank is not None:
        if entry.rank >= nodes * ranks_per_node:
            raise ValueError(f"there is no rank {entry.rank}; the job has {nodes * ranks_per_node}")
        return [entry.rank]
    names = [f"node{number}" for number in range(nodes)]
    if entry.node not in names:
        raise ValueError(f"no rank starts on {entry.node}; the nodes are {', '.join(names)}")
    first = names.index(entry.node) * ranks_per_node
    return list(range(first, first + ranks_per_node))
