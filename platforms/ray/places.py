"""On which machine the next node goes: a place that the job has reserved, or any other machine. Pure."""

from collections.abc import Collection, Iterable

import msgspec


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
    """
    free = [bundle for bundle in bundles if not bundle.busy]
    for bundle in free:
        if bundle.machine is None or (bundle.machine not in given_back and bundle.machine not in used):
            return InBundle(bundle.index)
    excluded = tuple(sorted({*used, *given_back}))
    if any(machine not in excluded for machine in alive) or not free:
        return None if searching else Elsewhere(excluded)
    return InBundle(free[0].index)
