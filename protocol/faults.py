"""Faults: their kinds and levels, the report of one observation, patterns of exceptions, and faults that are injected.

Import kinds, levels and reports from `protocol.types`, with the other nouns. A pattern, in `configs/exceptions.yaml` or
in a policy, says what the text of an exception means. Injection points and actions are for tests, the demo and
`midstep inject`.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import MOST_OF_A_RANK, Count, Device, Name, Rank, Seconds, Share, Text
from .compat import StrEnum

LONGEST_CHARS = 200
EACH_TIME = "each_time"  # the code of a wrong gradient of a rank that is wrong again and again
OF_JOB = "job"  # the library of a pattern that a policy has
PatternText = Annotated[str, msgspec.Meta(min_length=3, max_length=LONGEST_CHARS)]
PatternName = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$")]


class FaultKind(StrEnum):
    """A kind of fault, as it was seen."""

    EXCEPTION = "exception"  # the train function raised
    REFUSED = "refused"  # midstep refuses something that the script asks for, and would refuse it again
    EXIT = "exit"  # the process ended
    STALL = "stall"  # the step clock stands still
    COMMUNICATION = "communication"  # a collective failed, and no rank is known to be at fault
    LINK_UP = "link_up"  # a communicator could not be built
    UNRESPONSIVE = "unresponsive"  # a command was not carried out before its deadline, or the process is stopped
    CORRUPTION = "corruption"  # a checksum was wrong, or a rank is at another step than it was ordered to
    ODD_COPY = "odd_copy"  # what a rank holds is not what the majority holds, or has changed by itself
    COPIES_DIFFER = "copies_differ"  # and a vote alone cannot say who is wrong
    WRONG_GRADIENT = "wrong_gradient"  # a rank computed another one than the repetitions of its step
    GRADIENTS_DIFFER = "gradients_differ"  # of a step and its repetition by a peer, and none can be blamed yet
    NODE_LOST = "node_lost"  # the node or its agent is gone
    START_FAILED = "start_failed"  # a replacement process never joined
    DEVICE = "device"  # a detector reported the device
    MEMORY = "memory"  # an uncorrectable error in device memory
    MEMORY_MULTI_BIT = "memory_multi_bit"  # of several bits, found only some time after the memory was read
    LINK = "link"  # a link between devices failed, and the operator's own retries with it
    OUT_OF_MEMORY = "out_of_memory"
    NODE = "node"  # a detector reported the machine; it may still run
    SWITCH = "switch"
    NETWORK = "network"
    STORAGE = "storage"
    NODE_JOINED = "node_joined"  # no fault: a world that was made smaller can grow again
    SLOW = "slow"  # a rank, or all of a node, computes more slowly than others with equal work
    SLOW_LINK = "slow_link"  # data of a node's ranks is longer on its way than that between others
    SLOW_INPUT = "slow_input"  # a rank waits longer for its data loader than others do
    RULE = "rule"  # a value that the script reports, or a line, breaks a rule of the policy, which `code` names
    REQUESTED = "requested"  # no fault: an operator asks for something at a step boundary
    DETECTOR = "detector"  # what a detector reads cannot be understood: nothing is known to be wrong with the job


class FaultLevel(StrEnum):
    """The severity of a fault; the levels of devices have MindCluster's names."""

    SOFTWARE = "Software"
    NOT_HANDLE = "NotHandleFault"
    RESTART_REQUEST = "RestartRequest"
    RESTART_BUSINESS = "RestartBusiness"
    FREE_RESTART_NPU = "FreeRestartNPU"
    RESTART_NPU = "RestartNPU"
    SEPARATE_NPU = "SeparateNPU"
    PRE_SEPARATE_NPU = "PreSeparateNPU"
    SUB_HEALTH = "SubHealthFault"
    MANUALLY_SEPARATE_NPU = "ManuallySeparateNPU"  # separated until a person has looked: it failed too often
    NODE = "Node"


class Assertion(StrEnum):
    """A detector's word on a fault that can last: it is there, it is gone, or it has passed already."""

    OCCUR = "occur"
    RECOVER = "recover"
    ONCE = "once"


