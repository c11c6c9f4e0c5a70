"""Every message on the wire: reports go up, commands go down, and an envelope around each.

All are members of one tagged union, `Message`, so that unknown or malformed bytes fail to decode instead of meaning
something else.
"""

import msgspec

from .bounds import Count, Name, Number
from .commands import (
    ArmFault,
    BuildAhead,
    CheckNode,
    CreateNode,
    DeleteNode,
    EndJob,
    IntroduceNode,
    KillNode,
    ProbeProgress,
    Quiesce,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StopProcess,
    WelcomeNode,
)
from .enrolment import Enrolment
from .reports import (
    CheckpointSaved,
    FaultReported,
    NewcomerWaiting,
    NodeChecked,
    NodeGoing,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    NodeRefused,
    NodeStaying,
    NodeWords,
    PlatformJoined,
    ProcessesPrepared,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    StepCommitted,
    StoreMoved,
)

__all__ = [
    "Ack",
    "ArmFault",
    "BuildAhead",
    "CheckNode",
    "CheckpointSaved",
    "Command",
    "CreateNode",
    "DeleteNode",
    "EndJob",
    "Envelope",
    "FaultReported",
    "IntroduceNode",
    "KillNode",
    "Message",
    "NewcomerWaiting",
    "NodeChecked",
    "NodeGoing",
    "NodeHeartbeat",
    "NodeJoined",
    "NodeLost",
    "NodeRefused",
    "NodeStaying",
    "NodeWords",
    "PlatformJoined",
    "ProbeProgress",
    "ProcessExited",
    "ProcessStarted",
    "ProcessesPrepared",
    "ProgressReported",
    "Quiesce",
    "RankFinished",
    "RankJoined",
    "RankQuiesced",
    "RankReady",
    "Rejoin",
    "Release",
    "Report",
    "Resume",
    "SaveCheckpoint",
    "StartProcess",
    "StepCommitted",
    "StopProcess",
    "StoreMoved",
    "WelcomeNode",
]


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The message `number` of the receiver's session `session` has been taken in (durably, by a controller)."""

    session: Number
    number: Number


Report = (
    NodeJoined
    | NodeLost
    | NodeRefused
    | PlatformJoined
    | NodeGoing
    | NodeStaying
    | NodeChecked
    | StoreMoved
    | ProcessesPrepared
    | ProcessStarted
    | NewcomerWaiting
    | ProcessExited
    | FaultReported
    | RankJoined
    | RankQuiesced
    | RankReady
    | StepCommitted
    | RankFinished
    | CheckpointSaved
    | ProgressReported
    | NodeHeartbeat
)

Command = (
    WelcomeNode
    | IntroduceNode
    | StartProcess
    | BuildAhead
    | StopProcess
    | Quiesce
    | Rejoin
    | Resume
    | Release
    | SaveCheckpoint
    | ProbeProgress
    | ArmFault
    | CheckNode
    | CreateNode
    | DeleteNode
    | KillNode
    | EndJob
)

Message = Report | NodeWords | Command | Ack | Enrolment

NEVER_JOURNALED = (NodeHeartbeat, NodeWords)
"""What is of no worth a second later, or is journaled only as a part of something else."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What is on the wire: a message with its sender, term, generation and number.

    `session` is the sender's start in nanoseconds; a higher one replaces a lower one. `number` is 0 for messages that
    are neither acknowledged nor retried. `age_s`: since its sender first said it, on the sender's own monotonic clock.
    """

    version: int
    job: Name
    sender: Name
    receiver: Name
    term: Count
    generation: Count
    session: Number
    number: Number
    body: Message
    age_s: float = 0.0
