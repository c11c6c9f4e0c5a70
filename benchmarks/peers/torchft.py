"""torchft: each rank is a replica group with a torchrun of its own; the newcomer heals from a live one over HTTP."""

import os
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import schedule
from .kinds import Setting
from .plan import HOST, Peer, Plan, Program, Start, free_port

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .workload import Workload

MAX_RESTARTS = 10  # what its own launch component says
REQUIREMENTS = (
    ("--no-deps", "torchft-nightly==2026.10.26"),  # it would ask for another torch
    ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
)
QUICK_LIGHTHOUSE = ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "5000", "--quorum_tick_ms", "20")
GLOO_S, GLOO_CROWDED_S = 2.0, 5.0  # with more than two ranks a core, steps can take longer than the first
CROWDED_RANKS = 8
MINIMUM = "MIDSTEP_PEERS_MIN_REPLICAS"


def launched(start: Start, ranks_of_a_group: int = 1, store: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Return a torchrun for each replica group, and their lighthouse."""
    trial, port = start.trial, free_port()
    groups = trial.ranks // ranks_of_a_group
    # A rank that hangs is never ended by torchft: there the others have to be allowed to train without it.
    minimum = max(1, groups - schedule.of(trial).places_that_hang)
    quick = QUICK_LIGHTHOUSE if start.tuned else ()
    bind = ["--bind", f"{HOST}:{port}", "--min_replicas", str(minimum)]
    lighthouse = [start.program("torchft_lighthouse"), *bind, *quick]
    quick_launcher = ("--monitor-interval", "0.05") if start.tuned else ()
    flags = ("--max-restarts", start.restarts(MAX_RESTARTS), *quick_launcher)
    shared = {**store, "TORCHFT_LIGHTHOUSE": f"http://{HOST}:{port}", "NUM_REPLICA_GROUPS": str(groups)}
    return Plan(
        [
            start.on_node(
                replica * trial.nodes // groups,
                start.torchrun(*flags, ranks=ranks_of_a_group),
                {**shared, "REPLICA_GROUP_ID": str(replica), MINIMUM: str(minimum)},
            )
            for replica in range(groups)
        ],
        servers=[Program(lighthouse, port=port)],
    )


PEER = Peer("torchft nightly", REQUIREMENTS, launched)


def train(workload: "Workload") -> None:
    """Train until all steps are committed; each step asks for a quorum, and is repeated when it fails."""
    import torchft

    place, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    network = workload.network()
    optimizer = workload.optimizer(network)
    manager = manager_of(workload, network, optimizer, GLOO_CROWDED_S if replicas >= CROWDED_RANKS else GLOO_S)
    loop(workload, manager, torchft.DistributedDataParallel(manager, network), optimizer, place)
    workload.finished(network.parameters())
    manager.shutdown()


def manager_of(
    workload: "Workload", model: "nn.Module", optimizer: "torch.optim.Optimizer", collective_s: float
) -> Any:
    """Make the manager of a replica group, which hands the state of both to a newcomer."""
    import torchft

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    tuned, collective = workload.setting is Setting.TUNED, timedelta(seconds=collective_s)
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=collective) if tuned else torchft.ProcessGroupGloo(),
        min_replica_size=int(os.environ[MINIMUM]),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}",
        use_async_quorum=False,  # else a newcomer's first step is lost, and the world differs in it
        **({"timeout": timedelta(seconds=10)} if tuned else {}),
    )


def loop(
    workload: "Workload", manager: Any, model: Any, plain: "torch.optim.Optimizer", place: int, ranks: int = 1
) -> None:
    """Do all steps. `ranks`: of a replica group."""
    import torchft

    optimizer = torchft.Optimizer(manager, plain)
    while manager.current_step() < workload.total_steps:
        optimizer.zero_grad()
        step = manager.current_step()  # a newcomer has the others' by now
        loss = model(*workload.batch(step, place))
        workload.fault_point(step, place)
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            workload.stepped(step, manager.num_participants() * ranks)
