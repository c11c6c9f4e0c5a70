"""Asks Ray for one job's placement group and one actor for each node, and chooses where the next node goes.

All calls block on Ray's control store. Names lead from a controller's actor that Ray has started again to what the one
before had made; both are detached, so nothing ends with who made it.
"""

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from .agent_actor import METHODS_AT_ONCE, AgentActor, NodeOrder
from .library import library

NAMESPACE = "midstep"
# An actor may be in a placement group that is handed down to all that it makes without a strategy of their own.
OUTSIDE_OF_GROUPS = "DEFAULT"
_NODE_ID_LABEL = "ray.io/node-id"
_CPU, _GPU = "CPU", "GPU"


class Bundle(msgspec.Struct, frozen=True):
    """A place of the job's placement group. `machine`: None while Ray looks for one. `busy`: a node has it."""

    index: int
    machine: str | None
    busy: bool


class InBundle(msgspec.Struct, frozen=True):
    """The node takes a reserved place; Ray looks for a machine if it has none."""

    index: int


class Elsewhere(msgspec.Struct, frozen=True):
    """The node goes to any machine but these. While there is none, Ray's autoscaler sees the request."""

    excluded: tuple[str, ...]


Place = InBundle | Elsewhere


class RayClient:
    """The part of a Ray cluster that one job has."""

    def __init__(self, job: str, resources: dict[str, float]) -> None:
        """`resources`: of one node, as Ray counts them. Raises ConfigurationError where there is no Ray."""
        self._ray = library()
        self._job = job
        self._resources = resources
        self._group: Any = None

    def reserve(self, nodes: int) -> None:
        """Ask for a machine of its own for each of so many nodes, or find what was asked for before."""
        ray = self._ray
        name = _group_name(self._job)
        with contextlib.suppress(ValueError):
            self._group = ray.util.get_placement_group(name)
            return
        self._group = ray.util.placement_group(
            [dict(self._resources)] * nodes, strategy="STRICT_SPREAD", name=name, lifetime="detached"
        )

    def bundles(self, busy: set[int]) -> list[Bundle]:
        """Return the places of the group."""
        table = self._ray.util.placement_group_table(self._group)
        where: dict[int, str] = table.get("bundles_to_node_id", {})
        alive = self.alive()
        return [
            Bundle(index, where[index] if where.get(index) in alive else None, index in busy)
            for index in sorted(table["bundles"])
        ]

    def start(self, order: NodeOrder, place: Place) -> Any:
        """Have Ray place the actor of a node; returns at once with its handle."""
        ray = self._ray
        options: dict[str, Any] = {
            "name": _actor_name(order.job, order.node),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": METHODS_AT_ONCE,
            **actor_resources(self._resources),
        }
        match place:
            case InBundle(index=index):
                order = msgspec.structs.replace(order, bundle=index)
                options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                )
            case Elsewhere(excluded=excluded) if excluded:
                options["label_selector"] = {_NODE_ID_LABEL: f"!in({','.join(excluded)})"}
        return ray.remote(AgentActor).options(**options).remote(order)

    def existing(self) -> dict[str, Any]:
        """Return the actors of this job's nodes that Ray knows, by the nodes' names."""
        prefix = _actor_name(self._job, "")
        found = {}
        for each in self._ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == NAMESPACE and each["name"].startswith(prefix):
                with contextlib.suppress(ValueError):  # it has ended since
                    found[each["name"].removeprefix(prefix)] = self._ray.get_actor(each["name"], NAMESPACE)
        return found

    def alive(self) -> set[str]:
        """Return the ids of the machines that Ray believes to be alive."""
        return {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}

    def draining(self) -> dict[str, float]:
        """Return the machines that Ray is about to take away, with when (seconds since 1970, 0: not said)."""
        state = getattr(getattr(self._ray, "_private", None), "state", None)
        ask = getattr(getattr(state, "state", None), "get_draining_nodes", None)
        if ask is None:  # not a public part of Ray: a later one may have it elsewhere
            return {}
        return {machine: at_ms / 1000.0 for machine, at_ms in ask().items()}

    def discard(self, actor: Any) -> None:
        """Have Ray end an actor and forget it."""
        self._ray.kill(actor, no_restart=True)

    def release(self) -> None:
        """Give the placement group back, and end every actor of a node that is left. Idempotent."""
        for actor in self.existing().values():
            self.discard(actor)
        with contextlib.suppress(ValueError):
            self._ray.util.remove_placement_group(self._ray.util.get_placement_group(_group_name(self._job)))


def controller_name(job: str) -> str:
    """Return the name of the actor that has a job's controller."""
    return f"{job}/controller"


def _actor_name(job: str, node: str) -> str:
    return f"{job}/node/{node}"


def _group_name(job: str) -> str:
    return f"midstep/{job}"


def actor_resources(resources: dict[str, float]) -> dict[str, Any]:
    """Return Ray's options of an actor that takes these resources."""
    others = {name: amount for name, amount in resources.items() if name not in {_CPU, _GPU}}
    return {
        "num_cpus": resources.get(_CPU, 0),
        "num_gpus": resources.get(_GPU, 0),
        **({"resources": others} if others else {}),
    }


def place_for(
    bundles: Iterable[Bundle],
    *,
    alive: Collection[str],
    used: Collection[str],
    given_back: Collection[str],
    searching: bool = False,
) -> Place | None:
    """Return where the next node goes; None: that has to wait.

    `alive`: the machines of the cluster; `used`: those on which nodes of the job live; `given_back`: those that the job
    has left. One of these is taken again only where there is no other. `searching`: a node was sent elsewhere and has
    no machine yet. Another one is not sent there meanwhile: both could get the same machine, which Ray cannot exclude.
    The machine of a busy place is used from the start: its actor may not have answered yet.
    """
    places = list(bundles)
    lived_on = {*used, *(place.machine for place in places if place.busy and place.machine is not None)}
    free = [place for place in places if not place.busy]
    for place in free:
        if place.machine is None or (place.machine not in given_back and place.machine not in lived_on):
            return InBundle(place.index)
    excluded = tuple(sorted({*lived_on, *given_back}))
    if any(machine not in excluded for machine in alive) or not free:
        return None if searching else Elsewhere(excluded)
    return InBundle(free[0].index)
