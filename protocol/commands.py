"""Commands of the controller to agents, processors and platforms, in the imperative."""

import msgspec

from .types import ArmedFault, JobSpec, Rendezvous, RepairPart


class WelcomeNode(msgspec.Struct, frozen=True, tag=True):
    """The answer to NodeJoined: what the job is."""

    job: JobSpec


class IntroduceNode(msgspec.Struct, frozen=True, tag=True):
    """Report the node and its processes again (NodeJoined). To an agent that was given up for lost."""


class StartProcess(msgspec.Struct, frozen=True, tag=True):
    """Start the process of a rank; a process that holds the rank on this node now is killed first.

    `connected`: the whole world starts together, so the process groups are connected when the program makes them.
    Otherwise the newcomer makes them without peers, and connects them at Rejoin. `early`: another process keeps the
    rank for now; this one gets ready on its node, and joins when it is asked to quiesce.
    """

    rank: int
    local_rank: int
    group_rank: int
    incarnation: int
    generation: int
    restart_count: int
    connected: bool = msgspec.field(name="seated")  # the name on the wire
    store: Rendezvous
    early: bool = False
    world_size: int = 0  # ranks and nodes of the world now; 0: those that the job asked for
    nodes: int = 0


class BuildAhead(msgspec.Struct, frozen=True, tag=True):
    """Have processes built on a spare node for ranks of other nodes, each as its start there would be ordered now.

    What was built there for other ranks is ended. An empty order ends all of them.
    """

    starts: tuple[StartProcess, ...] = ()


class StopProcess(msgspec.Struct, frozen=True, tag=True):
    """End the process of a rank: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once)."""

    rank: int
    incarnation: int
    grace_s: float


class Quiesce(msgspec.Struct, frozen=True, tag=True):
    """Stop, clean and park: drop what is in flight, keep what is committed, and report the step.

    `after_step`: not now, but when so many updates are committed, between two steps, in the present generation. All
    ranks then stop by themselves at one place, nothing is in flight, and no step has to be repeated. `replaces`: some
    rank gets another process.
    """

    rank: int
    generation: int
    after_step: int | None = None
    replaces: bool = False


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Rebuild the communicators of `generation` at `store`, repair and roll back by `part`."""

    rank: int
    generation: int
    store: Rendezvous
    connected: bool = msgspec.field(name="seated")  # the groups were built for this generation at start: no rebuild
    part: RepairPart


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Call the train function again; the next step's 0-based index is `step`."""

    rank: int
    generation: int
    step: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let the train function return to the user's script: all ranks have finished."""

    rank: int
    generation: int


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write what this parked rank holds into an emergency checkpoint of `step`.

    Every rank writes its local state, its peer copies, and the shards that are named; the one with
    `publish`, which comes last, makes the checkpoint complete. `writers`: the ranks that write shards. With `answer`
    False the rank writes with the others and is asked again to publish: where a script writes, ranks need each other.
    """

    rank: int
    generation: int
    step: int
    publish: bool
    shards: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()
    answer: bool = True


# A rank that is ordered one of these in a later generation need not hear those of earlier ones any more.
OF_A_GENERATION = (Quiesce, Rejoin, Resume, Release, SaveCheckpoint)


class ProbeProgress(msgspec.Struct, frozen=True, tag=True):
    """Read the step clocks of the node now."""

    probe: int


class ArmFault(msgspec.Struct, frozen=True, tag=True):
    """Inject a fault. An agent sends signals and kills its node; a processor does what waits for an injection point."""

    fault: ArmedFault


class CheckNode(msgspec.Struct, frozen=True, tag=True):
    """Check the node, and answer with NodeChecked.

    Compute a matrix product, if it `computes`; and exchange bytes with a partner that meets this node at `store`, if
    there is one. `number`: 0 or 1, of the two.
    """

    check: int
    within_s: float
    computes: bool
    number: int
    store: Rendezvous | None


class CreateNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform: make a node and start its agent."""

    node: str


class DeleteNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform: end the node's agent and everything on it, and forget it."""

    node: str


class KillNode(msgspec.Struct, frozen=True, tag=True):
    """To the platform, for injected faults: agent and processes of the node die at once."""

    node: str


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """To agents and platform: the job is over. Agents end what they started and leave."""

    exit_code: int
    reason: str
