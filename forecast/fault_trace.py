"""The faults of a forecast and their times: from a YAML file, a mean time between faults, or both.

The form of the file is these structs; it is checked as policy files are, every mistake at once. `docs/simulator.md`
explains the keys.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from ..policies.reading import Problem, problems_of
from ..policies.yaml_text import read_text, read_tree, refuse
from ..protocol.compat import StrEnum
from ..protocol.errors import PolicyError
from ..protocol.types import FaultLevel

Hours = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10_000_000)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Number = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class Kind(StrEnum):
    """A kind of fault."""

    PROCESS = "process"  # a training process ends
    EXCEPTION = "exception"  # a train function raises
    STALL = "stall"  # a rank hangs
    LINK = "link"  # a collective fails, with no rank at fault
    NODE = "node"  # a node is lost
    DEVICE = "device"  # a detector reports a device, at a level
    CORRUPTION = "corruption"  # what a rank holds is wrong, and nothing is raised


class TimedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: hours after the start of the job; rank and level are drawn where they are not given."""

    at_h: Hours
    kind: Kind
    rank: Number | None = None
    level: FaultLevel | None = None


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often each kind happens, as weights."""

    process: Weight = 15
    exception: Weight = 10
    stall: Weight = 5
    link: Weight = 10
    node: Weight = 10
    device: Weight = 50
    corruption: Weight = 0


class Levels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a device fault has each level, as weights."""

    RestartRequest: Weight = 25
    RestartBusiness: Weight = 25
    FreeRestartNPU: Weight = 10
    RestartNPU: Weight = 15
    SeparateNPU: Weight = 25


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long things take in the job that is forecast, in seconds."""

    step_s: Seconds = 10.0
    stop_s: Seconds = 2.0  # a survivor stops and cleans
    start_s: Seconds = 30.0  # a process starts and reaches its train function
    rejoin_s: Seconds = 10.0  # rebuild, repair and rollback, from a replica
    load_s: Seconds = 40.0  # the same, from a checkpoint
    host_copy_s: Seconds = 10.0  # a copy in host memory is whole, on another node too; so far apart `auto` has them
    checkpoint_s: Seconds = 5.0  # a checkpoint is written; training stands still for it, if it is not asynchronous
    vote_s: Seconds = 0.1  # what ranks hold is hashed for one vote; `auto` lets votes take 0.4 % of the time
    exit_seen_s: Seconds = 0.05
    device_seen_s: Seconds = 5.0  # from a device fault to its report
    node_start_s: Seconds = 180.0  # the platform brings a node that it was asked for
    node_repair_s: Seconds = 14_400.0  # a broken node is back, as a spare
    silent_seen_h: Hours = 24.0  # without votes, until a person sees that the training has gone wrong
    resubmit_s: Seconds = 1_800.0  # the job is started again after it has stopped
    replicas: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2  # ranks that hold the same shard


class FaultTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `mtbf_h`: mean hours between two faults of the job, in addition to `faults`.

    `silent_h`: mean hours between two silent corruptions of the job, in addition to both.
    """

    mtbf_h: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    silent_h: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    mix: Mix = Mix()
    levels: Levels = Levels()
    faults: tuple[TimedFault, ...] = ()
    model: Model = Model()


def load_trace(path: Path, ranks: int) -> FaultTrace:
    """Read a trace for a job of so many ranks. Raises PolicyError, every mistake on its own line."""
    source = str(path)
    tree = read_tree(read_text(path), source)
    if tree is None:
        return FaultTrace()
    refuse(problems_of(tree, FaultTrace), source)
    try:
        trace = msgspec.convert(tree, FaultTrace)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{source}: {error}") from error
    problems = [
        Problem(f"faults[{index}].rank", f"found {fault.rank}; allowed: 0 to {ranks - 1}, the ranks of this job")
        for index, fault in enumerate(trace.faults)
        if fault.rank is not None and fault.rank >= ranks
    ]
    for name in ("mix", "levels"):
        if not any(msgspec.to_builtins(getattr(trace, name)).values()):
            problems.append(Problem(name, "all weights are 0; at least one must be above"))
    refuse(problems, source)
    return trace


def faults_of(trace: FaultTrace, hours: float, ranks: int, chance: random.Random) -> Iterator[TimedFault]:
    """Yield the faults of `hours` in order of time, each with its rank and level."""
    faults = [fault for fault in trace.faults if fault.at_h < hours]
    if trace.mtbf_h is not None:
        at_h = chance.expovariate(1 / trace.mtbf_h)
        kinds, weights = zip(*msgspec.to_builtins(trace.mix).items(), strict=True)
        while at_h < hours:
            faults.append(TimedFault(at_h, Kind(chance.choices(kinds, weights)[0])))
            at_h += chance.expovariate(1 / trace.mtbf_h)
    if trace.silent_h is not None:
        apart = random.Random(chance.getrandbits(64))  # the other faults are those of a trace without
        at_h = apart.expovariate(1 / trace.silent_h)
        while at_h < hours:
            faults.append(TimedFault(at_h, Kind.CORRUPTION, apart.randrange(ranks)))
            at_h += apart.expovariate(1 / trace.silent_h)
    names, chances = zip(*msgspec.to_builtins(trace.levels).items(), strict=True)
    for fault in sorted(faults, key=lambda each: each.at_h):
        rank = chance.randrange(ranks) if fault.rank is None else fault.rank
        level = FaultLevel(chance.choices(names, chances)[0]) if fault.level is None else fault.level
        yield msgspec.structs.replace(fault, rank=rank, level=level)
