"""What a rank runs, with environment variables: torchrun's, so that scripts need no change, and midstep's own."""

from collections.abc import Mapping

import msgspec

from ..protocol import environment as names
from ..protocol.messages import StartProcess
from ..protocol.types import JobSpec
from . import channel

THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What torchrun sets unless the user has.
DEFAULTS = {**dict.fromkeys(THREAD_LIMITS, "1"), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
ROLE = "default"


def rank_environment(
    base: Mapping[str, str],
    job: JobSpec,
    order: StartProcess,
    *,
    node: str,
    agent_socket: str,
    started_s: float,
) -> dict[str, str]:
    """Return the environment of a training process: the agent's (`base`), the job's, and the rank's on top.

    Threads are limited to one per rank unless the user has set a limit, as torchrun does.
    """
    rank = {
        "RANK": order.rank,
        "LOCAL_RANK": order.local_rank,
        "GROUP_RANK": order.group_rank,
        "ROLE_RANK": order.rank,
        "ROLE_NAME": ROLE,
        "WORLD_SIZE": order.world_size or job.world_size,
        "LOCAL_WORLD_SIZE": job.ranks_per_node,
        "GROUP_WORLD_SIZE": order.nodes or job.nodes,
        "ROLE_WORLD_SIZE": order.world_size or job.world_size,
        "MASTER_ADDR": order.store.host,
        "MASTER_PORT": order.store.port,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.job,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 must not serve the store itself
        names.JOB: job.job,
        names.NODE: node,
        names.AGENT_SOCKET: agent_socket,
        names.GENERATION: order.generation,
        names.INCARNATION: order.incarnation,
        names.CONNECTED: int(order.connected),
        names.EARLY: int(order.early),
        names.SETTINGS: msgspec.json.encode(job.settings).decode(),
        names.JOB_DIRECTORY: job.job_directory,
        names.STORE: f"{order.store.host}:{order.store.port}",
        names.STORE_SECRET: order.store.secret,
        names.STARTED_S: started_s,
    }
    return {**DEFAULTS, **base, **job.environment, **{name: str(value) for name, value in rank.items()}}


def rank_program(job: JobSpec, environment: Mapping[str, str]) -> channel.RunProgram:
    """Return what a training process is to run, in its environment."""
    return channel.RunProgram(
        command=job.command,
        is_module=job.is_module,
        no_python=job.no_python,
        environment=dict(environment),
        working_directory=job.working_directory,
    )