class FaultReport(msgspec.Struct, frozen=True):
    """One observation of a fault.

    `at_s` is when it was said: the controller sets it, on its own clock, when it takes the report in. `age_s` is how
    long the fault had stood then, as its observer says. `generation` and `incarnation` say which process of the rank it
    is about.
    """

    kind: FaultKind
    at_s: Seconds
    seen_by: Name
    detail: Text
    rank: Rank | None = None
    node: Name | None = None
    generation: Count = 0
    incarnation: Count = 0
    level: FaultLevel = FaultLevel.SOFTWARE
    code: Name | None = None  # a device fault's code, as its detector names it
    device: Device | None = None  # the device on `node`, as its detector counts them
    fault_id: Name = ""  # the name by which its detector matches OCCUR and RECOVER; "" for what cannot last
    assertion: Assertion = Assertion.ONCE
    mendable: bool = False  # the process that has it lives, and can mend it without being replaced
    meaning: Text = ""  # of the code, in one line
    age_s: Seconds = 0.0
    output: Text = ""  # the end of what the process had printed that is gone
    trusted_step: Count | None = None  # updates after which no rank's state can be trusted; None: nothing has spread
    scores: Annotated[dict[Rank, Seconds], Meta(max_length=MOST_OF_A_RANK)] = {}  # of slow ranks: times others'

    @classmethod
    def of_rank(
        cls, kind: FaultKind, detail: str, of: tuple[int, int], *, node: str, generation: int, seen_by: str, at_s: float
    ) -> "FaultReport":
        """Report what is wrong with one process: a rank and its incarnation."""
        return cls(kind, at_s, seen_by, detail, of[0], node, generation=generation, incarnation=of[1])


# --- what an exception means ----------------------------------------------------------------------------------------


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fault that a pattern stands for.

    `mendable`: the process may mend it while it lives; it decides when it knows. `locate`: memory is damaged, and the
    device is to be asked where.
    """

    kind: FaultKind
    level: FaultLevel = FaultLevel.SOFTWARE
    mendable: bool = False
    locate: bool = False


class ExceptionPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One text of one library. At least one of `text`, `regex` and `types`, and either `fault` or `stopped`."""

    name: PatternName
    meaning: PatternText
    library: PatternName = OF_JOB
    versions: str = ""
    text: PatternText | None = None
    regex: PatternText | None = None
    types: tuple[str, ...] = ()
    fault: FaultEntry | None = None
    stopped: bool = False

    @cached_property
    def compiled(self) -> "re.Pattern[str] | None":
        """The regular expression, ready for use."""
        return None if self.regex is None else re.compile(self.regex, re.DOTALL)

    def holds_for(self, versions: Mapping[str, str]) -> bool:
        """Say whether the pattern belongs to what is installed; a library of unknown version has all its patterns."""
        installed = versions.get(self.library)
        if not self.versions or installed is None:
            return True
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return SpecifierSet(self.versions, prereleases=True).contains(Version(installed))
        except InvalidVersion:
            return True

    def mistakes(self) -> list[str]:
        """Return what is wrong between its keys, empty when nothing is."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        found = []
        if self.text is None and self.regex is None and not self.types:
            found.append("one of text, regex and types is needed")
        if (self.fault is None) == (not self.stopped):
            found.append("either fault or stopped: true is needed")
        try:
            assert self.compiled is None or self.compiled.pattern
        except re.error as error:
            found.append(f"regex: {error}")
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier as error:
            found.append(f"versions: {error}")
        return found


# --- faults that are injected ---------------------------------------------------------------------------------------


class InjectionPoint(StrEnum):
    """A place in a step or in a recovery at which a fault can be armed (`midstep inject --at`)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    REDUCTION = "reduction"  # of the gradients, where the framework has a place for it (Megatron)
    BARRIER = "barrier"
    REPLAY = "replay"  # the forward pass in which a rank repeats a step of another one (docs/integrity.md)
    UPDATE = "update"
    GATHER = "gather"  # of parameters after the update, where the framework has a place for it
    CHECKPOINT = "checkpoint"
    HOST_COPY = "host_copy"  # its bytes are there, and it is not whole yet; of the step before it
    GUEST_COPY = "guest_copy"  # the same, of the copy of a rank of another node, at the rank that keeps it
    STOP = "stop"
    CLEAN = "clean"
    JOIN = "join"
    REBUILD = "rebuild"
    REPAIR = "repair"
    ROLLBACK = "rollback"


