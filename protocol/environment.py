"""Environment variables: those through which an agent tells a training process what it is, and those of devices.

Documents of detectors number a machine's devices. A rank takes the device of its local rank, of those that it can see.
"""

from collections.abc import Mapping

JOB = "MIDSTEP_JOB"
NODE = "MIDSTEP_NODE"
AGENT_SOCKET = "MIDSTEP_AGENT_SOCKET"  # endpoint of the agent's socket for its processors, ipc://...
GENERATION = "MIDSTEP_GENERATION"
INCARNATION = "MIDSTEP_INCARNATION"
CONNECTED = "MIDSTEP_SEATED"  # "1": the world starts together, so the process groups can be built at once
EARLY = "MIDSTEP_EARLY"  # "1": another process holds the rank for now, and speaks in its name
BLACK_BOX_FD = "MIDSTEP_BLACK_BOX_FD"
HOST_COPY_FDS = "MIDSTEP_HOST_COPY_FDS"  # of the files for copies in host memory, with commas; not set: there are none
SETTINGS = "MIDSTEP_SETTINGS"  # JobSettings as JSON
JOB_DIRECTORY = "MIDSTEP_JOB_DIRECTORY"
STORE = "MIDSTEP_STORE"  # host:port of the rendezvous store of the generation
STORE_SECRET = "MIDSTEP_STORE_SECRET"  # of the members of the generation, see Rendezvous
STARTED_S = "MIDSTEP_STARTED_S"  # when the agent began to start the process, on the machine's monotonic clock
PRELOAD = "MIDSTEP_PRELOAD"  # of an agent: what its fork server imports; "store": nothing that only training wants
GRACE_S = "MIDSTEP_GRACE_S"  # of an agent: from SIGTERM to SIGKILL, as its environment has it
VIRTUAL_LOCAL_RANK = "MIDSTEP_VIRTUAL_LOCAL_RANK"  # "1": a rank finds one GPU and LOCAL_RANK 0
MINDIO = "MIDSTEP_MINDIO"  # "1": the program finds a package mindio_ttp, which is midstep's
SCRIPT_CHECKPOINTS = "MIDSTEP_SCRIPT_CHECKPOINTS"  # the folder from which such a program loads its own checkpoints
SCRIPT_STEP = "MIDSTEP_SCRIPT_STEP"  # of the newest of these when the job began, by the program's count
FAULTS = "MIDSTEP_FAULTS"  # a JSON list of ArmedFault, for tests and demonstrations
TRAINJOB = tuple(f"KUBEFLOW_TRAINER_SERVER_{each}" for each in ("URL", "CA_CERT", "TOKEN"))  # set by Kubeflow's trainer
TRAINJOB_REPORTED = "MIDSTEP_TRAINJOB_REPORTED"  # "1": the controller reports, and ranks do not see the three above
ROLE = "MIDSTEP_ROLE"  # the name of the process's role, in a job of several, each with a script of its own
ROLES = "MIDSTEP_ROLES"  # how many ranks each role has, as JSON
ROLE_ATTEMPT = "MIDSTEP_ROLE_ATTEMPT"  # how often all roles have been started together
ROLE_STORE = "MIDSTEP_ROLE_STORE"  # the file that says where the store of the roles is
# What the container runtime has put in, as numbers of the machine: of NPUs, else of GPUs.
CONTAINER = ("ASCEND_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# What CANN or CUDA shows of those that are there.
PROCESS = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
MOST = 4096


def visible_devices(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the machine's number of each device, in the order of local ranks; empty: 0, 1, ...

    In a container that has devices 4 to 7 of its machine, CANN and CUDA number them 0 to 3, and PROCESS chooses among
    these. What is not a list of numbers is passed over: CANN or CUDA will say so.
    """
    given, chosen = (
        _numbers(next((environment[name] for name in names if environment.get(name)), ""))
        for names in (CONTAINER, PROCESS)
    )
    if not given or not chosen:
        return chosen or given
    if max(chosen) < len(given):
        return tuple(given[place] for place in chosen)
    return chosen  # more than the container has: they are the machine's numbers already


def _numbers(text: str) -> tuple[int, ...]:
    """Return `0,2`, `4-7` or `Ascend910-4,Ascend910-5` as numbers; empty if it is nothing of the kind."""
    found: list[int] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        first, dash, last = part.rpartition("-")
        low = first if first.isdigit() else last  # a range, or a name
        if dash and not first:
            return ()
        if not (low.isascii() and low.isdigit() and last.isascii() and last.isdigit()):
            return ()
        if int(last) >= MOST or int(low) > int(last):
            return ()
        found += range(int(low), int(last) + 1)
    return tuple(dict.fromkeys(found))
