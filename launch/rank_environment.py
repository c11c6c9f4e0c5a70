"""Variables for the environment of the ranks: from `--env`, from files, or from the launcher's own environment.

A value on the command line is shown to every user of the machine by `ps`. Secrets come by the other two ways.
"""

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from ..policies.yaml_text import read_text, read_tree
from ..protocol.bounds import LARGEST_COUNT, Count, Rank
from ..protocol.errors import ConfigurationError
from ..protocol.faults import ArmedFault, FaultAction, InjectionPoint

MAX_FILE_BYTES = 1 << 20
READABLE_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH
_VARIABLE = re.compile(r"[^\s=\0]+")
_log = logging.getLogger(__name__)


def named_variables(given: Iterable[str]) -> dict[str, str]:
    """Return the variables of `--env`: NAME=VALUE, or NAME alone for the value that it has here.

    Raises ConfigurationError, which never says a value.
    """
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if _VARIABLE.fullmatch(name) is None:
            raise ConfigurationError(
                f"--env {name!r}: not the name of a variable. Write --env NAME=VALUE, or --env NAME for the value that "
                "it has here."
            )
        if not equals and name not in os.environ:
            raise ConfigurationError(f"--env {name}: there is no variable {name} here. Export it, or give a value.")
        variables[name] = value if equals else os.environ[name]
        try:
            variables[name].encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"--env {name}: its value is not UTF-8 text.") from error
    return variables


def variables_of_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the variables of `--env-file`; what a later file says counts.

    Warns of a file that others can read. Raises ConfigurationError naming file and line, and never a value.
    """
    variables: dict[str, str] = {}
    for path in paths:
        variables.update(_pairs(path, _text(path)))
    return variables


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"--env-file {path}: cannot be read: {error.strerror or error}. Name a file that you may read."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"--env-file {path}: more than {MAX_FILE_BYTES} bytes. Is it a file of NAME=VALUE lines?"
        )
    if stat.S_ISREG(status.st_mode) and status.st_mode & READABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        _log.warning("%s can be read by others (mode %o); if it holds secrets, chmod 600 it", path, mode)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"--env-file {path}: line {line}: not UTF-8 text.") from error


def _pairs(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.removesuffix("\r").lstrip(" \t")
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.partition("=")
        if not equals or _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise ConfigurationError(
                f"--env-file {path}: line {number}: not NAME=VALUE. Write it without `export` and without blanks "
                "before the equals sign; the value is taken as it is, and quotes around it would be part of it."
            )
        yield name, value


class ScheduledFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: of a rank, or of every rank that starts on a node. `life` is an older name of `incarnation`."""

    do: str
    rank: Rank | None = None
    node: str | None = None
    at: InjectionPoint | None = None
    step: Count | None = None
    incarnation: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)] | None = None  # of the rank, from 1
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