class FaultAction(StrEnum):
    """The effect of an armed fault when its injection point is reached."""

    KILL = "kill"  # SIGKILL to the own process
    STOP = "stop"  # SIGSTOP to the own process
    RAISE = "raise"
    EXIT = "exit"  # exit status 1, without a word
    HANG = "hang"  # sleep in Python for ever
    SLOW = "slow"  # sleep for a time: with a rate of 1 in each step, as a device does that is slow
    KILL_NODE = "kill_node"  # agent and processes of the node, at once
    FLIP_PARAMETER = "flip_parameter"  # bits of a parameter, and nothing is raised
    FLIP_MOMENT = "flip_moment"  # of the optimizer's state
    FLIP_GRADIENT = "flip_gradient"  # of one that is final; at `backward`, of one that is not reduced yet
    FLIP_CHECKPOINT = "flip_checkpoint"  # of the file that this rank has written last for a checkpoint
    FLIP_ACTIVATION = "flip_activation"  # of what the next layer computes
    FLIP_REPAIR = "flip_repair"  # of a parameter that this rank sends to another one in a repair: its own stays right
    # The rest is for a device that can be harmed, which is the fake one.
    MEMORY_TEMPORARY = "memory_temporary"  # an uncorrectable error in memory that nothing lasting uses
    MEMORY_PERSISTENT = "memory_persistent"  # in a parameter
    MEMORY_OUTSIDE = "memory_outside"  # in memory that is not the framework's
    SUSPECT_MEMORY = "suspect_memory"  # an alarm, and nothing is found
    MULTI_BIT = "multi_bit"  # several bits of a parameter, noticed at once
    MULTI_BIT_LATE = "multi_bit_late"  # noticed after an update that may have used them
    UNSAFE_TENSOR = "unsafe_tensor"  # a tensor is used that no repair has overwritten
    OUT_OF_MEMORY = "out_of_memory"
    LINK_DOWN = "link_down"  # a collective's own retries failed; the link is up again afterwards
    LINK_BROKEN = "link_broken"  # the same, and the link is up again only when the communicators are rebuilt
    LINK_UP_FAILS = "link_up_fails"  # the next communicator that is built does not come up
    REMOTE = "remote"  # this device suspects another
    HANG_COLLECTIVE = "hang_collective"  # the next collective never ends
    TASK_QUEUE_DEAD = "task_queue_dead"  # the queue ends with the next collective, and no restart starts another
    DROP_DEVICE = "drop_device"  # the device is gone until it is reset


FLIP_ACTIONS = frozenset(action for action in FaultAction if action.value.startswith("flip_"))
DEVICE_FAULT_ACTIONS = frozenset(list(FaultAction)[list(FaultAction).index(FaultAction.MEMORY_TEMPORARY) :])


class FlippedBits(StrEnum):
    """The bits that a flip changes."""

    ONE = "one"  # a high one of the mantissa of an element
    SIGN = "sign"
    EXPONENT = "exponent"  # one of its bits
    ELEMENT = "element"  # it gets another value
    TENSOR = "tensor"  # a bit of each element


class ArmedFault(msgspec.Struct, frozen=True):
    """A fault to be injected into one rank, at an injection point."""

    rank: Rank
    action: FaultAction = msgspec.field(name="injury")  # the name that journals and requests have
    point: InjectionPoint | None = msgspec.field(default=None, name="moment")  # None: now
    step: Count | None = None  # index of the step, 0-based; None: any
    incarnation: Count | None = None  # only this incarnation of the rank; None: any
    operation: Name = ""  # only this collective, as torch's process groups name it; "": any. Then `point` is COLLECTIVE
    group: Annotated[tuple[Rank, ...], Meta(max_length=MOST_OF_A_RANK)] = ()  # in that of these ranks; (): any
    rate: Share = 0.0  # above 0: each time that it fits, with this probability, again and again; 0: once
    bits: FlippedBits = FlippedBits.ONE  # of a flip
    for_s: Seconds = 0.0  # how long to sleep
