"""Bounds of values that come from outside, for all messages in one place.

The decoders check these bounds, so that nothing behind them ever sees a number that is none, a time in milliseconds, or
megabytes where a name belongs. They are far above what any job has, and far below what could do harm. What a process
makes itself is not checked until it is decoded.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

LARGEST_NUMBER = 2**63 - 1  # what the journal can hold
LARGEST_COUNT = 2**53  # steps, bytes, updates: also exact as a float
LARGEST_RANK = 2**24
LARGEST_PROCESS_ID = 2**32
LATEST_S = 1e12  # of any clock, and of any duration: seconds, not milliseconds
LONGEST_NAME = 512  # of a node, a code, a fault, a shard
LONGEST_TEXT = 10_000  # for people
LONGEST_PATH = 4096
MOST_OF_A_NODE = 4096  # processes
MOST_RANKS = 262_144  # of a job
MOST_NODES = 65_536
MOST_CONTROLLERS = 64  # an agent connects to each in turn
MOST_OF_A_RANK = 65_536  # shards, checkpoints, copies
MOST_PHASES = 64
MOST_LINKS = 8  # of a rank: those over which it has sent most
LONGEST_WORDS = 1024  # bytes of what a rank last printed
MOST_REPORTED = 6  # values of a step that are shown
LONGEST_REPORTED = 32  # bytes of the name of one
MOST_WITH_WORDS = 64  # ranks of a node
MOST_OF_NODES_WORDS = 8 * 1024  # bytes: the more ranks, the less of each

Number = Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Rank = Annotated[int, Meta(ge=0, le=LARGEST_RANK)]
ProcessId = Annotated[int, Meta(ge=0, le=LARGEST_PROCESS_ID)]
ExitStatus = Annotated[int, Meta(ge=-1024, le=1024)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Device = Annotated[int, Meta(ge=0, le=LARGEST_RANK)]
Stage = Annotated[int, Meta(ge=-1, le=LARGEST_RANK)]
Seconds = Annotated[float, Meta(ge=0, le=LATEST_S)]  # an infinity or what is no number is out of these bounds, too
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Words = Annotated[str, Meta(max_length=LONGEST_WORDS)]
PathName = Annotated[str, Meta(max_length=LONGEST_PATH)]
Phases = Annotated[dict[Name, Seconds], Meta(max_length=MOST_PHASES)]


def fits(value: msgspec.Struct) -> bool:
    """Say whether a receiver would take `value`: for what was read from memory that a process may have spoilt."""
    try:
        msgspec.convert(msgspec.to_builtins(value), type(value))
    except msgspec.ValidationError:
        return False
    return True
